"""Code of a user that ends the process, or blocks, inside a training run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.config import Config
from layerkit_runner import BaseExperiment
from layerkit_runner.checkpointing.folders import committed_steps
from layerkit_runner.errors import ExitError
from layerkit_runner.observers import Observer
from layerkit_runner.run.executor import Executor
from layerkit_runner.run.job_errors import job_errors
from layerkit_runner.run.programs.eval_program import BaseProgram
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions


class ExitingProgram(BaseProgram):
    def run(self, state: Any, step: int, observers: Any) -> Any:
        sys.exit(0)


class FailingProgram(BaseProgram):
    def run(self, state: Any, step: int, observers: Any) -> Any:
        raise ZeroDivisionError(f"after step {step}")


class ExitingObserver(Observer):
    in_background = False
    optional = False

    def progress(self, step: int) -> None:
        if step == 2:
            sys.exit(0)


class ExitingExecutor(Executor):
    def is_over(self, step: int) -> bool:
        return step == 2 and sys.exit(0)


def exiting_schedule(step: Any) -> Any:
    sys.exit(0)


def train(tiny: SimpleNamespace, folder: Path, **parts: Any) -> int:
    learner = {"learning_rate": parts.pop("learning_rate", 0.01)}

    class Exits(BaseExperiment):
        def task(self) -> Config:
            return tiny.task_config(
                learner=learner, train={"num_train_steps": 5, "eval_interval_steps": 2}
            )

        def datasets(self) -> list[Config]:
            points = tiny.Points.HParams.config(percore_batch_size=1.0, num_rows=8)
            return [points.set(name="train", is_training=True)]

    for name, value in parts.items():
        setattr(Exits, name, lambda self, value=value: value)
    resolved = resolve(Exits())
    options = RunOptions(job_log_dir=str(folder), jax_compilation_cache="off")
    with job_errors("train", resolved):
        return run_train(resolved, options)


@pytest.mark.parametrize(
    ("parts", "saved"),
    [
        ({"eval_programs": [Config(ExitingProgram, name="probe")]}, [2]),
        ({"observers": [Config(ExitingObserver)]}, [4]),  # reports are two steps behind
        ({"executor": Config(ExitingExecutor)}, [2]),
        ({"learning_rate": exiting_schedule}, []),
    ],
    ids=["program", "observer", "executor", "schedule"],
)
def test_exit_of_the_users_code_ends_the_run_with_an_error_and_saves(
    tiny: SimpleNamespace, tmp_path: Path, parts: dict[str, Any], saved: list[int]
):
    with pytest.raises(ExitError) as caught:
        train(tiny, tmp_path / "job", **parts)
    assert caught.value.exit_code == 1
    assert "test_code_that_exits.py:" in caught.value.owner
    assert committed_steps(tmp_path / "job" / "checkpoints") == saved


def test_error_of_a_program_saves_the_completed_steps(tiny: SimpleNamespace, tmp_path: Path):
    program = Config(FailingProgram, name="probe", interval_steps=3)
    with pytest.raises(ZeroDivisionError):
        train(tiny, tmp_path / "job", eval_programs=[program])
    assert committed_steps(tmp_path / "job" / "checkpoints") == [3]


def test_exit_in_the_final_evaluation_leaves_the_exit_code(
    tiny: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    program = Config(ExitingProgram, name="probe", interval_steps=100)
    assert train(tiny, tmp_path / "job", eval_programs=[program]) == 0
    assert "evaluation failed: " in capsys.readouterr().out


@pytest.mark.slow  # one such end is in test_end_report.py
def test_sigterm_ends_a_run_whose_observer_blocks_when_it_is_closed(processes: Any):
    process = processes.start(exp="gated_experiment.BlockedClose")
    processes.said(process, "closing blocks")
    process.send_signal(signal.SIGTERM)
    output = processes.ended(process, 128 + signal.SIGTERM)
    assert "SIGTERM: leaving at once" in output
    assert committed_steps(processes.folder / "checkpoints")[-1] == 6
