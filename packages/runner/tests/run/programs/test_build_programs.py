"""What a run evaluates and decodes: by default, by configuration, of training data; early stops.

Runs of a few steps of the tiny model, in this process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.base.base_model import BaseModel
from layerkit.config import Config
from layerkit.errors import MISSING, UserError
from layerkit.layers.basic.linears import Linear
from layerkit_runner import BaseExperiment, UsageError
from layerkit_runner.config.config_tree import config_text
from layerkit_runner.config.requests import Override
from layerkit_runner.observers import Observer, read_metrics
from layerkit_runner.optim.early_stopping import EarlyStopping
from layerkit_runner.run.programs.decode_program import DecodeProgram
from layerkit_runner.run.programs.eval_program import BaseProgram, EvalProgram
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions
from layerkit_runner.step.task_metrics import Histogram, Max
from layerkit_runner.step.train_state import TrainState


class Norm(BaseProgram):
    """A custom program that reports the largest weight, times a factor."""

    def __init__(self, *given: Any, factor: float = 1.0, **named: Any) -> None:
        super().__init__(*given, **named)
        self.factor = factor

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        weights = state.params["linear"]["w"]
        metrics = {"largest": self.factor * float(abs(weights).max())}
        observers.eval_metrics(step, self.name, metrics)
        return metrics


@pytest.fixture(scope="module")
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Tiny(BaseExperiment):
        MAX_STEPS: int = 6
        EVAL_SKIP_TRAIN: bool = True
        RATE: float = 0.01
        PATIENCE: int | None = None
        EVALS: tuple[Any, ...] | None = None
        DECODES: tuple[Any, ...] | None = None

        def task(self) -> Config:
            train = {
                "num_train_steps": self.MAX_STEPS,
                "eval_interval_steps": 2,
                "save_interval_steps": 2,
                "summary_interval_steps": 1,
                "eval_skip_train": self.EVAL_SKIP_TRAIN,
            }
            learner = {"learning_rate": self.RATE, "ema_decay": 0.99}
            task = tiny.task_config(learner=learner, train=train)
            if self.PATIENCE is not None:
                task.early_stopping = EarlyStopping.HParams.config(
                    metric="points/loss", patience=self.PATIENCE
                )
            return task

        def datasets(self) -> list[Config]:
            points = tiny.Points.HParams
            return [
                points.config(name="train", is_training=True, percore_batch_size=1.0),
                points.config(name="points", percore_batch_size=1.0),
            ]

        def decode_datasets(self) -> list[Config]:
            return [tiny.Prompts.HParams.config(name="prompts", percore_batch_size=1.0)]

        def eval_programs(self) -> list[Config] | None:
            return None if self.EVALS is None else list(self.EVALS)

        def decode_programs(self) -> list[Config] | None:
            return None if self.DECODES is None else list(self.DECODES)

    return Tiny


Train = Callable[..., str]


def options(folder: Path) -> RunOptions:
    return RunOptions(job_log_dir=str(folder), jax_compilation_cache="off")


@pytest.fixture
def train(experiment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """Trains in a folder of this name; what was printed."""

    def run(name: str, *, overrides: Sequence[Override] = (), **fields: Any) -> str:
        assert run_train(resolve(experiment(**fields), overrides), options(tmp_path / name)) == 0
        return capsys.readouterr().out

    return run


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder).train]


def evaluated(folder: Path) -> dict[str, list[int]]:
    result = read_metrics(folder).evals
    return {name: [record["step"] for record in series] for name, series in result.items()}


def test_programs_run_at_their_own_intervals(train: Train, experiment: Any, tmp_path: Path):
    evals = (
        Config(EvalProgram, dataset="points"),
        Config(EvalProgram, dataset="points", name="averaged", use_ema_states=True),
        Config(Norm, name="norm", interval_steps=3, factor=2.0),
    )
    decodes = (Config(DecodeProgram, dataset="prompts", name="often", interval_steps=3),)
    fields = {"EVALS": evals, "DECODES": decodes}
    override = Override("eval_programs.2.interval_steps", "5")
    train("job", overrides=(override,), **fields)
    folder = tmp_path / "job"
    assert evaluated(folder) == {"points": [2, 4, 6], "averaged": [2, 4, 6], "norm": [5, 6]}
    result = read_metrics(folder).evals
    assert result["averaged"][-1]["loss"] != result["points"][-1]["loss"]
    assert result["norm"][-1]["largest"] > 0
    decoded = sorted(path.name for path in (folder / "decode" / "often").glob("*.jsonl"))
    assert decoded == ["step_00000003.jsonl", "step_00000006.jsonl"]
    text = config_text(resolve(experiment(**fields), (override,)))
    assert "eval_programs.2 = Norm\n" in text
    assert "eval_programs.2.interval_steps = 5\n" in text
    assert "\neval_programs" not in config_text(resolve(experiment()))


@pytest.mark.slow  # test_train_programs.py has one
def test_the_next_training_batch_is_evaluated_and_still_trained_on(train: Train, tmp_path: Path):
    plain, looking = tmp_path / "plain", tmp_path / "looking"
    train("plain")
    train("looking", EVAL_SKIP_TRAIN=False, MAX_STEPS=4)
    train("looking", EVAL_SKIP_TRAIN=False)
    assert losses(looking) == losses(plain)
    assert evaluated(looking) == {"points": [2, 4, 6], "train": [2, 4, 6]}
    ahead = {record["step"]: record["loss"] for record in read_metrics(looking).evals["train"]}
    # The loss of step n+1 is that of its batch before the update. (The model has no dropout.)
    assert ahead[2] == pytest.approx(losses(plain)[2])
    assert ahead[4] == pytest.approx(losses(plain)[4])
    assert (looking / "summaries" / "eval_train").is_dir()


def test_run_that_stopped_early_does_not_train_on(train: Train, tmp_path: Path):
    """Every step of rate 1 makes this model worse."""
    settings = {"RATE": 1.0, "MAX_STEPS": 20, "PATIENCE": 1}
    first = train("job", **settings)
    message = "stopped early after step 4: points/loss did not improve on "
    assert message in first
    assert "loss curve" in first  # the end report, as of any finished run
    again = train("job", **settings)
    assert message in again
    assert "task.early_stopping=None" in again
    assert len(losses(tmp_path / "job")) == 4
    other = train("job", **{**settings, "PATIENCE": 2})
    assert "early stopping is reset, because its settings were EarlyStopping(" in other
    assert "stopped early after step 10: " in other
    metadata = json.loads(
        next((tmp_path / "job" / "checkpoints").glob("*10/metadata/metadata*")).read_text()
    )
    assert metadata["user"]["early_stopping"]["stopped_at"] == 10


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"EVALS": (Config(EvalProgram, dataset="points"),) * 2}, "name", "points"),
        ({"DECODES": (Config(DecodeProgram, name="x"),)}, "decode_programs.0.dataset", MISSING),
        (
            {"EVALS": (Config(EvalProgram, dataset="points", interval_steps=0),)},
            "interval_steps",
            0,
        ),
    ],
)
def test_wrong_programs_are_an_error_before_a_file_is_written(
    raises: Any, experiment: Any, tmp_path: Path, fields: dict[str, Any], field: str, value: Any
):
    with raises(UserError, field=field, value=value):
        run_train(resolve(experiment(**fields)), options(tmp_path / "job"))
    assert not (tmp_path / "job").exists()


class Twice(EvalProgram):
    """Reports one metric more than what it derives from."""

    def run(self, *given: Any) -> dict[str, float]:
        metrics = super().run(*given)
        return {**metrics, "twice": 2 * metrics["loss"]}


@pytest.mark.parametrize(
    ("evals", "metric"),
    [
        ([Config(Twice, dataset="points")], "points/twice"),
        (
            [Config(EvalProgram, dataset="points", name=name) for name in ("points", "points/b")],
            "points/b/loss",
        ),
    ],
)
def test_custom_evaluation_metrics_may_choose_the_best_checkpoint(
    train: Train, evals: list[Any], metric: str
):
    train("job", EVALS=tuple(evals), overrides=[Override("task.train.save_best_metric", metric)])


@pytest.mark.parametrize("field", ["task.train.save_best_metric", "task.early_stopping.metric"])
def test_unknown_metric_is_an_error_before_the_first_step(
    raises: Any, experiment: Any, tmp_path: Path, field: str
):
    resolved = resolve(experiment(PATIENCE=1), [Override(field, "points/lss")])
    resolved.task.metrics = {
        "spread": Histogram.HParams.config(value="batch/y", low=0.0, high=2.0),
        "worst": Max.HParams.config(value="metrics/loss"),
    }
    names = [f"points/{name}" for name in ("loss", "skipped_records", "total_weight", "worst")]
    with raises(UsageError, field=field, value="points/lss", choices=tuple(names)):
        run_train(resolved, options(tmp_path / "job"))
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"save_best_metric": "pionts/loss"}, "save_best_metric", "pionts/loss"),
        (
            {"save_best_metric": "points/loss", "save_interval_steps": "3"},
            "eval_interval_steps",
            2,
        ),
    ],
)
def test_best_metric_without_an_evaluation_at_every_checkpoint_is_an_error(
    raises: Any, experiment: Any, changes: dict[str, str], field: str, value: Any, tmp_path: Path
):
    overrides = [Override(f"task.train.{name}", text) for name, text in changes.items()]
    with raises(UsageError, field=f"task.train.{field}", value=value):
        run_train(resolve(experiment(), overrides), options(tmp_path / "job"))


@pytest.mark.parametrize("field", ["decode_datasets", "decode_programs"])
def test_decoding_without_a_model_that_decodes_is_an_error_before_a_file_is_written(
    raises: Any, experiment: Any, tmp_path: Path, field: str
):
    class Silent(BaseModel):
        def setup(self) -> None:
            self.create_child("linear", Linear.HParams.config(input_dims=2, output_dims=1))

    listed = field == "decode_programs"
    fields = {"DECODES": (Config(DecodeProgram, dataset="prompts"),)} if listed else {}
    resolved = resolve(experiment(**fields))
    resolved.task.model = Silent.HParams.config()
    with raises(UsageError, owner=f"{resolved.name}.{field}()", field="model"):
        run_train(resolved, options(tmp_path / "job"))
    assert not (tmp_path / "job").exists()
