"""Stages of a run: their steps, their reports, and stages that cannot run."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from layerkit.config import Config
from layerkit_inputs import Mixture
from layerkit_runner import BaseExperiment, Override, UsageError
from layerkit_runner.config.stages import Stage, stages_of
from layerkit_runner.data.train_inputs import run_stages
from layerkit_runner.errors import FieldError
from layerkit_runner.init_from import InitFrom, Source
from layerkit_runner.observers import read_metrics
from layerkit_runner.run import resolve as resolving
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions


@pytest.fixture(scope="module")
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Failing(tiny.Regression):
        """A model that cannot be traced, or compiled, for batches of more rows."""

        max_rows: int = 1000
        is_traced: bool = True

        def compute_loss(self, predictions: jax.Array, batch: Any) -> Any:
            if len(predictions) > self.max_rows:
                if not self.is_traced:
                    raise ValueError(f"{len(predictions)} rows are too many")
                missing = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((), "float32"))
                predictions = predictions + jax.lax.stop_gradient(missing())
            return super().compute_loss(predictions, batch)

    class Staged(BaseExperiment):
        STAGES: list[Stage] | None = None
        STEPS: int = 5
        LENGTH: int = 12
        MAX_ROWS: int = 1000
        IS_TRACED: bool = True
        stage_fields = {"stages": "STAGES", "num_steps": "STEPS", "row_length": "LENGTH"}

        def task(self) -> Config:
            train = {"num_train_steps": self.STEPS, "summary_interval_steps": 3}
            task = tiny.task_config(learner={"learning_rate": 0.01}, train=train)
            task.model = Failing.HParams.config(max_rows=self.MAX_ROWS, is_traced=self.IS_TRACED)
            return task

        def datasets(self) -> list[Config]:
            return [tiny.Points.HParams.config(is_training=True, percore_batch_size=1.0)]

    return Staged


def test_steps_follow_from_tokens_once(experiment: type[BaseExperiment]):
    stages = [{"until_step": 3, "batch": 4, "length": 6}, {"until_tokens": 200}, {"until_step": 12}]
    made = experiment(STAGES=stages)
    # 72 tokens in three steps; 128 more take six steps of 24. What is left out stays as it was.
    steps = [(s.first_step, s.last_step, s.num_steps, s.batch, s.length) for s in stages_of(made)]
    assert steps == [(1, 3, 3, 4, 6), (4, 9, 6, 4, 6), (10, 12, 3, 4, 6)]
    assert made.STEPS == 12 and stages_of(experiment()) == []


@pytest.mark.parametrize(
    ("stages", "field"),
    [
        ([{"until_step": 3, "batch": "4"}], "batch"),
        ([{"until_step": 3, "batch": 0}], "batch"),
        ([{"until_step": 3, "length": 5}], "length"),
        ([{"batch": 4}], "end"),
        ([{"until_step": 3, "until_tokens": 3}], "end"),
        ([{"until_tokens": 30}], "batch"),
        ([{"until_step": 3}, {"until_step": 4, "batch": 4}, {"until_tokens": 99}], "batch"),
        ([{"until_step": 3, "mixture": {"web": 0}}], "mixture"),
        ([{"until_step": 3, "mixture": {"web": [1, 2, 3]}}], "mixture"),
        ([{"until_step": 3, "mixture": {"web": math.inf}}], "mixture"),
        ([7], "stage"),
        ([{"until_step": 3}, {"until_step": 3}], "until_step"),
        ([{"until_step": 3, "batch": 4}, {"until_tokens": 3}], "until_tokens"),
        ([{"until_steps": 3}], None),
    ],
)
def test_wrong_stages_raise(
    experiment: type[BaseExperiment], stages: list, field: str, raises: Any
):
    with raises(UsageError, owner=f"STAGES[{len(stages) - 1}]", field=field):
        experiment(STAGES=stages)


def test_another_number_of_steps_raises(experiment: type[BaseExperiment], raises: Any):
    with raises(FieldError, field="STEPS", value=5):
        experiment(STAGES=[{"until_step": 4}], STEPS=5)


@pytest.mark.parametrize(("overrides", "steps"), [([], 3), ([Override("STAGES", "None")], 2)])
def test_reduced_form_has_the_steps_of_its_stages(
    experiment: type[BaseExperiment], monkeypatch: pytest.MonkeyPatch, overrides: list, steps: int
):
    class Small(experiment):  # type: ignore[misc,valid-type]
        STAGES = [{"until_step": 3}]
        reduced_fields = {"STEPS": 2}

    monkeypatch.setattr(resolving, "load_experiment", lambda _: Small)
    entry: Any = SimpleNamespace(name="Small")
    made = resolving.resolve_entry(entry, overrides, reduced=True)
    assert made.task.train.num_train_steps == steps


def test_a_rollback_beside_mixtures_raises(experiment: type[BaseExperiment], raises: Any):
    stages = [{"until_step": 3}, {"until_step": 4, "mixture": {"web": 1}}]
    made = resolve(experiment(STAGES=stages))
    run_stages(made)
    made.task.train.learner.on_spike = "rollback"
    with raises(UsageError, field="task.train.learner.on_spike", value="rollback"):
        run_stages(made)


def train(experiment: Any, folder: Path, *, restore: Path | None = None, **fields: Any) -> Path:
    restored = None if restore is None else str(restore)
    options = RunOptions(job_log_dir=str(folder), restore_checkpoint_dir=restored)
    run_train(resolve(experiment(LENGTH=1, **fields)), options)
    return folder


def written(folder: Path) -> list[Any]:
    """Return the records of training; the first step writes the file."""
    return read_metrics(folder).train if (folder / "metrics.jsonl").exists() else []


RAMP = [{"until_step": 2, "batch": 8}, {"until_step": 4, "batch": 16}, {"until_step": 6}]


def test_a_batch_ramp_is_reported(
    experiment: type[BaseExperiment], tmp_path: Path, capfd: pytest.CaptureFixture
):
    folder = train(experiment, tmp_path / "job", STAGES=RAMP)
    output = "".join(capfd.readouterr())
    assert "StagedRows, 1 host of 8 rows each" in output
    assert "stage 2      steps 3 → 4: 16 rows of 1 tokens, 32 tokens" in output
    assert "stage 2 begins: steps 3 → 4" in output and "stage 2 is compiled" in output
    # Besides the intervals of three steps, the first and the last step of a stage.
    assert [record["step"] for record in read_metrics(folder).train] == [1, 2, 3, 4, 5, 6]


def test_stages_of_one_shape_share_a_step(
    experiment: type[BaseExperiment], tmp_path: Path, capfd: pytest.CaptureFixture
):
    stages = [{"until_step": n + 1, "batch": 8 + 8 * (n % 2)} for n in range(4)]
    folder = train(experiment, tmp_path, STAGES=stages)
    output = "".join(capfd.readouterr())
    assert "stage 4 begins: steps 4 → 4: 16 rows" in output
    assert output.count("is compiled") == 1 and "stage 2 is compiled" in output
    assert [record["step"] for record in read_metrics(folder).train] == [1, 2, 3, 4]


def test_a_branch_compiles_no_stage_before_its_first_step(
    experiment: type[BaseExperiment], tmp_path: Path
):
    stages = [{"until_step": 2, "batch": 16}, {"until_step": 3, "batch": 8}]
    base = train(experiment, tmp_path / "base", STAGES=stages)
    limited = {"MAX_ROWS": 8, "IS_TRACED": False}  # The first stage could not be traced.
    stages[1] = {"until_step": 5, "batch": 8}
    branch = train(experiment, tmp_path / "branch", restore=base, STAGES=stages, **limited)
    assert [record["step"] for record in read_metrics(branch).train] == [4, 5]


def test_initial_weights_with_a_step_continue_in_its_stage(
    experiment: type[BaseExperiment], tmp_path: Path, raises: Any
):
    base = train(experiment, tmp_path / "base", STAGES=[{"until_step": 3, "batch": 8}])

    class Continued(experiment):  # type: ignore[misc,valid-type]
        def task(self) -> Config:
            task = super().task()
            source = Source.HParams.config(folder=str(base), load_step=True)
            task.initial_weights = InitFrom.HParams.config(sources=[source])
            return task

    folder = train(Continued, tmp_path / "continued", STAGES=RAMP)
    # A batch of 8 rows, as in the first stage, would be an error.
    assert [record["step"] for record in read_metrics(folder).train] == [4, 5, 6]
    with raises(UsageError, owner="Points", field="STAGES", value=None):
        train(experiment, base)


@pytest.fixture
def mixed(experiment: type[BaseExperiment], tiny: SimpleNamespace) -> type[BaseExperiment]:
    """Return an experiment on two components, of which the first may have a bad row."""

    class Mixed(experiment):  # type: ignore[misc,valid-type]
        FROM: str | None = None
        BAD: list[int] = []
        ACTION: str = "skip"

        def task(self) -> Config:
            task = super().task()
            task.train.set(save_interval_steps=2)
            task.train.learner.on_nonfinite = self.ACTION
            if self.FROM is not None:
                source = Source.HParams.config(folder=self.FROM, load_step=True)
                task.initial_weights = InitFrom.HParams.config(sources=[source])
            return task

        def datasets(self) -> list[Config]:
            points = tiny.Points.HParams.config(num_rows=1000, shuffle=False)
            components = {"web": points.clone(bad_rows=self.BAD), "docs": points}
            fields = {"is_training": True, "percore_batch_size": 1.0, "components": components}
            return [Mixture.HParams.config(**fields)]

    return Mixed


def test_mixtures_of_a_run_that_began_at_a_later_step_resume(mixed: Any, tmp_path: Path):
    """Rows 8 to 39 of "web", which stage 2 would read with the mixture of stage 1, are bad."""
    base = train(mixed, tmp_path / "base", STAGES=[{"until_step": 3, "batch": 8}])
    stages: list[dict[str, Any]] = [
        {"until_step": 4, "batch": 8, "mixture": {"web": 1}},
        {"until_step": 6, "mixture": {"docs": 1}},
        {"until_step": 8, "batch": 16},
    ]
    fields: dict[str, Any] = {"FROM": str(base), "BAD": [*range(8, 40)]}
    for number in (2, 3):
        folder = train(mixed, tmp_path / "job", STAGES=stages[:number], **fields)
    whole = train(mixed, tmp_path / "whole", STAGES=stages, **fields)
    losses = [{r["step"]: r["loss"] for r in read_metrics(f).train} for f in (folder, whole)]
    assert losses[0].keys() == {4, 5, 6, 7, 8} and losses[0] == losses[1]
    assert all(map(math.isfinite, losses[0].values()))
    # A run that starts in stage 2 reads no row of "web".
    stages[0]["until_step"], fields["BAD"] = 3, [*range(40)]
    late = train(mixed, tmp_path / "late", STAGES=stages, **fields)
    assert all(math.isfinite(record["loss"]) for record in read_metrics(late).train)


def test_a_stage_with_a_mixture_follows_a_run_that_rolled_back(
    mixed: Any, tmp_path: Path, capsys: pytest.CaptureFixture
):
    stages = [{"until_step": 6, "batch": 8}, {"until_step": 8, "mixture": {"docs": 1}}]
    # Row 18 of one component of two is in the fifth batch of 8.
    train(mixed, tmp_path, STAGES=stages[:1], BAD=[18], ACTION="rollback")
    assert "rolled back to step 4" in capsys.readouterr().out
    train(mixed, tmp_path, STAGES=stages)
    assert "resuming from step 6" in capsys.readouterr().out
    assert read_metrics(tmp_path).train[-1]["step"] == 8


@pytest.mark.parametrize(("is_traced", "problem"), [(False, "too many"), (True, "no_such_target")])
def test_a_later_stage_that_cannot_be_compiled_ends_the_run_at_once(
    is_traced: bool, problem: str, experiment: type[BaseExperiment], tmp_path: Path
):
    stages = [{"until_step": 3000, "batch": 8}, {"until_step": 3001, "batch": 16}]
    with pytest.raises(UsageError, match=problem):
        train(experiment, tmp_path, STAGES=stages, MAX_ROWS=8, IS_TRACED=is_traced)
    assert all(record["step"] < 3000 for record in written(tmp_path))


def test_a_later_stage_of_the_shape_that_was_guessed_ends_the_run_at_once_too(
    experiment: type[BaseExperiment], tmp_path: Path
):
    base = train(experiment, tmp_path / "base", STAGES=[{"until_step": 3, "batch": 8}])

    class Continued(experiment):  # type: ignore[misc,valid-type]
        def task(self) -> Config:
            source = Source.HParams.config(folder=str(base), load_step=True)
            return super().task().set(initial_weights=InitFrom.HParams.config(sources=[source]))

    # The first stage is compiled, too, before the step of the weights is known.
    stages = [{"until_step": n, "batch": rows} for n, rows in ((3, 16), (3000, 8), (3001, 16))]
    with pytest.raises(UsageError, match="no_such_target"):
        train(Continued, tmp_path / "continued", STAGES=stages, MAX_ROWS=8)
    assert all(record["step"] < 3000 for record in written(tmp_path / "continued"))


def test_another_last_step_of_the_task_raises(experiment: type[BaseExperiment], tmp_path: Path):
    resolved = resolve(experiment(STAGES=RAMP))
    resolved.task.train.num_train_steps = 7
    with pytest.raises(UsageError, match="6, the last step of the stages"):
        run_train(resolved, RunOptions(job_log_dir=str(tmp_path)))
