"""Several training programs that take turns, and an executor of the experiment's own."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config import Config
from layerkit.errors import UserError
from layerkit_runner import BaseExperiment
from layerkit_runner.config.requests import Override
from layerkit_runner.observers import read_metrics
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.run.executor import Executor
from layerkit_runner.run.inference import run_inference
from layerkit_runner.run.programs.eval_program import EvalProgram
from layerkit_runner.run.programs.train_program import TrainProgram
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions
from layerkit_runner.step.task_metrics import Max
from layerkit_runner.step.train_state import TrainState
from layerkit_runner.tools.plan.plan import make_plan

ROWS = {"few": 8, "many": 16}
"""Rows of a global batch, by data set."""
NUM_ROWS = {"few": 7, "many": 5}
"""Rows of each data set."""
LEARNING_RATE = 0.05


class Counting(TrainProgram):
    """A custom training program that records its step numbers."""

    started: dict[str, list[int]] = {}

    def __init__(self, *given: Any, key: str = "", **named: Any) -> None:
        super().__init__(*given, **named)
        self._key = key

    def start_step(self, state: TrainState, step: int, *rest: Any) -> TrainState:
        self.started.setdefault(self._key, []).append(step)
        return super().start_step(state, step, *rest)


class Needing(TrainProgram):
    """A training program with a required field."""

    def __init__(self, *given: Any, factor: float, **named: Any) -> None:
        super().__init__(*given, **named)


@dataclasses.dataclass
class Patient(Executor):
    """An executor that also evaluates before step 1, and ends once the loss is small enough."""

    good_enough: float = 0.0
    loss: float = float("inf")

    def run(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        if step == 0:
            self.run_due(state, 0)
        return super().run(state, step)

    def evaluate(self, state: TrainState, step: int, programs: Any = None) -> Any:
        result = super().evaluate(state, step, programs)
        self.loss = result.get("held", {}).get("loss", self.loss)
        return result

    def is_over(self, step: int) -> bool:
        return super().is_over(step) or self.loss < self.good_enough


@pytest.fixture(scope="module")
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class TakingTurns(BaseExperiment):
        """Two steps on few rows, one on many, and so on."""

        MAX_STEPS: int = 7
        SUMMARY_INTERVAL_STEPS: int = 1
        EVAL_SKIP_TRAIN: bool = True
        TRAINED_ON: tuple[str, ...] = ("few", "many")
        PROGRAMS: tuple[Any, ...] | None = (
            Config(TrainProgram, dataset="few", steps=2),
            Config(TrainProgram, dataset="many"),
        )
        EXECUTOR: Any = None
        PMAP: bool = False

        def task(self) -> Config:
            train = {
                "num_train_steps": self.MAX_STEPS,
                "eval_interval_steps": 2,
                "save_interval_steps": 100,
                "summary_interval_steps": self.SUMMARY_INTERVAL_STEPS,
                "eval_skip_train": self.EVAL_SKIP_TRAIN,
                "save_max_to_keep": None,
            }
            task = tiny.task_config(learner={"learning_rate": LEARNING_RATE}, train=train)
            return task.set(metrics={"worst": Max.HParams.config(value="metrics/loss")})

        def datasets(self) -> list[Config]:
            training = [
                tiny.Points.HParams.config(
                    name=name,
                    num_rows=NUM_ROWS[name],
                    is_training=True,
                    shuffle=False,
                    percore_batch_size=ROWS[name] / 8,
                )
                for name in self.TRAINED_ON
            ]
            return [*training, tiny.Points.HParams.config(name="held", percore_batch_size=1.0)]

        def train_programs(self) -> list[Config] | None:
            return None if self.PROGRAMS is None else list(self.PROGRAMS)

        def executor(self) -> Config | None:
            return self.EXECUTOR

        def partitioner(self) -> Config:
            return (PmapPartitioner if self.PMAP else SpmdPartitioner).HParams.config()

    return TakingTurns


@pytest.fixture
def train(
    experiment: type[BaseExperiment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that trains in a folder of this name and returns the output."""

    def run(name: str, *, changes: tuple[Override, ...] = (), **fields: Any) -> str:
        options = RunOptions(job_log_dir=str(tmp_path / name), jax_compilation_cache="off")
        assert run_train(resolve(experiment(**fields), changes), options) == 0
        return capsys.readouterr().out

    return run


