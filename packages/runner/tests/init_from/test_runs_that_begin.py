"""Training jobs that are initialized from a folder, from the flags to the files."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.config import Config
from layerkit_runner import BaseExperiment, UsageError
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.init_from import InitFrom, Source
from layerkit_runner.observers import read_metrics
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions


@pytest.fixture(scope="module")
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Line(BaseExperiment):
        MAX_STEPS: int = 3
        DIMS: int = 2
        BEGIN: str | None = None

        def task(self) -> Config:
            task = tiny.task_config(
                learner={"learning_rate": 0.01},
                train={"num_train_steps": self.MAX_STEPS, "summary_interval_steps": 1},
                dims=self.DIMS,
            )
            if self.BEGIN is not None:
                source = Source.HParams.config(folder=self.BEGIN, load_step=True)
                task.initial_weights = InitFrom.HParams.config(sources=[source])
            return task

        def datasets(self) -> list[Config]:
            points = tiny.Points.HParams
            return [points.config(name="train", is_training=True, percore_batch_size=1.0)]

    return Line


@pytest.fixture(scope="module")
def train(experiment: Any) -> Any:
    """Trains in a folder and returns what was printed."""

    def run(folder: Path, *, fields: Any = None, **options: Any) -> str:
        folders = {"job_log_dir": str(folder), "jax_compilation_cache": "off"}
        resolved = resolve(experiment(**(fields or {})))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert run_train(resolved, RunOptions(**folders, **options)) == 0
        return printed.getvalue()

    return run


@pytest.fixture(scope="module")
def job(train: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps."""
    folder = tmp_path_factory.mktemp("base")
    assert "init from" not in train(folder)
    assert not (folder / "initial_values.json").exists()
    return folder


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(folder).train}


def test_new_run_starts_from_the_weights_of_another(train: Any, job: Path, tmp_path: Path):
    there, new = shutil.copytree(job, tmp_path / "there"), tmp_path / "new"
    base_record = {"hugging_face": "/models/base"}
    (there / "initial_values.json").write_text(json.dumps(base_record))
    output = train(new, init_from=str(there))
    assert f"init from    1 weight from {there}/checkpoints:3\n" in output
    record = json.loads((new / "initial_values.json").read_text())
    assert record["weights"] == {"linear/w": f"{there}/checkpoints:3:params/linear/w"}
    assert record.items() >= base_record.items()
    # The new run reads the same data from the beginning, with other weights.
    assert losses(new).keys() == {1, 2, 3}
    assert losses(new)[1] != losses(job)[1]

    # A run that has begun does not look at the source again, which may be gone.
    shutil.rmtree(there)
    output = train(new, init_from=str(there), fields={"MAX_STEPS": 4})
    assert f"resuming from step 3 of {new}/checkpoints\n" in output
    assert f"--init_from={there} is ignored: the run has a checkpoint\n" in output
    assert "init from  " not in output
    assert json.loads((new / "initial_values.json").read_text()) == record


@pytest.mark.slow
def test_init_from_of_the_experiment_is_used(train: Any, job: Path, tmp_path: Path):
    fields = {"BEGIN": str(job), "MAX_STEPS": 5}
    output = train(tmp_path / "new", fields=fields)
    assert f"step count continues from {job}/checkpoints:3\n" in output
    assert "steps        3 → 5\n" in output
    assert losses(tmp_path / "new").keys() == {4, 5}
    # The flag takes precedence over the experiment.
    output = train(tmp_path / "newer", init_from=str(tmp_path / "new"), fields=fields)
    assert "--init_from replaces task.initial_weights\n" in output
    assert f"init from    1 weight from {tmp_path}/new/checkpoints:5\n" in output
    assert losses(tmp_path / "newer").keys() == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("options", "dims", "message"),
    [
        ({}, 3, "linear/w: float32[3, 1] here, but float32[2, 1] in {job}/checkpoints:3\n"),
        (
            {"init_draw": "liner/.*"},
            2,
            "draw: 'liner/.*' matches no name; did you mean 'linear/w'?",
        ),
    ],
)
def test_source_that_does_not_fit_writes_nothing(
    train: Any, job: Path, tmp_path: Path, options: Any, dims: int, message: str
):
    with pytest.raises(UsageError) as caught:
        train(tmp_path / "new", init_from=str(job), **options, fields={"DIMS": dims})
    assert caught.value.owner == f"--init_from={job}"
    assert message.format(job=job) in caught.value.problem
    assert not (tmp_path / "new").exists()


def test_the_recorded_arguments_begin_the_same_run(train: Any, job: Path, tmp_path: Path):
    train(tmp_path / "new", init_from=str(job))
    train(tmp_path / "new", fields={"MAX_STEPS": 4})  # a resumed run needs no --init_from
    recorded = json.loads((tmp_path / "new" / "config.json").read_text())["arguments"]
    flags = parse_flags(recorded)
    assert {str(override) for override in flags.overrides} == {"--fdl.MAX_STEPS=4"}
    train(tmp_path / "again", init_from=flags.options.init_from, fields={"MAX_STEPS": 4})
    assert losses(tmp_path / "again") == losses(tmp_path / "new")
    assert losses(tmp_path / "again")[1] != losses(job)[1]
