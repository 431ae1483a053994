"""What a job folder holds about its training, as plain values. JAX is not needed to read it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

from etils import epath

from layerkit_runner.config.recorded import RecordedConfig, read_recorded_config
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import absolute, is_remote
from layerkit_runner.files.text import near_folders
from layerkit_runner.observers.metrics_log import (
    Metrics,
    Record,
    metrics_path,
    read_metrics,
    smooth,
)

_SECONDS_UNTIL_SILENT = 600.0
_MAX_SAMPLES, _MAX_SAMPLE_CHARACTERS = 60, 600
_LOG_BYTES, _MAX_ERRORS = 100_000, 10


@dataclasses.dataclass(frozen=True)
class JobRecord:
    """The record of one job folder.

    Attributes:
      folder: Absolute path of the folder.
      name: Short name that differs from those of other runs of a report.
      metrics: Series of training and of evaluations, those of other modes included.
      config: Recorded configuration; None without config.json.
      goodput: Content of goodput.json; empty without it.
      samples: (step, data set, prompt, continuation) of the first decoded example, newest first.
      checkpoints: Steps of the checkpoints in ascending order.
      state: State of the run, as docs/reports.md lists them.
      errors: Last lines of the logs that name an error, and the reason of a failure.
    """

    folder: str
    name: str
    metrics: Metrics
    config: RecordedConfig | None
    goodput: dict[str, Any]
    samples: list[tuple[int, str, str, str]]
    checkpoints: list[int]
    state: str
    errors: list[str]

    @property
    def newest(self) -> Record:
        """Scalars of the newest training step that was recorded; empty without steps."""
        return self.metrics.train[-1] if self.metrics.train else {}

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
        """Yield what a reader should look at first: a loss that rose, skipped steps, slow data."""
        losses = [r["loss"] for r in self.metrics.train if math.isfinite(r.get("loss", math.nan))]
        means = smooth(losses, half_width=len(losses) // 40)
        if means and means[-1] - min(means) > 0.25 * (max(means) - min(means)):
            yield f"loss rose from {min(means):.4g} to {means[-1]:.4g}"
        if not math.isfinite(self.newest.get("loss", 0.0)):
            yield f"loss is {self.newest['loss']}"
        if skipped := self.newest.get("learning/skipped_steps"):
            yield f"{skipped:,.0f} skipped steps"
        seconds = self.goodput.get("seconds", {"input_wait": 0.0, "steps": 1.0})
        waiting = seconds["input_wait"] / max(seconds["input_wait"] + seconds["steps"], 1e-9)
        if waiting > 0.1:
            yield f"devices wait for input {waiting:.0%} of the step time"


def read_jobs(folders: Iterable[str | os.PathLike[str]]) -> list[JobRecord]:
    """Read the records of job folders; a folder of a sweep stands for its trials.

    Raises:
      UsageError: A folder holds neither metrics.jsonl nor config.json.
    """
    paths: list[epath.Path] = []
    for folder in folders:
        path = absolute(folder)
        jobs = [
            one
            for one in [path, *sorted((path / "trials").glob("*"))]
            if metrics_path(one).exists() or (one / "config.json").exists()
        ]
        if not jobs:
            expected = "a job folder with metrics.jsonl, which a training run writes"
            choices = near_folders(os.fspath(folder))
            raise UsageError(field="DIR", value=str(path), expected=expected, choices=choices)
        paths += [job for job in jobs if job not in paths]
    root = os.path.commonpath(paths) if len(paths) > 1 else os.path.dirname(paths[0])
    return [_read(path, os.path.relpath(path, root)) for path in paths]


def _read(path: epath.Path, name: str) -> JobRecord:
    has_metrics = metrics_path(path).exists()
    metrics = read_metrics(path) if has_metrics else Metrics(info={}, train=[], evals={}, events=[])
    for other in sorted(path.glob("metrics_*.jsonl")):  # of other modes, such as eval
        for dataset, records in read_metrics(other).evals.items():
            rows = {row["step"]: row for row in [*metrics.evals.get(dataset, []), *records]}
            metrics.evals[dataset] = [rows[step] for step in sorted(rows)]
    goodput = path / "goodput.json"
    steps = [p.name.rpartition("_")[2] for p in (path / "checkpoints").glob("checkpoint_*")]
    reason = metrics.events[-1].get("reason", "") if metrics.events else ""
    state = _state(path, metrics, reason)
    has_failed = state in ("failed", "killed", "not started")
    return JobRecord(
        folder=str(path),
        name=name,
        metrics=metrics,
        config=read_recorded_config(str(path)),
        goodput=json.loads(goodput.read_text()) if goodput.exists() else {},
        samples=[*_samples(path)],
        checkpoints=sorted(int(step) for step in steps if step.isdecimal()),
        state=state,
        errors=[line for line in (*_log_errors(path), reason) if line] if has_failed else [],
    )


def _state(path: epath.Path, metrics: Metrics, reason: str) -> str:
    if reason:
        return {"finished": "finished", "stopped by a signal": "stopped"}.get(reason, "failed")
    holder: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is being written
        holder = json.loads((path / ".running").read_text())
    is_seen = holder.get("host") == socket.gethostname()
    if is_seen and os.path.exists(f"/proc/{holder['pid']}"):
        return "running"
    if not metrics.events:
        return "not started"
    series = [metrics.train, metrics.events, *metrics.evals.values()]
    if metrics.train and metrics.train[-1]["step"] >= metrics.info["num_train_steps"]:
        return "finished"
    if is_seen or not (holder or is_remote(path)):
        return "killed"
    silent = time.time() - max(records[-1]["time"] for records in series if records)
    return "running" if silent < _SECONDS_UNTIL_SILENT else "silent"


def _samples(path: epath.Path) -> Iterator[tuple[int, str, str, str]]:
    files = sorted(path.glob("decode/*/step_*.jsonl"), key=lambda file: file.stem, reverse=True)
    for file in files[:_MAX_SAMPLES]:
        record: dict[str, Any] = {}
        # A run that decodes a step again deletes the file for a moment.
        with contextlib.suppress(FileNotFoundError), file.open() as lines:
            record = json.loads(next(iter(lines), "{}"))
        prompt, text = record.get("prompt", ""), record.get("continuation", json.dumps(record))
        step, size = int(file.stem.rpartition("_")[2]), _MAX_SAMPLE_CHARACTERS
        yield step, file.parent.name, prompt[-size:], text[:size]


def _log_errors(path: epath.Path) -> list[str]:
    lines: list[str] = []
    for file in [*sorted(path.glob("logs/process_*.log")), path / "output.txt"]:
        if file.exists():
            with file.open("rb") as log:
                log.seek(max(0, file.stat().length - _LOG_BYTES))
                texts = log.read().decode(errors="replace").splitlines()
            lines += [text for text in texts if "Error" in text or "runner: " in text]
    return lines[-_MAX_ERRORS:]
