"""The folder of a sweep, and the process and metrics of each of its trials.

    DIR/study.json       what is searched
    DIR/study.db         Optuna's storage, unless --study_storage names another
    DIR/study.lock       held by a process while it decides which trial it takes
    DIR/trials/0007/     the job folder of a trial
      trial.lock         held by the sweep's process while the trial is its own
      process.lock       held by the trial's process while it lives
      output.txt         what that process printed

This module is also the program of a trial, `python -m … LOCK MODULE WORDS`: it runs the module with
these words while it holds LOCK, and stops when its sweep is gone.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from layerkit.errors import first_names
from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write, open_append
from layerkit_runner.files.bounded_documents import DocumentError, parse_json, read_text
from layerkit_runner.files.locks import lock, try_lock
from layerkit_runner.observers.metrics_log import Record, parse_record

# `trainer.job_folder` knows it too, and does not train in a folder that holds it.
RECORD = "study.json"
_MAX_REASON_BYTES = 4000  # of the end of a trial's output
_DAMAGED = "Copy it from a backup, or delete it: the next command of the study writes it anew."


class SweepFolder:
    """Paths and locks of one sweep; a store, and the folder of a training run, cannot be one."""

    def __init__(self, given: str) -> None:
        if "://" in given:
            raise UsageError(
                f"--job_log_dir={given}: a sweep needs a folder of a file system, since its"
                " processes find each other by locks."
            )
        self.given = given
        self.path = Path(given).expanduser().absolute()
        for name in ("config.json", "checkpoints"):
            if (self.path / name).exists():
                raise UsageError(
                    f"--job_log_dir={given} holds a run ({name}); a sweep needs a folder of its"
                    " own."
                )

    def trial(self, number: int) -> Path:
        """Return the job folder of a trial."""
        return self.path / "trials" / f"{number:04d}"

    def shown(self, name: str) -> str:
        """Return a path in the folder as the user wrote the folder."""
        return f"{self.given.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Exclude the other processes of the sweep."""
        with lock(self.path / "study.lock"):
            yield

    def try_to_own(self, number: int) -> IO[bytes] | None:
        """Return the lock of a trial, to be closed at its end; None if another process has it."""
        return try_lock(self.trial(number) / "trial.lock")

    def recorded(self) -> dict[str, Any] | None:
        """Return what is searched here, or None in a new folder."""
        path, problem = self.path / RECORD, "expected an object"
        try:
            found = parse_json(read_text(path))
            if isinstance(found, dict):
                return found
        except FileNotFoundError:
            return None
        except (OSError, DocumentError) as error:
            problem = str(error)
        raise UsageError(f"{path} is damaged: {problem}. {_DAMAGED}")

    def record(self, found: Mapping[str, Any]) -> None:
        """Write what is searched here."""
        atomic_write(self.path / RECORD, json.dumps(found, indent=2) + "\n")

    def forget_metric(self) -> None:
        """Let the next command name another metric, since no trial has reported this one."""
        with self.deciding():
            self.record({**(self.recorded() or {}), "metric": None})


class UnknownMetricError(UsageError):
    """No evaluation reports the metric of the study."""


class TrialMetrics:
    """The metrics that a trial has reported, read as its metrics.jsonl grows.

    Attributes:
      step: The newest step of any record.
      num_train_steps: The last step of the run; None until it is known.
      values: The metric by evaluated step.
      problem: Why the trial has failed; empty if it has not.
    """

    def __init__(self, path: Path, *, dataset: str, name: str) -> None:
        self._path = path
        self._dataset = dataset
        self._name = name
        self._offset = 0
        self.label = f"{dataset}/{name}"
        self.step = 0
        self.num_train_steps: int | None = None
        self.values: dict[int, float] = {}
        self.problem = ""

    def read(self) -> list[tuple[int, float]]:
        """Read what is new and return the new evaluations: (step, value)."""
        before = len(self.values)
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                content = file.read()
            complete = content[: content.rfind(b"\n") + 1]  # the last line may be half written
            self._offset += len(complete)
            for line in complete.decode().splitlines():
                self._add(parse_record(line))
        return list(self.values.items())[before:]

    def is_last(self, step: int) -> bool:
        """Return whether the evaluation at a step is that of the end of training."""
        return self.num_train_steps is not None and step >= self.num_train_steps

    @property
    def last_value(self) -> float | None:
        """The metric of the last evaluation."""
        return self.values[max(self.values)] if self.values else None

    def _add(self, record: Record) -> None:
        step = record["step"]
        if "event" in record:
            # A resumed run may repeat steps; their numbers are the same.
            self.step = step
            self.num_train_steps = record.get("num_train_steps", self.num_train_steps)
            return
        self.step = max(self.step, step)
        if record.get("dataset") != self._dataset or step in self.values:
            return
        value = record.get(self._name)
        if value is None:
            names = [f"{self._dataset}/{n}" for n in record if n not in ("step", "time", "dataset")]
            raise UnknownMetricError(
                f"metric={self.label!r} is not reported by the evaluations"
                f"{near_names(self.label, names)} They report {first_names(names)}."
            )
        if math.isfinite(value):
            self.values[step] = value
        else:
            # Later problems are consequences of the first.
            self.problem = self.problem or f"{self.label} is {value} at step {step}"


class TrialProcess:
    """The process of a trial, in a session of its own.

    Args:
      folder: Job folder of the trial.
      words: Arguments of `runner`.
    """

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self._output = folder / "output.txt"
        module = [sys.executable, "-m", __name__, str(folder / "process.lock")]
        with open_append(self._output) as output:
            self._began = output.tell()
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [*module, "layerkit_runner.cli", *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the sweep, which stops its trial itself.
                start_new_session=True,
            )
        self.stop = self._process.terminate
        self.kill = self._process.kill

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if the process still runs after so many seconds."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Ask the process to stop if it still runs, and wait for its end."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # which the process takes for a request to stop
        self._process.wait()

    def reason(self, code: int) -> str:
        """Return why the process ended with this exit code: the last line that names an error."""
        with open(self._output, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(self._began, size - _MAX_REASON_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        errors = [s for s in lines if re.match(r"runner: |(\w+\.)*\w+(Error|Exception)\b", s)]
        if errors:
            return errors[-1].removeprefix("runner: ")
        number = -code if code < 0 else code - 128
        if number == signal.SIGKILL:
            return "killed by SIGKILL, as systems do that run out of memory"
        if number > 0:
            return f"ended by {signal.Signals(number).name}"
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        return f"exit code {code}: {last.strip()}"


def _main() -> None:
    """Run a trial in this process."""
    threading.Thread(target=_stop_with_sweep, daemon=True).start()
    _, path, module, *words = sys.argv
    with lock(Path(path)):
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _stop_with_sweep() -> None:
    # The sweep holds the other end of the standard input and never writes to it; when the sweep is
    # killed, the operating system closes it. Not sys.stdin.read: a thread inside of a stream keeps
    # the interpreter from ending.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _main()
