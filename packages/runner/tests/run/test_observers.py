"""Observers of an experiment, in real training runs."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.config import Config
from layerkit_runner import BaseExperiment
from layerkit_runner.config.config_text import config_json, config_text
from layerkit_runner.config.overrides import Override
from layerkit_runner.observers import Observer
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions


@dataclasses.dataclass
class EveryK(Observer):
    """Writes what it sees to a file; fails at step `fails_at`."""

    path: str
    every: int = 2
    fails_at: int = 0
    seconds: float = 0.0

    def start(self, info):
        self._write(f"start {info.mode}")

    def progress(self, step):
        time.sleep(self.seconds)
        if step == self.fails_at:
            raise OSError("no such channel")
        if step % self.every == 0:
            self._write(f"step {step}")

    def eval_metrics(self, step, dataset, scalars):
        self._write(f"{dataset} after {step}: {sorted(scalars)[0]}")

    def close(self):
        self._write("close")

    def _write(self, line):
        with open(self.path, "a") as file:
            file.write(f"{line}\n")


@pytest.fixture
def experiment(tiny: SimpleNamespace, tmp_path: Path) -> type[BaseExperiment]:
    class Observed(BaseExperiment):
        def task(self) -> Config:
            return tiny.task_config(
                learner={"learning_rate": 0.01},
                train={"num_train_steps": 5, "eval_interval_steps": 4},
            )

        def datasets(self) -> list[Config]:
            kind = tiny.Points.HParams.config(percore_batch_size=1.0, num_rows=8)
            heldout = kind.clone().set(name="heldout")
            return [kind.set(name="train", is_training=True), heldout]

        def observers(self) -> list[Config]:
            return [Config(EveryK, path=str(tmp_path / "seen.txt"))]

    return Observed


def options(folder: Path) -> RunOptions:
    return RunOptions(job_log_dir=str(folder / "job"), jax_compilation_cache="off")


def test_observer_of_an_experiment_runs_beside_the_built_in_ones(experiment: Any, tmp_path: Path):
    assert run_train(resolve(experiment()), options(tmp_path)) == 0
    assert (tmp_path / "seen.txt").read_text().splitlines() == [
        "start train",
        "step 2",
        "step 4",
        "heldout after 4: loss",
        "heldout after 5: loss",
        "close",
    ]
    assert (tmp_path / "job" / "metrics.jsonl").exists()
    assert (tmp_path / "job" / "summaries").is_dir()


def test_failing_observer_is_removed_and_the_run_continues(
    experiment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    resolved = resolve(experiment(), [Override("observers.0.fails_at", "3")])
    assert run_train(resolved, options(tmp_path)) == 0
    lines = (tmp_path / "seen.txt").read_text().splitlines()
    assert lines == ["start train", "step 2", "close"]
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "EveryK" in line]
    assert "EveryK failed and was removed; the run continues." in told
    assert "OSError: no such channel (test_observers.py:" in told
    assert (tmp_path / "job" / "checkpoints" / "checkpoint_00000005").is_dir()


def test_slow_observer_does_not_delay_the_steps(experiment: Any, tmp_path: Path):
    resolved = resolve(experiment(), [Override("observers.0.seconds", "0.5")])
    assert run_train(resolved, options(tmp_path)) == 0
    lines = (tmp_path / "seen.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("step")] == ["step 2", "step 4"]
    goodput = json.loads((tmp_path / "job" / "goodput.json").read_text())
    # 2.5 seconds of work in the observer, none of them in the steps.
    assert goodput["num_steps"] == 5 and goodput["seconds"]["steps"] < 1.5


def test_observers_are_shown_and_can_be_set(experiment: Any):
    resolved = resolve(experiment(), [Override("observers.0.every", "5")])
    text = config_text(resolved)
    assert "observers.0 = EveryK\n" in text
    assert "observers.0.every = 5\n" in text
    assert config_json(resolved)["config"]["observers.0.every"] == 5


def test_run_without_matplotlib_names_the_package_to_install(
    experiment: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    assert run_train(resolve(experiment()), options(tmp_path)) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("no loss curve: ")]
    assert "pip install 'matplotlib" in line
    assert not (tmp_path / "job" / "loss_curve.png").exists()
    monkeypatch.undo()  # The fixture `without_matplotlib` hides it.
    assert run_train(resolve(experiment()), options(tmp_path)) == 0
    assert (tmp_path / "job" / "loss_curve.png").exists()
