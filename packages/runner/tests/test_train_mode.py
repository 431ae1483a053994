"""Where a training run begins: at its own newest checkpoint, at that of another job, or at step 0.

What a whole run leaves behind is the business of the integration tests.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.config import Config
from layerkit_runner import BaseExperiment, UsageError
from layerkit_runner.flags import RunOptions
from layerkit_runner.observers import read_metrics
from layerkit_runner.resolve import resolve
from layerkit_runner.train_mode import run_train


@pytest.fixture(scope="module")
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Tiny(BaseExperiment):
        MAX_STEPS: int = 4

        def task(self) -> Config:
            train = {"num_train_steps": self.MAX_STEPS, "save_interval_steps": 2}
            return tiny.task_config(
                learner={"learning_rate": 0.01}, train={**train, "summary_interval_steps": 1}
            )

        def datasets(self) -> list[Config]:
            points = tiny.Points.HParams
            return [
                points.config(name="train", is_training=True, percore_batch_size=1.0),
                points.config(name="held out", percore_batch_size=1.0),
            ]

    return Tiny


@pytest.fixture
def train(
    experiment: type[BaseExperiment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Trains in a folder of this name and returns what was printed."""

    def run(name: str, *, max_steps: int = 4, **options: Any) -> str:
        folders = {"job_log_dir": str(tmp_path / name), "jax_compilation_cache": "off"}
        resolved = resolve(experiment(MAX_STEPS=max_steps))
        assert run_train(resolved, RunOptions(**folders, **options)) == 0
        return capsys.readouterr().out

    return run


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(folder).train}


def test_a_new_run_then_the_same_again(train: Any, tmp_path: Path):
    first = train("job")
    assert "goes on from" not in first
    assert list(losses(tmp_path / "job")) == [1, 2, 3, 4]
    again = train("job", max_steps=6)
    assert f"goes on from step 4 of {tmp_path}/job/checkpoints" in again
    straight = train("straight", max_steps=6)
    assert losses(tmp_path / "job") == losses(tmp_path / "straight")
    assert held_out(again) == held_out(straight) != held_out(first)


def held_out(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("held out: "))


def test_another_jobs_checkpoint(train: Any, tmp_path: Path):
    train("job")
    there = str(tmp_path / "job")
    output = train("new", max_steps=5, restore_checkpoint_dir=there, restore_checkpoint_step=2)
    assert f"goes on from step 2 of {tmp_path}/job/checkpoints" in output
    assert list(losses(tmp_path / "new")) == [3, 4, 5]
    # From now on the new job has checkpoints of its own.
    output = train("new", max_steps=6, restore_checkpoint_dir=there)
    assert f"--restore_checkpoint_dir is not used: {tmp_path}/new has checkpoints of" in output
    assert f"goes on from step 5 of {tmp_path}/new/checkpoints" in output


def test_no_training_input(tiny: SimpleNamespace, experiment: Any, tmp_path: Path):
    class Untrained(experiment):
        def datasets(self) -> list[Config]:
            return []

    with pytest.raises(UsageError, match=r"must hold one input with is_training=True .* not 0$"):
        run_train(resolve(Untrained()), RunOptions(job_log_dir=str(tmp_path / "job")))
    assert not (tmp_path / "job").exists()


def test_data_sets_of_one_name(tiny: SimpleNamespace, experiment: Any, tmp_path: Path):
    class Twice(experiment):
        def datasets(self) -> list[Config]:
            train, held_out = super().datasets()
            return [train, held_out, held_out.clone()]

    with pytest.raises(UsageError, match=r"^two data sets are named 'held out'; give each a name"):
        run_train(resolve(Twice()), RunOptions(job_log_dir=str(tmp_path / "job")))
