"""A recorder of reports, and processes of their own that run experiments of this folder."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.observers import Observer, read_metrics

collect_ignore = ["rollback_experiment.py"]

TIMEOUT = 240.0


@dataclasses.dataclass
class Processes:
    """Commands for one folder; they end with the test.

    Attributes:
      folder: Job folder.
      cache: Folder of compiled programs.
      num_devices: Number of devices of each process.
    """

    folder: Path
    cache: Path
    num_devices: int = 1
    started: list[subprocess.Popen[str]] = dataclasses.field(default_factory=list)

    def start(
        self, *flags: str, exp: str = "gated_experiment.Gated", **fields: Any
    ) -> subprocess.Popen[str]:
        """Start the command."""
        devices = f"--xla_force_host_platform_device_count={self.num_devices}"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "layerkit_runner.cli"),
                f"--exp={exp}",
                f"--job_log_dir={self.folder}",
                f"--jax_compilation_cache={self.cache}",
                *(f"--fdl.{name}={value}" for name, value in fields.items()),
                *flags,
            ],
            cwd=Path(__file__).parent,  # where the experiments are found
            env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def start_two(self, *flags: str, **options: Any) -> list[subprocess.Popen[str]]:
        """Start the command as two processes of one job."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            meeting = f"--coordinator_address=localhost:{free.getsockname()[1]}"
        meet = [meeting, "--num_processes=2"]
        return [self.start(*meet, f"--process_id={i}", *flags, **options) for i in range(2)]

    def run(self, *flags: str, **fields: Any) -> str:
        """Run the command to its end, which must be a good one; return what it printed."""
        return self.ended(self.start(*flags, **fields))

    def ended(self, process: subprocess.Popen[str], code: int = 0) -> str:
        """Wait for the end of a process; return what it printed since it was last read."""
        output = process.communicate(timeout=TIMEOUT)[0]
        assert process.returncode == code, output
        return output

    def said(self, process: subprocess.Popen[str], text: str) -> None:
        """Wait until a process has printed a line with this text."""
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if text in line:
                return
        raise AssertionError("".join(lines))

    def wait_for(self, process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
        """Wait until a condition holds while a process runs."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def record(self, step: int, name: str = "heldout") -> Path:
        return self.folder / "eval" / name / f"step_{step:08d}.json"

    def read_evaluation(self, step: int, name: str = "heldout") -> dict[str, float]:
        return json.loads(self.record(step, name).read_text())["metrics"]

    def evaluated(self, name: str = "heldout") -> list[int]:
        """The steps that have a record."""
        return sorted(
            int(path.stem.removeprefix("step_"))
            for path in (self.folder / "eval" / name).glob("*.json")
        )

    def by_training(self, step: int) -> dict[str, float]:
        """What the training job found after this step."""
        (line,) = (e for e in read_metrics(self.folder).evals["heldout"] if e["step"] == step)
        return {name: line[name] for name in ("loss", "total_weight")}


@pytest.fixture
def processes(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Return the processes of one job folder."""
    made = Processes(tmp_path / "job", tmp_path_factory.getbasetemp() / "compiled")
    yield made
    for process in made.started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Recorder(Observer):
    """Records what is reported: that of training steps by step, the rest in order."""

    def __init__(self) -> None:
        self.completed: list[int] = []
        self.messages: list[str] = []
        self.evals: list[tuple[int, str, dict[str, float]]] = []
        self.texts: list[tuple[int, str, str]] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.weights: dict[int, dict[str, Any]] = {}
        self.pictures: dict[int, dict[str, Any]] = {}

    def progress(self, step: int) -> None:
        self.completed.append(step)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def eval_metrics(self, step: int, dataset: str, scalars: Any) -> None:
        self.evals.append((step, dataset, dict(scalars)))

    def text(self, step: int, name: str, text: str) -> None:
        self.texts.append((step, name, text))

    def train_metrics(self, step: int, scalars: Any) -> None:
        self.metrics[step] = dict(scalars)

    def histograms(self, step: int, histograms: Any) -> None:
        self.weights[step] = dict(histograms)

    def images(self, step: int, images: Any) -> None:
        self.pictures[step] = dict(images)


@pytest.fixture
def make_recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
