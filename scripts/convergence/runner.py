"""Run and kill `runner` commands, whose jobs are in one folder."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerkit_runner.observers import read_metrics


class Runner:
    """A folder of jobs and the commands that ran in it.

    Args:
      folder: Folder of jobs and data.
      overrides: Values of fields that are set in every run, by name.
    """

    def __init__(self, folder: Path, overrides: Mapping[str, str]) -> None:
        """Create a runner without commands."""
        self.folder = folder
        self.overrides = overrides
        self.commands: list[str] = []

    def words(self, name: str, exp: str, fields: Mapping[str, Any], *flags: str) -> list[str]:
        """Return the arguments of `runner` for a job."""
        settings = {**fields, **self.overrides}
        data = str(self.folder / "data")
        return [
            f"--exp={exp}",
            f"--job_log_dir={self.folder / name}",
            *flags,
            *(
                f"--fdl.{name}={value}".replace("DATA/", f"{data}/")
                for name, value in settings.items()
            ),
        ]

    def start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Print and start a command that writes to the output of this process."""
        print(f"\n$ {shlex.join(['runner', *words])}", flush=True)
        return subprocess.Popen([sys.executable, "-m", "layerkit_runner.cli", *words])

    def note(self, words: Sequence[str], remark: str = "") -> None:
        """Add a command to the record."""
        self.commands.append(shlex.join(["runner", *words]) + remark)

    def run(self, words: Sequence[str]) -> None:
        """Run a command to its end; exit if it failed."""
        self.note(words)
        check(self.start(words))

    def run_with_a_kill(self, words: Sequence[str], job: Path, *, at_step: int) -> int:
        """Kill the command after `at_step` and resume it; return the last step before the kill."""
        process = self.start(words)
        while last_step(job) < at_step:
            if process.poll() is not None:
                sys.exit(f"the run ended before step {at_step}, the step of the kill")
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed = last_step(job)
        print(f"killed after step {killed}; resuming by the same command:", flush=True)
        check(self.start(words))
        return killed


def check(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process; exit if it failed."""
    if process.wait():
        sys.exit(f"exit code {process.returncode}")


def last_step(job: Path) -> int:
    """Return the newest training step in the metrics of a job, or 0 if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return max((record["step"] for record in read_metrics(job).train), default=0)
    return 0


def curve(records: Sequence[Mapping[str, Any]], key: str = "loss") -> list[list[float]]:
    """Return pairs of step and value."""
    return [[record["step"], record[key]] for record in records]
