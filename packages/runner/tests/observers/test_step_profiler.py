"""Profiler traces of training steps, requested by a field or a signal."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from etils import epath

from layerkit_runner import BaseExperiment, UsageError
from layerkit_runner.observers.step_profiler import (
    CAPTURE_SIGNAL,
    STEP_EVENT,
    StepProfiler,
    profiler_server,
)
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions

# jaxlib makes this type when the statistics of an event are read for the first time.
pytestmark = pytest.mark.filterwarnings(
    "ignore:builtin type event_stats has no __module__ attribute:DeprecationWarning"
)


def traced_steps(folder: Path) -> list[int]:
    """The numbers of the steps in the only trace below `folder`."""
    (path,) = folder.glob("plugins/profile/*/*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    return [dict(event.stats)["step_num"] for event in events if event.name == STEP_EVENT]


@pytest.fixture
def profiled(tiny: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Trains 6 steps with these fields and returns what was printed."""

    class Tiny(BaseExperiment):
        MAX_STEPS: int = 6

        def task(self) -> Any:
            train = {"num_train_steps": self.MAX_STEPS, "save_interval_steps": 100}
            return tiny.task_config(learner={"learning_rate": 0.01}, train=train)

        def datasets(self) -> list[Any]:
            return [tiny.Points.HParams.config(is_training=True, percore_batch_size=1.0)]

    def run(*, max_steps: int = 6, **train: Any) -> str:
        resolved = resolve(Tiny(MAX_STEPS=max_steps))
        resolved.task.train.set(**train)
        options = RunOptions(job_log_dir=str(tmp_path / "job"), jax_compilation_cache="off")
        assert run_train(resolved, options) == 0
        return capsys.readouterr().out

    return run


def test_capture_step_traces_the_requested_steps(profiled: Any, tmp_path: Path):
    output = profiled(profiler_capture_step=3, profiler_num_steps=2)
    folder = tmp_path / "job" / "profile" / "step_00000003"
    assert traced_steps(folder) == [3, 4]
    assert {path.name for path in folder.glob("plugins/profile/step_00000003/*")} == {
        "process_0000.xplane.pb",
        "process_0000.trace.json.gz",
    }
    (line,) = [line for line in output.splitlines() if line.startswith("profile of")]
    assert line.startswith("profile of steps 3 to 4 (")
    assert line.endswith(f"view it with: tensorboard --logdir={tmp_path}/job/profile")
    # The run resumes from step 6, after the capture.
    again = profiled(max_steps=7, profiler_capture_step=3, profiler_num_steps=2)
    assert "no profile: task.train.profiler_capture_step=3 is not one of the steps 7 to 7" in again
    output = profiled(max_steps=8)  # without a request
    assert "profile of" not in output and "no profile" not in output


def test_capture_beyond_the_last_step_is_written(profiled: Any, tmp_path: Path):
    profiled(profiler_capture_step=5, profiler_num_steps=100)
    assert traced_steps(tmp_path / "job" / "profile" / "step_00000005") == [5, 6]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def make(**changes: Any) -> tuple[StepProfiler, list[str]]:
        lines: list[str] = []
        settings = {"capture_step": None, "num_steps": 2, "captures_by_step": True, **changes}
        return StepProfiler(epath.Path(tmp_path), report=lines.append, **settings), lines

    return make


def run_steps(profiler: StepProfiler, steps: range) -> None:
    for step in steps:
        if profiler.starts_before(step):
            profiler.start(step)
        with jax.profiler.StepTraceAnnotation(STEP_EVENT, step_num=step):
            pass
        if profiler.ends_after(step):
            profiler.stop(step)


def test_signal_captures_the_next_steps(make: Any, tmp_path: Path):
    profiler, lines = make()
    before = signal.getsignal(CAPTURE_SIGNAL)
    with profiler:
        run_steps(profiler, range(1, 4))
        os.kill(os.getpid(), CAPTURE_SIGNAL)
        run_steps(profiler, range(4, 8))
        os.kill(os.getpid(), CAPTURE_SIGNAL)
        run_steps(profiler, range(8, 11))
    assert signal.getsignal(CAPTURE_SIGNAL) == before
    assert traced_steps(tmp_path / "profile" / "step_00000004") == [4, 5]
    assert traced_steps(tmp_path / "profile" / "step_00000008") == [8, 9]
    assert len(lines) == 2


def test_process_without_capture_step_still_handles_the_signal(make: Any, tmp_path: Path):
    profiler, _ = make(capture_step=1, captures_by_step=False)
    with profiler:
        run_steps(profiler, range(1, 3))
        assert not (tmp_path / "profile").exists()
        os.kill(os.getpid(), CAPTURE_SIGNAL)
        run_steps(profiler, range(3, 6))
    assert traced_steps(tmp_path / "profile" / "step_00000003") == [3, 4]


def test_failure_to_write_a_trace_does_not_end_the_run(make: Any, tmp_path: Path):
    (tmp_path / "profile").write_text("a file where a folder should be")
    profiler, lines = make(capture_step=2)
    with profiler:
        run_steps(profiler, range(1, 5))
        assert not profiler.starts_before(5)
    (line,) = lines
    assert line.startswith("cannot write the profile of steps 2 to 3: ")


def test_another_active_trace_does_not_end_the_run(make: Any, tmp_path: Path):
    profiler, lines = make(capture_step=2)
    with profiler, jax.profiler.trace(tmp_path / "other"):
        run_steps(profiler, range(1, 5))
    (line,) = lines
    assert line.startswith("no profile of step 2: ")
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("port", ["in use", 99999])
def test_profiler_server_at_an_unavailable_port_raises(port: str | int):
    with socket.create_server(("", 0)) as taken:
        number = taken.getsockname()[1] if isinstance(port, str) else port
        with pytest.raises(UsageError) as caught, profiler_server(number):
            pass
    assert (caught.value.field, caught.value.value) == ("--jax_profiler_port", number)


def test_profiler_server_listens_at_its_port():
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    with profiler_server(port), socket.create_connection(("localhost", port), timeout=10):
        pass