def reference(num_steps: int, turns: tuple[str, ...]) -> list[tuple[str, float]]:
    """Return the data set and the loss of each step, computed by NumPy."""
    w, read, result = np.ones(2), dict.fromkeys(ROWS, 0), []
    for step in range(num_steps):
        name = turns[step % len(turns)]
        rows = np.arange(read[name], read[name] + ROWS[name]) % NUM_ROWS[name]
        read[name] += ROWS[name]
        x, y = np.stack([rows % 5, np.ones_like(rows)], axis=1), rows % 3
        errors = x @ w - y
        result.append((name, float(np.mean(0.5 * errors**2))))
        w = w - LEARNING_RATE * errors @ x / len(rows)
    return result


TURNS = ("few", "few", "many")


def records(folder: Path) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in read_metrics(folder).train}


@pytest.mark.parametrize("pmap", [False, True])
def test_losses_are_those_of_a_plain_loop(train: Any, tmp_path: Path, pmap: bool):
    output = train("job", PMAP=pmap)
    for step, (name, loss) in enumerate(reference(7, TURNS), start=1):
        record = records(tmp_path / "job")[step]
        assert record["loss"] == record[f"{name}/loss"] == pytest.approx(loss, rel=1e-5)
        (other,) = ROWS.keys() - {name}
        assert f"{other}/loss" not in record
        # Metrics are reported under the data set's name; the loss is also reported as `loss`.
        assert f"{name}/worst" in record
        assert "worst" not in record
    assert re.search(r"^step 1/7 \| loss \d\.\d{4} \(few\)", output, re.MULTILINE)
    assert "program      few, 2 of every 3 steps\n" in output
    assert "program      many, 1 of every 3 steps\n" in output
    assert read_metrics(tmp_path / "job").info["examples_per_step"] == pytest.approx(32 / 3)


def test_run_resumed_within_a_round_equals_an_uninterrupted_one(train: Any, tmp_path: Path):
    train("straight")
    for steps in (1, 5, 7):
        train("job", MAX_STEPS=steps)
    one, other = records(tmp_path / "straight"), records(tmp_path / "job")
    assert one.keys() == other.keys() == set(range(1, 8))
    assert [one[step]["loss"] for step in one] == [other[step]["loss"] for step in one]


def test_every_program_is_summarized_whatever_the_interval(train: Any, tmp_path: Path):
    """Steps 3, 6 and 9 belong to `many`, so `few` is summarized at its next step."""
    train("job", MAX_STEPS=10, SUMMARY_INTERVAL_STEPS=3)
    seen = records(tmp_path / "job")
    told = {step: "few" if "few/loss" in record else "many" for step, record in seen.items()}
    names = {1: "few", 3: "many", 4: "few", 6: "many", 7: "few", 9: "many", 10: "few"}
    assert told == names


def test_the_next_batches_of_each_program_are_evaluated(train: Any, tmp_path: Path):
    train("job", EVAL_SKIP_TRAIN=False)
    seen = read_metrics(tmp_path / "job")
    at_2 = {n: r["loss"] for n, result in seen.evals.items() for r in result if r["step"] == 2}
    # Step 3, the first on `many`, trains on the batch that was evaluated at step 2.
    assert at_2["train/many"] == pytest.approx(records(tmp_path / "job")[3]["loss"])
    assert at_2.keys() == {"train/few", "train/many", "held"}
    folders = {path.name for path in (tmp_path / "job" / "summaries").iterdir() if path.is_dir()}
    assert folders == {"train", "eval_train_few", "eval_train_many", "eval_test_held"}


@pytest.mark.slow
def test_resumed_run_reports_the_metric_of_its_next_batches(train: Any, tmp_path: Path):
    """Metric names are looked up before input positions are restored."""
    fields = {"EVAL_SKIP_TRAIN": False}
    best = (
        Override("task.train.save_best_metric", "train/few/loss"),
        Override("task.train.save_interval_steps", "2"),
    )
    train("straight", changes=best, **fields)
    train("job", changes=best, MAX_STEPS=4, **fields)
    train("job", changes=best, **fields)
    one, other = records(tmp_path / "straight"), records(tmp_path / "job")
    assert [one[step]["loss"] for step in one] == [other[step]["loss"] for step in one]


