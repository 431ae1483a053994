"""The folder of a sweep, and the process and metrics of each of its trials.

    DIR/study.json       the searched fields, the metric and the overrides
    DIR/study.db         Optuna's storage, unless --study_storage names another
    DIR/study.lock       held by a process while it claims a trial
    DIR/trials/0007/     the job folder of a trial
      trial.lock         held by the sweep's process that runs the trial
      process.lock       held by the trial's process
      output.txt         output of the trial's process

This module is also the program of a trial, `python -m … LOCK MODULE WORDS`: it runs the module with
these words while it holds LOCK, and stops when its sweep has ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from layerkit.errors import first_names
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write, open_append
from layerkit_runner.files.bounded_documents import DocumentError, parse_json, read_text
from layerkit_runner.files.locks import lock, try_lock
from layerkit_runner.observers.metrics_log import read_metrics

# `trainer.job_folder` has the same name, since it does not train in a folder with this file.
RECORD = "study.json"
# Size of the end of a trial's output that is searched for an error.
_MAX_REASON_BYTES = 4000
_NO_METRICS = ("step", "time", "dataset")
_RESTORE = "Copy it from a backup, or delete it: the next command of the study writes it again."


class SweepFolder:
    """Paths and locks of one sweep."""

    def __init__(self, given: str) -> None:
        """Check the path; a store, and the folder of a training run, are errors."""
        self.given = given
        self.path = Path(given).expanduser().absolute()
        data: dict[str, Any] = {"field": "--job_log_dir", "value": given}
        if "://" in given:
            expected = "a folder of a file system with locks, which the processes of a sweep need"
            raise UsageError(**data, expected=expected)
        for name in ("config.json", "checkpoints"):
            if (self.path / name).exists():
                raise UsageError(
                    f"the folder holds a run ({name})", **data, expected="another folder"
                )

    def trial(self, number: int) -> Path:
        """Return the job folder of a trial."""
        return self.path / "trials" / f"{number:04d}"

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that holds the lock of the sweep, which excludes its other processes."""
        return lock(self.path / "study.lock")

    def try_lock_trial(self, number: int) -> IO[bytes] | None:
        """Return the lock of a trial, to be closed at its end; None if another process has it."""
        return try_lock(self.trial(number) / "trial.lock")

    def read_record(self) -> dict[str, Any] | None:
        """Return the description of the sweep, or None in a new folder."""
        path, problem = self.path / RECORD, "not a JSON object"
        try:
            found = parse_json(read_text(path))
            if isinstance(found, dict):
                return found
        except FileNotFoundError:
            return None
        except (OSError, DocumentError) as error:
            problem = str(error)
        raise UsageError(f"the file is damaged: {problem}", owner=str(path), hint=_RESTORE)

    def write_record(self, found: Mapping[str, Any]) -> None:
        """Write the description of the sweep."""
        atomic_write(self.path / RECORD, json.dumps(found, indent=2) + "\n")

    def clear_metric(self) -> None:
        """Let the next command set another metric, since no trial has reported this one."""
        with self.locked():
            self.write_record({**(self.read_record() or {}), "metric": None})


class UnknownMetricError(UsageError):
    """A metric that no evaluation of the study reports."""


class TrialMetrics:
    """A reader of the metrics that a trial writes to its metrics.jsonl.

    `values` are by evaluated step, `step` is the newest of any record, and `problem` the cause of a
    failure.
    """

    def __init__(self, path: Path, *, dataset: str, name: str) -> None:
        """Read from a file, which may not exist yet, the metric `name` of a data set."""
        self._path, self._dataset, self._name = path, dataset, name
        self._size = 0
        self.label = f"{dataset}/{name}"
        self.step = 0
        self.num_train_steps: int | None = None
        self.values: dict[int, float] = {}
        self.problem = ""

    def read(self) -> list[tuple[int, float]]:
        """Read the new records and return their evaluations: (step, value)."""
        before, size = len(self.values), self._size
        self._size = self._path.stat().st_size if self._path.exists() else 0
        if self._size == size:
            return []
        log = read_metrics(self._path)
        records = log.evals.get(self._dataset, [])
        self.step = max([log.info.get("step", 0), *(r["step"] for r in (*log.train, *records))])
        self.num_train_steps = log.info.get("num_train_steps")
        for record in records:
            value, step = record.get(self._name), record["step"]
            if value is None:
                names = [f"{self._dataset}/{n}" for n in record if n not in _NO_METRICS]
                problem = f"unknown metric; evaluations report {first_names(names)}"
                raise UnknownMetricError(problem, field="metric", value=self.label, choices=names)
            if math.isfinite(value):
                self.values.setdefault(step, value)
            else:
                # Later problems may be consequences of the first.
                self.problem = self.problem or f"{self.label} is {value} at step {step}"
        return list(self.values.items())[before:]

    def is_last(self, step: int) -> bool:
        """Return whether the evaluation at a step is the last one of the run."""
        return self.num_train_steps is not None and step >= self.num_train_steps

    @property
    def last_value(self) -> float | None:
        """The metric of the last evaluation; None if there was no evaluation."""
        return self.values[max(self.values)] if self.values else None


class TrialProcess:
    """The process of a trial, in a session of its own: the sweep receives Ctrl-C and stops it."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        """Start `runner` with these words, for the job folder of the trial."""
        self._output = folder / "output.txt"
        program = [sys.executable, "-m", __name__, str(folder / "process.lock")]
        with open_append(self._output) as output:
            self._began = output.tell()
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [*program, "layerkit_runner.cli", *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.stop = self._process.terminate
        self.kill = self._process.kill

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if the process is still running after the wait."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Request the process to stop if it is still running, and wait for its end."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # `_stop_with_sweep` takes this as a request
        self._process.wait()

    def reason(self, code: int) -> str:
        """Return the cause of an exit code: the last line of output that names an error."""
        with open(self._output, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(self._began, size - _MAX_REASON_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        errors = [s for s in lines if re.match(r"runner: |(\w+\.)*\w+(Error|Exception)\b", s)]
        if errors:
            return errors[-1].removeprefix("runner: ")
        number = -code if code < 0 else code - 128
        if number == signal.SIGKILL:
            return "killed by SIGKILL, possibly for lack of memory"
        if number in {each.value for each in signal.Signals}:
            return f"ended by {signal.Signals(number).name}"
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        return f"exit code {code}: {last.strip()}"


def _stop_with_sweep() -> None:
    # The sweep holds the other end of the standard input and never writes to it. When the sweep is
    # killed, the operating system closes it. With sys.stdin.read the thread would block the exit of
    # the interpreter.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_sweep, daemon=True).start()
    _, path, module, *words = sys.argv
    with lock(Path(path)):
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
