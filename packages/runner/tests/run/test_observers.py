"""Observers of an experiment, in real training runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.config import Config
from layerkit_runner import BaseExperiment
from layerkit_runner.config.config_tree import config_json, config_text
from layerkit_runner.config.requests import Override
from layerkit_runner.observers import Observer
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions


@dataclasses.dataclass
class EveryK(Observer):
    """Writes what it sees to a file."""

    path: str
    every: int = 2

    def start(self, info):
        self._write(f"start {info.mode}")

    def progress(self, step):
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


def test_observers_are_shown_and_can_be_set(experiment: Any):
    resolved = resolve(experiment(), [Override("observers.0.every", "5")])
    text = config_text(resolved)
    assert "observers.0 = EveryK\n" in text
    assert "observers.0.every = 5\n" in text
    assert config_json(resolved)["config"]["observers.0.every"] == 5
