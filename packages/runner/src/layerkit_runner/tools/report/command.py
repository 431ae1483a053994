"""`runner report`, `runner status`, and the observer that keeps a report of a running job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from layerkit_runner.config.help import read_words
from layerkit_runner.errors import as_usage_error
from layerkit_runner.files.text import color_text, draw_table, printable, size_text
from layerkit_runner.observers.base import Observer, RunInfo
from layerkit_runner.run_options import Flag, html_file, positive
from layerkit_runner.tools.report.page import Report, summarize
from layerkit_runner.tools.report.record import JobRecord, read_jobs

_FLAGS = (
    Flag("html", html_file, "file of the page", "FILE", default="report.html"),
    Flag("refresh_secs", positive, "time after which a browser reads the file again", "SECONDS"),
)


def run_report(words: Sequence[str]) -> int:
    """Write the report of job folders as one HTML file; return the exit code."""
    values, jobs = _read_words(words, _FLAGS, "runner report DIR [DIR …] [--html=FILE]")
    if jobs:
        report = Report(jobs, refresh_secs=values["refresh_secs"])
        path = report.save(values["html"])
        print(f"wrote {path} ({size_text(len(report.html.encode()))})", flush=True)
    return 0


def run_status(words: Sequence[str]) -> int:
    """Print the state of job folders; return 1 if a run failed or was killed."""
    _, jobs = _read_words(words, (), "runner status DIR [DIR …]")
    styles = {"finished": "bold green", "failed": "bold red", "killed": "bold red"}
    for job in jobs:
        print(color_text(f"{job.name}: {job.state}", styles.get(job.state, "bold cyan")))
        print("\n".join(draw_table([*summarize(job, jobs).items(), ("folder", job.folder)])))
        print(*(color_text(printable(error), "red") for error in job.errors), sep="\n", flush=True)
    return int(any(job.state in ("failed", "killed") for job in jobs))


def _read_words(
    words: Sequence[str], flags: Sequence[Flag], usage: str
) -> tuple[dict[str, Any], list[JobRecord]]:
    """Return the values of flags and the records of folders; print the usage for `--help`."""
    if (read := read_words(words, flags, page=usage)) is None:
        return {}, []
    values, folders = read
    with as_usage_error(OSError, owner=usage):
        return values, read_jobs(folders)


class ReportPage(Observer):
    """An observer that writes the report of a running job into its folder.

    A process of low priority makes the page, so that training steps do not wait for it.
    """

    def __init__(self, *, file: str = "report.html", interval_secs: float = 60.0) -> None:
        """Store the name of the file in the job folder, and the seconds between two writes."""
        self.file, self.interval_secs = file, interval_secs
        self._folder: str | None = None
        self._next = 0.0

    def start(self, info: RunInfo) -> None:
        """Store the folder of a training run."""
        if info.job_log_dir is not None and info.mode == "train":
            self._folder = os.fspath(info.job_log_dir)

    def progress(self, step: int) -> None:
        """Write the page if it is due; a browser that shows it reads it again."""
        del step
        if self._folder is not None and time.monotonic() >= self._next:
            began = time.monotonic()
            self._write(f"--refresh_secs={max(round(self.interval_secs), 1)}")
            # A page of a long run takes seconds of a core, and at most a tenth of the time.
            self._next = max(began + self.interval_secs, 10 * time.monotonic() - 9 * began)

    def close(self) -> None:
        """Write the last page."""
        if self._folder is not None:
            self._write()

    def _write(self, *flags: str) -> None:
        words = ["report", str(self._folder), f"--html={self._folder}/{self.file}", *flags]
        # Without -P, a file of the current folder would shadow an installed module of its name.
        command = ["nice", sys.executable, "-P", "-m", "layerkit_runner.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.file} was not written: {done.stderr[-1000:]}")
