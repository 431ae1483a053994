"""What a job folder holds about its training, as plain values. JAX is not needed to read it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

from etils import epath

from layerkit.config.checks import require
from layerkit_runner.config.recorded import RecordedConfig, read_recorded_config
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.atomic_write import absolute
from layerkit_runner.files.text import near_folders, printable
from layerkit_runner.observers.metrics_log import (
    Metrics,
    Record,
    metrics_path,
    read_metrics,
    smooth,
)

_SECONDS_UNTIL_SILENT = 600.0
_MAX_SAMPLES, _MAX_SAMPLE_CHARACTERS = 60, 600
_LOG_BYTES, _MAX_ERRORS, _MAX_ERROR_CHARACTERS = 100_000, 10, 500
_MIN_RECORDS = 20  # Fewer have no trend.


@dataclasses.dataclass(frozen=True)
class JobRecord:
    """The record of one job folder.

    Attributes:
      folder: Absolute path of the folder.
      name: Short name that differs from those of other runs of a report.
      metrics: Series of training and of evaluations, those of other modes included.
      config: Recorded configuration; empty without config.json.
      seconds: Seconds by phase over all starts; empty without goodput.json.
      starts: Seconds by phase of each start.
      samples: (step, data set, prompt, continuation) of the first decoded example, newest first.
      checkpoints: Steps of the checkpoints in ascending order.
      state: State of the run, as docs/reports.md lists them.
      errors: Last lines of the logs that name an error, and the reason of a failure.
    """

    folder: str
    name: str
    metrics: Metrics
    config: RecordedConfig
    seconds: dict[str, float]
    starts: list[dict[str, float]]
    samples: list[tuple[int, str, str, str]]
    checkpoints: list[int]
    state: str
    errors: list[str]

    @property
    def newest(self) -> Record:
        """Scalars of the newest training step that was recorded; empty without steps."""
        return self.metrics.train[-1] if self.metrics.train else {}

    @property
    def held_out(self) -> dict[str, float]:
        """Newest loss of each evaluation, by data set."""
        newest = {name: rows[-1] for name, rows in self.metrics.evals.items()}
        return {name: row["loss"] for name, row in newest.items() if "loss" in row}

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds at the mean speed since the newest start; None if unknown."""
        start, last = self.metrics.info, self.newest
        first = next((r for r in self.metrics.train if r["step"] > start.get("step", 0)), last)
        if "num_train_steps" not in start or first is last:
            return None
        seconds, steps = (last[key] - first[key] for key in ("time", "step"))
        return seconds / steps * (start["num_train_steps"] - last["step"])

    def notes(self) -> Iterator[str]:
        """Yield what a reader should look at first, such as a loss that rose or slow data."""
        losses = [r["loss"] for r in self.metrics.train if math.isfinite(r.get("loss", math.nan))]
        means = smooth(losses, half_width=len(losses) // 40)
        if len(means) >= _MIN_RECORDS:
            low, high = min(means), max(means)
            if means[-1] - low > 0.25 * (high - low):
                yield f"mean loss rose from {low:.4g} to {means[-1]:.4g}"
        if not math.isfinite(self.newest.get("loss", 0.0)):
            yield f"loss is {self.newest['loss']}"
        if skipped := self.newest.get("learning/skipped_steps"):
            yield f"{skipped:,.0f} skipped steps"
        steps, waits = (self.seconds.get(phase, 0.0) for phase in ("steps", "input_wait"))
        if waits > 0.1 * (steps + waits):
            yield f"devices wait for input {waits / (steps + waits):.0%} of the step time"
        for kind, text in (("rollback", "rolled back to"), ("resume", "resumed at")):
            if to := [one["step"] for one in self.metrics.events if one["event"] == kind]:
                yield f"{text} step {', '.join(f'{step:,}' for step in to[-3:])}"


def read_jobs(folders: Iterable[str | os.PathLike[str]]) -> list[JobRecord]:
    """Read the records of job folders; a folder of a sweep stands for its trials.

    Raises:
      UsageError: There is no folder, or one holds neither metrics.jsonl nor config.json.
    """
    paths: dict[epath.Path, None] = {}
    for folder in folders:
        path = absolute(folder)
        jobs = [
            one
            for one in [path, *sorted((path / "trials").glob("*"))]
            if metrics_path(one).exists()
            or any((one / name).exists() for name in ("config.json", "output.txt"))
        ]
        if not jobs:
            expected = "a job folder with metrics.jsonl, which a training run writes"
            choices = near_folders(os.fspath(folder))
            raise UsageError(field="DIR", value=str(path), expected=expected, choices=choices)
        paths |= dict.fromkeys(jobs)
    require(paths, "report of runs", "DIR", [], "at least one job folder", UsageError)
    # The slash before makes absolute paths of remote ones.
    shared = os.path.commonpath([f"/{path.parent}" for path in paths])
    return [_read(path, printable(os.path.relpath(f"/{path}", shared))) for path in paths]


def plain_text(value: Any) -> str:
    """Return a text as it is, and any other JSON value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _read(path: epath.Path, name: str) -> JobRecord:
    has_metrics = metrics_path(path).exists()
    metrics = read_metrics(path) if has_metrics else Metrics(info={}, train=[], evals={}, events=[])
    for other in sorted(path.glob("metrics_*.jsonl")):  # of other modes, such as eval
        for dataset, records in read_metrics(other).evals.items():
            kept = [row for row in records if not _is_lost(row, metrics.events)]
            rows = [*metrics.evals.get(dataset, []), *kept]
            newest: dict[int, Record] = {}
            for row in sorted(rows, key=lambda row: row["time"]):
                newest[row["step"]] = {**newest.get(row["step"], {}), **row}
            if rows:
                metrics.evals[dataset] = [newest[step] for step in sorted(newest)]
    file = path / "goodput.json"
    with as_usage_error(ValueError, owner=str(file)):
        goodput = json.loads(file.read_text()) if file.exists() else {}
    seconds = goodput.get("seconds", {})
    steps = [p.name.rpartition("_")[2] for p in (path / "checkpoints").glob("checkpoint_*")]
    state = _state(path / ".running", metrics)
    errors = _log_errors(path) if state in ("failed", "killed", "not started") else []
    errors += [metrics.events[-1]["reason"]] if state == "failed" else []
    return JobRecord(
        folder=str(path),
        name=name,
        metrics=metrics,
        config=read_recorded_config(str(path)) or RecordedConfig("", {}, [], {}, {}),
        seconds=seconds,
        starts=goodput.get("runs", [seconds] if seconds else []),
        samples=[*_samples(path)],
        checkpoints=sorted(int(step) for step in steps if step.isdecimal()),
        state=state,
        errors=[printable(line[:_MAX_ERROR_CHARACTERS]) for line in errors],
    )


def _is_lost(row: Record, events: Iterable[Record]) -> bool:
    """Return whether training began again, or rolled back, below the step of an older record."""
    return any(e.get("step", math.inf) < row["step"] and e["time"] > row["time"] for e in events)


def _state(lock: epath.Path, metrics: Metrics) -> str:
    began, host = 0.0, None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or being written
        host = json.loads(lock.read_text())["host"]
        began = os.stat(lock).st_mtime
    last = metrics.events[-1] if metrics.events else {}
    if "reason" in last and last["time"] >= began:  # No process has begun since.
        ends = {"finished": "finished", "stopped by a signal": "stopped"}
        return ends.get(last["reason"], "failed")
    if host == socket.gethostname():
        return "running" if _is_locked(lock) else "killed"
    if not (last or began):
        return "not started"
    num_steps = metrics.info.get("num_train_steps", math.inf)
    # A run of an earlier version records neither its environment nor its end.
    if (
        "environment" not in metrics.info
        and metrics.train
        and metrics.train[-1]["step"] >= num_steps
    ):
        return "finished"
    series = [metrics.train, metrics.events, *metrics.evals.values()]
    newest = max([began, *(records[-1]["time"] for records in series if records)])
    return "running" if time.time() - newest < _SECONDS_UNTIL_SILENT else "silent"


def _is_locked(path: epath.Path) -> bool:
    """Return whether a process of this host holds the lock of a job folder."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _samples(path: epath.Path) -> Iterator[tuple[int, str, str, str]]:
    files = sorted(path.glob("decode/*/step_*.jsonl"), key=lambda file: file.stem, reverse=True)
    for file in files[:_MAX_SAMPLES]:
        # A run that decodes a step again deletes the file for a moment.
        with contextlib.suppress(OSError, ValueError), file.open() as lines:
            record = json.loads(lines.readline())
            prompt = plain_text(record.get("prompt", ""))[-_MAX_SAMPLE_CHARACTERS:]
            text = plain_text(record.get("continuation", record))[:_MAX_SAMPLE_CHARACTERS]
            yield int(file.stem.rpartition("_")[2]), file.parent.name, prompt, text


def _log_errors(path: epath.Path) -> list[str]:
    lines: list[str] = []
    for file in [*sorted(path.glob("logs/process_*.log")), path / "output.txt"]:
        if file.exists():
            with file.open("rb") as log:
                log.seek(max(0, file.stat().length - _LOG_BYTES))
                texts = log.read().decode(errors="replace").splitlines()
            lines += [text for text in texts if "Error" in text or "runner: " in text]
    return lines[-_MAX_ERRORS:]
