"""Where a training run begins: at its own newest checkpoint, at that of another job, or at step 0.

What a whole run leaves behind is the business of the integration tests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath
from optax import contrib

from layerkit.config import Config, Partial
from layerkit.errors import UserError
from layerkit_runner import BaseExperiment, UsageError
from layerkit_runner.checkpointing import stored_state
from layerkit_runner.checkpointing.folders import committed_steps
from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.errors import NonFiniteError
from layerkit_runner.observers import read_metrics
from layerkit_runner.optim.learner import Learner
from layerkit_runner.run.job_folder import only_trainer
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions
from layerkit_runner.step.task_metrics import Max


@pytest.fixture(scope="module")
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Tiny(BaseExperiment):
        MAX_STEPS: int = 4
        MAX_TO_KEEP: int | None = 10
        INIT_SCALE: float = 1.0
        NUM_ROWS: int = 7
        BAD_ROWS: tuple[int, ...] = ()
        LOSS_NAME: str = "loss"
        B1: float | None = None

        def task(self) -> Config:
            train = {"num_train_steps": self.MAX_STEPS, "save_interval_steps": 2}
            learner: dict[str, Any] = {"learning_rate": 0.01}
            if self.B1 is not None:
                learner["optimizer"] = Partial(contrib.schedule_free_sgd, b1=self.B1)
            return tiny.task_config(
                learner=learner,
                train={**train, "summary_interval_steps": 1, "save_max_to_keep": self.MAX_TO_KEEP},
                init_scale=self.INIT_SCALE,
            ).set(name="line", loss_name=self.LOSS_NAME)

        def datasets(self) -> list[Config]:
            points = tiny.Points.HParams
            return [
                points.config(
                    name="train",
                    is_training=True,
                    percore_batch_size=1.0,
                    num_rows=self.NUM_ROWS,
                    bad_rows=self.BAD_ROWS,
                ),
                points.config(name="held out", percore_batch_size=1.0),
            ]

    return Tiny


def options(folder: Path, **more: Any) -> RunOptions:
    return RunOptions(**{"job_log_dir": str(folder), "jax_compilation_cache": "off", **more})


@pytest.fixture
def train(
    experiment: type[BaseExperiment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Return a function that trains in a folder of this name and returns what was printed."""

    def run(
        name: str, *, max_steps: int = 4, fields: Any = None, resolved: Any = None, **more: Any
    ) -> str:
        resolved = resolved or resolve(experiment(MAX_STEPS=max_steps, **(fields or {})))
        assert run_train(resolved, options(tmp_path / name, **more)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def finished(
    experiment: type[BaseExperiment], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Return the folder of a finished run of four steps, which tests copy, and its output."""
    folder, printed = tmp_path_factory.mktemp("finished") / "job", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        for name in ("matplotlib", "matplotlib.figure"):  # A loss curve takes seconds.
            patch.setitem(sys.modules, name, None)
        assert run_train(resolve(experiment()), options(folder)) == 0
    return folder, printed.getvalue()


@pytest.fixture
def job(finished: tuple[Path, str], tmp_path: Path) -> Path:
    """Return a copy of the finished run, for commands with the name `job`."""
    return Path(shutil.copytree(finished[0], tmp_path / "job"))


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(folder).train}


def test_same_command_resumes(train: Any, finished: tuple[Path, str], job: Path, tmp_path: Path):
    first = finished[1]
    assert ".Tiny (task line)\n" in first and "resuming from" not in first
    for name in ("train", "held out"):
        assert f"data         {name}: Points, 7 rows\n" in first
    assert list(losses(job)) == [1, 2, 3, 4]
    again = train("job", max_steps=6)
    assert f"resuming from step 4 of {tmp_path}/job/checkpoints" in again
    straight = train("straight", max_steps=6)
    assert losses(tmp_path / "job") == losses(tmp_path / "straight")
    assert held_out(again) == held_out(straight) != held_out(first)


def test_run_that_ends_after_a_save_on_demand_is_not_finished(
    experiment: type[BaseExperiment], tmp_path: Path
):
    signals = StopSignals()
    signals.save_received = True
    asked = options(tmp_path, exit_after_ondemand_checkpoint=True)
    assert run_train(resolve(experiment()), asked, signals=signals) == 0
    assert committed_steps(epath.Path(tmp_path, "checkpoints")) != [4]
    assert read_metrics(tmp_path).events[-1]["reason"] == "stopped by a signal"


def test_run_beyond_its_last_step_leaves_the_folder_unchanged(raises: Any, train: Any, job: Path):
    before = {path: path.stat().st_mtime_ns for path in job.rglob("*") if path.is_file()}
    with raises(UsageError, field="task.train.num_train_steps", value=3):
        train("job", max_steps=3)
    assert {p: p.stat().st_mtime_ns for p in job.rglob("*") if p.is_file()} == before


def test_run_without_sources_deletes_the_record_of_initial_values(train: Any, tmp_path: Path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "initial_values.json").write_text("{}")
    train("job", max_steps=1)
    assert not (tmp_path / "job" / "initial_values.json").exists()


def held_out(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("held out: "))


@pytest.mark.slow  # partitioning/test_learner_on_meshes.py has one
def test_run_resumed_after_a_skipped_step_equals_an_uninterrupted_one(train: Any, tmp_path: Path):
    """An epoch is 8 steps, one of which has the bad row."""
    fields = {"NUM_ROWS": 64, "BAD_ROWS": (3,)}
    for max_steps in (11, 16):
        train("job", max_steps=max_steps, fields=fields)
    train("straight", max_steps=16, fields=fields)

    def computed(name: str) -> list[dict[str, str]]:
        return [
            {key: str(value) for key, value in record.items() if key.startswith(("loss", "learn"))}
            for record in read_metrics(tmp_path / name).train
        ]

    assert computed("job") == computed("straight")
    assert [record["loss"] for record in computed("straight")].count("nan") == 2
    assert computed("straight")[-1]["learning/skipped_steps"] == "2.0"


@pytest.mark.slow  # test_executor.py repeats a failed run
def test_run_with_mostly_skipped_steps_fails_also_when_repeated(
    train: Any, experiment: Any, capsys: pytest.CaptureFixture[str]
):
    """The first update makes the weights so large that all later losses are infinite."""
    resolved = resolve(experiment())
    resolved.task.train.learner.learning_rate = 1e30
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="3 of 4 steps were not valid"):
            train("job", resolved=resolved)
        capsys.readouterr()
    resolved.task.train.max_skipped_steps_fraction = None
    printed = train("job", resolved=resolved)
    assert "not valid: 3 of 4 steps" in printed and "train twice as many steps" not in printed


def test_checkpoint_that_is_not_finite_is_not_resumed(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        # As a version that applied such steps and saved the outcome.
        patch.setattr(stored_state.FiniteCheck, "nonfinite", lambda _: [])
        patch.setattr(Learner, "skips_steps", False)
        train("job", fields={"NUM_ROWS": 16, "BAD_ROWS": (3,)})
    with pytest.raises(NonFiniteError) as caught:
        train("job", max_steps=6)
    assert all(word in str(caught.value) for word in ("step 4", "params/linear/w", "verify"))
    assert [path.name for path in sorted((tmp_path / "job/checkpoints").glob("checkpoint_*"))] == [
        "checkpoint_00000002",
        "checkpoint_00000004",
    ]


def test_second_run_in_a_folder_is_an_error_and_changes_nothing(train: Any, job: Path):
    saving = job / "checkpoints" / "checkpoint_00000006.orbax-checkpoint-tmp-0"
    saving.mkdir()
    config = job / "config.json"
    written = config.stat().st_mtime_ns
    with (
        only_trainer(epath.Path(job)),
        pytest.raises(UsageError, match=r"process \d+ on .* trains in this folder"),
    ):
        train("job", max_steps=6)
    assert saving.is_dir()
    assert config.stat().st_mtime_ns == written
    # No job trains there now, so the unfinished save is deleted.
    train("job", max_steps=6)
    assert not saving.exists()
    assert not (job / ".running").exists()


def test_restored_averages_of_another_b1_are_an_error(train: Any, tmp_path: Path):
    train("job", fields={"B1": 0.9})
    problem = r"b1=0\.95\. Expected 0\.9, as in the checkpoint"
    with pytest.raises(UserError, match=problem):
        train("job", max_steps=6, fields={"B1": 0.95})
    with pytest.raises(UserError, match=problem):
        train("new", fields={"B1": 0.95}, restore_checkpoint_dir=str(tmp_path / "job"))
    train("job", max_steps=6, fields={"B1": 0.9})


def test_run_starts_from_the_checkpoint_of_another_job(
    raises: Any, train: Any, job: Path, tmp_path: Path
):
    there = str(job)
    output = train("new", max_steps=5, restore_checkpoint_dir=there, restore_checkpoint_step=(2,))
    assert f"resuming from step 2 of {tmp_path}/job/checkpoints" in output
    assert list(losses(tmp_path / "new")) == [3, 4, 5]
    start = {"restore_checkpoint_dir": str(tmp_path / "new"), "restore_checkpoint_step": (3,)}
    with raises(UsageError, field="--restore_checkpoint_step", value=(3,)):
        train("new", max_steps=6, **start)
    output = train("new", max_steps=6, restore_checkpoint_dir=there)
    assert f"--restore_checkpoint_dir is ignored: {tmp_path}/new has checkpoints" in output
    assert f"resuming from step 5 of {tmp_path}/new/checkpoints" in output


@pytest.mark.parametrize(
    ("change", "data"),
    [
        (lambda datasets: [], {"field": "datasets()", "value": []}),
        (
            lambda datasets: datasets[1:],
            {"field": "datasets()", "value": []},
        ),
        (lambda datasets: [*datasets, datasets[1].clone()], {"field": "name", "value": "held out"}),
    ],
    ids=["none", "evaluation only", "two of one name"],
)
def test_wrong_data_sets_are_an_error_before_a_file_is_written(
    raises: Any, train: Any, experiment: Any, tmp_path: Path, change: Any, data: dict[str, Any]
):
    class Wrong(experiment):
        trained_by = experiment

        def datasets(self) -> list[Config]:
            return change(super().datasets())

    with raises(UsageError, **data):
        train("job", resolved=resolve(Wrong()))
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("name", ["time", "mfu"])
def test_metric_with_the_name_of_a_figure_of_the_run_is_an_error_before_a_file_is_written(
    raises: Any, train: Any, experiment: Any, tmp_path: Path, name: str
):
    class Timed(experiment):
        trained_by = experiment

        def task(self) -> Config:
            return super().task().set(metrics={name: Max.HParams.config(value="metrics/loss")})

    with raises(UsageError, field="scalar", value=name):
        train("job", resolved=resolve(Timed()))
    assert not (tmp_path / "job").exists()


# Layers refuse infinity in a field, but not a number that is infinite in float32.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_first_weights_that_are_not_finite_end_the_run_and_are_not_saved(
    train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(NonFiniteError, match="params/linear/w"):
        train("job", fields={"INIT_SCALE": 1e39})
    lines = capsys.readouterr().out.splitlines()
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert [line.split(":")[1] for line in warnings] == [" step 1", " step 2"]
    assert not committed_steps(epath.Path(tmp_path / "job" / "checkpoints"))


def test_mfu_is_reported_if_the_peak_is_known(train: Any, job: Path, tmp_path: Path):
    assert not any("mfu" in logged for logged in read_metrics(job).train)
    train("known", peak_tflops_per_device=2.5e-6)
    metrics = read_metrics(tmp_path / "known")
    # 2 FLOPs for each of 2 weights and 8 rows, three times, on 8 devices.
    assert metrics.info["flops_per_step"] == 96
    for logged in metrics.train[1:]:
        expected = 96 / logged["step_time"] / 8 / 2.5e6
        assert logged["mfu"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "option",
    [
        {"xla_flags_preset": "gpu_latency_hiding"},
        {"wandb_project": "toy"},
        {"jax_profiler_port": 65536},
    ],
)
def test_wrong_flag_is_an_error_before_a_file_is_written(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError):
        train("job", **option)
    assert not (tmp_path / "job").exists()


def test_summary_writer_can_be_turned_off(train: Any, tmp_path: Path):
    train("job", max_steps=1, enable_summary_writer=False)
    assert list(losses(tmp_path / "job")) == [1]
    assert not (tmp_path / "job" / "summaries").exists()
