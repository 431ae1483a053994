"""The command `runner`, run again and again in one folder, and killed where that is wanted."""

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
    """Runs commands in a folder, saying each before.

    Args:
      folder: Where jobs and data go.
      overrides: Fields that are set in every run, by name.
    """

    def __init__(self, folder: Path, overrides: Mapping[str, str]) -> None:
        self.folder = folder
        self.overrides = overrides
        self.commands: list[str] = []

    def words(self, name: str, exp: str, fields: Mapping[str, Any], *flags: str) -> list[str]:
        """The words after `runner` of a job."""
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
        """Starts a command, whose output goes to this one's."""
        print(f"\n$ {shlex.join(['runner', *words])}", flush=True)
        return subprocess.Popen([sys.executable, "-m", "layerkit_runner.cli", *words])

    def note(self, words: Sequence[str], remark: str = "") -> None:
        """Keeps a command for the record."""
        self.commands.append(shlex.join(["runner", *words]) + remark)

    def run(self, words: Sequence[str]) -> None:
        """Runs a command to its end, which must be a good one."""
        self.note(words)
        check(self.start(words))

    def run_with_a_kill(self, words: Sequence[str], job: Path, *, at_step: int) -> int:
        """Kills the command once it has reported `at_step`; returns the last step in its record."""
        process = self.start(words)
        while last_step(job) < at_step:
            if process.poll() is not None:
                sys.exit(f"the run ended before step {at_step}, at which it was to be killed")
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed = last_step(job)
        print(f"killed after step {killed}; the same command goes on:", flush=True)
        check(self.start(words))
        return killed


def check(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process, whose exit code must be 0."""
    if process.wait():
        sys.exit(f"exit code {process.returncode}")


def last_step(job: Path) -> int:
    """The newest training step in the record of a job; 0 where there is none."""
    with contextlib.suppress(FileNotFoundError):
        return max((record["step"] for record in read_metrics(job).train), default=0)
    return 0
