"""One trial: a process started, its metrics.jsonl followed, and what came of it.

The process is its own world: it may crash, run out of memory or be killed, and the sweep reads from
its exit code, the end of its output and its metrics what happened.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.files.atomic_write import open_append
from layerkit_runner.observers.metrics_log import Record, parse_record

_SECONDS_BETWEEN_LOOKS = 0.5
_END_OF_OUTPUT = 4000  # bytes in which a reason is looked for

State = Literal["complete", "pruned", "failed", "stopped"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a trial's process ended.

    Attributes:
      state: `stopped` is a trial that can go on: the sweep itself was asked to stop.
      value: The metric after the last evaluation; None if there was none.
      step: Training steps that are known to be done.
      reason: Why a trial was pruned or failed; "" otherwise.
    """

    state: State
    value: float | None
    step: int
    reason: str = ""


class UnknownMetricError(UsageError):
    """No evaluation reports the metric of the study."""


class TrialMetrics:
    """What a run has reported so far, read as its record grows.

    Args:
      path: Its metrics.jsonl, which need not be there yet.
      dataset: Which evaluations count.
      name: Of the metric in these.

    Attributes:
      step: The newest step of any record.
      num_train_steps: How many there will be; None while that is unknown.
      values: The metric after each step that was evaluated.
      problem: Why the trial is lost; "" if it is not.

    Raises:
      UnknownMetricError: (by `read`) the evaluations do not report the metric.
    """

    def __init__(self, path: Path, *, dataset: str, name: str) -> None:
        self._path = path
        self._dataset = dataset
        self._name = name
        self._offset = 0
        self.step = 0
        self.num_train_steps: int | None = None
        self.values: dict[int, float] = {}
        self.problem = ""

    @property
    def label(self) -> str:
        """The metric as it is called in a study file."""
        return f"{self._dataset}/{self._name}"

    def read(self) -> list[tuple[int, float]]:
        """Reads what is new; returns the new evaluations: (step, value)."""
        before = len(self.values)
        for record in self._new_records():
            self._take(record)
        return list(self.values.items())[before:]

    def _new_records(self) -> list[Record]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]  # the last line may still be written
        self._offset += len(whole)
        return [parse_record(line) for line in whole.decode().splitlines()]

    def _take(self, record: Record) -> None:
        step = record["step"]
        if "event" in record:
            # A run that goes on may do steps again; their numbers are the same.
            self.step = step
            self.num_train_steps = record.get("num_train_steps", self.num_train_steps)
            return
        self.step = max(self.step, step)
        if record.get("dataset") == self._dataset and step not in self.values:
            value = record.get(self._name)
            if value is None:
                raise UnknownMetricError(self._unknown(record))
            if math.isfinite(value):
                self.values[step] = value
            else:
                self._lose(f"{self.label} is {value} at step {step}")

    def _lose(self, problem: str) -> None:
        # Several may be read at a time, and those that follow are consequences.
        self.problem = self.problem or problem

    def _unknown(self, record: Record) -> str:
        names = [
            f"{self._dataset}/{name}" for name in record if name not in ("step", "time", "dataset")
        ]
        near = near_names(self.label, names)
        return (
            f"metric={self.label!r} is not reported by the evaluations{near}"
            f" They report {first_names(names)}."
        )


class TrialProcess:
    """The process of a trial, apart from the terminal's signals.

    Args:
      folder: The trial's job folder.
      words: Of the command `runner`.
    """

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self._output = folder / "output.txt"
        module = [sys.executable, "-m", "layerkit_runner.tools.sweep.trial_process"]
        with open_append(self._output) as output:
            self._began = output.tell()
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [*module, str(folder / "process.lock"), *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the sweep, which passes on what is to be done.
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int | None:
        """The exit code; None if it still runs after so long."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Asks it to save and leave."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def close(self) -> None:
        """Frees what it held; a process that still runs is asked to leave, and waited for."""
        pipe: IO[bytes] | None = self._process.stdin
        if pipe is not None:
            pipe.close()  # which it takes for a request to leave
        self._process.wait()

    def reason(self, code: int) -> str:
        """Why it ended with this exit code: the last line that sounds like it."""
        with open(self._output, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(self._began, size - _END_OF_OUTPUT))
            lines = file.read().decode(errors="replace").splitlines()
        said = [
            line for line in lines if re.match(r"runner: |(\w+\.)*\w+(Error|Exception)\b", line)
        ]
        if said:
            return said[-1].removeprefix("runner: ")
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return "killed by SIGKILL, as systems do that run out of memory"
        if code < 0 or code > 128:
            number = -code if code < 0 else code - 128
            return f"ended by {signal.Signals(number).name}"
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        return f"exit code {code}: {last.strip()}"


def follow(
    process: TrialProcess,
    metrics: TrialMetrics,
    *,
    report: Callable[[int, float], None],
    should_prune: Callable[[], bool],
    should_stop: Callable[[], bool],
    should_kill: Callable[[], bool],
) -> Outcome:
    """Waits for a trial's end, or brings it about.

    Args:
      process: Started.
      metrics: Of its folder.
      report: Takes the step and value of each new evaluation.
      should_prune: Asked after an evaluation, unless it was the last.
      should_stop: Whether the sweep is to leave.
      should_kill: Whether it is to leave at once.

    Raises:
      UnknownMetricError: the evaluations do not report the metric.
    """
    is_pruned, is_asked, is_killed = False, False, False
    code = None
    while code is None:
        code = process.wait(_SECONDS_BETWEEN_LOOKS)
        for step, value in metrics.read():
            report(step, value)
            is_last = metrics.num_train_steps is not None and step >= metrics.num_train_steps
            if code is None and not is_last:
                is_pruned = is_pruned or should_prune()
        if (is_pruned or metrics.problem or should_stop()) and not is_asked and code is None:
            process.stop()
            is_asked = True
        if should_kill() and not is_killed and code is None:
            process.kill()
            is_killed = True
    step, values = metrics.step, metrics.values
    last = values[max(values)] if values else None
    if metrics.problem:
        return Outcome("failed", last, step, metrics.problem)
    if code == 0:
        if last is None:
            return Outcome("failed", None, step, f"no evaluation reported {metrics.label}")
        return Outcome("complete", last, step)
    if is_pruned:
        return Outcome("pruned", last, step)
    if should_stop():
        return Outcome("stopped", last, step)
    return Outcome("failed", last, step, process.reason(code))