def test_training_data_sets_may_be_added_and_removed(train: Any, tmp_path: Path):
    train("job", MAX_STEPS=3, TRAINED_ON=("few",), PROGRAMS=None)
    output = train("job", MAX_STEPS=7)
    notice = "the checkpoint has no input position for train/many: reading from the beginning\n"
    assert notice in output
    assert positions(tmp_path / "job", 7) == {"train/few": 8 * (3 + 3), "train/many": 16 * 1}
    output = train("job", MAX_STEPS=9, TRAINED_ON=("few",), PROGRAMS=None)
    assert "from the beginning" not in output
    assert positions(tmp_path / "job", 9) == {"train/few": 8 * (3 + 3 + 2)}


def positions(folder: Path, step: int) -> dict[str, int]:
    """Return the rows read of each data set, as stored in a checkpoint."""
    states = folder / "checkpoints" / f"checkpoint_{step:08d}" / "input_states"
    stored = json.loads((states / "process_00000_of_00001.json").read_text())
    return {name: state["position"]["rows_done"] for name, state in stored.items()}


def test_custom_training_program_runs(train: Any):
    Counting.started.clear()
    own = Config(Counting, dataset="many", key="mine")
    train("job", PROGRAMS=(Config(TrainProgram, dataset="few", steps=2), own))
    assert Counting.started == {"mine": [3, 6]}


def test_fields_of_programs_are_set_from_outside(train: Any, tmp_path: Path):
    train("job", changes=(Override("train_programs.1.steps", "3"),))
    for step, record in records(tmp_path / "job").items():
        assert f"{'many' if step in (3, 4, 5) else 'few'}/loss" in record


def test_custom_executor_ends_the_run(
    train: Any, experiment: type[BaseExperiment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train("job", MAX_STEPS=50, EXECUTOR=Config(Patient, good_enough=0.55))
    losses = {r["step"]: r["loss"] for r in read_metrics(tmp_path / "job").evals["held"]}
    last = max(losses)
    assert min(losses) == 0
    assert losses[last] < 0.55 <= min(loss for step, loss in losses.items() if step < last)
    assert max(records(tmp_path / "job")) == last < 50
    # The run ends after an evaluation and does not repeat it.
    lines = (tmp_path / "job" / "metrics.jsonl").read_text().splitlines()
    assert sum('"dataset": "held"' in line for line in lines) == len(losses)
    # A job that watches the checkpoints sees that training ended.
    options = RunOptions(
        job_log_dir=str(tmp_path / "job"), jax_compilation_cache="off", follow_timeout_secs=600.0
    )
    assert run_inference("eval", resolve(experiment(MAX_STEPS=50)), options) == 0
    told = capsys.readouterr().out
    assert f"step {last} is the last: the training job ended early\n" in told


@pytest.mark.parametrize(
    ("fields", "data"),
    [
        ({"PROGRAMS": None}, {"field": "datasets()", "value": ["few", "many"]}),
        ({"PROGRAMS": ()}, {"field": "train_programs()", "value": []}),
        (
            {"PROGRAMS": (Config(TrainProgram, dataset="fwe"),)},
            {"field": "train_programs.0.dataset", "value": "fwe", "choices": ("few", "many")},
        ),
        (
            {"PROGRAMS": (Config(TrainProgram, dataset="few"),) * 2},
            {"field": "train_programs()", "value": ["few", "few"]},
        ),
        ({"PROGRAMS": tuple(Config(Needing, dataset=name) for name in ROWS)}, {"field": "factor"}),
        (
            {"PROGRAMS": tuple(Config(EvalProgram, dataset=name) for name in ROWS)},
            {"field": "train_programs.0", "value": "EvalProgram"},
        ),
        ({"EXECUTOR": Config(TrainProgram)}, {"field": "executor", "value": "TrainProgram"}),
    ],
)
def test_wrong_programs_are_an_error_before_a_file_is_written(
    raises: Any, train: Any, tmp_path: Path, fields: dict[str, Any], data: dict[str, Any]
):
    with raises(UserError, **data):
        train("job", **fields)
    assert not (tmp_path / "job" / "config.json").exists()
    assert not (tmp_path / "job" / "checkpoints").exists()


@pytest.mark.parametrize(("index", "name"), [(0, "few"), (1, "many")])
def test_a_plan_is_of_the_step_with_the_largest_batch(
    experiment: type[BaseExperiment], index: int, name: str
):
    large = Override(f"datasets.{index}.percore_batch_size", "4096.0")
    plan = make_plan(resolve(experiment(), [large]), jax.devices())
    assert plan.batch.rows == 8 * 4096
    (other,) = ROWS.keys() - {name}
    note = f"the step on {name}, which has the largest batch; that on {other} is not compiled"
    assert note in plan.notes
