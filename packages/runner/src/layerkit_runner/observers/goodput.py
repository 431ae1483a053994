"""Goodput, the wall-clock accounting of a job by phase, over all its runs.

The phases of the main thread add up to the elapsed time. The goodput is the share of `steps`:

    start        before the first step: building, restoring, opening the data
    compile      tracing and compiling the training step
    input_wait   idle devices for lack of a batch
    save         waiting for a checkpoint (writing continues in the background)
    eval, decode including the compilation of their steps
    profile      starting, stopping and writing a trace
    lost         steps that were not saved, and that a later run repeated
    other        everything else, such as the report at the end

Time between two runs is counted separately, since the job may have been paused on purpose.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from layerkit_runner.files.atomic_write import atomic_write, read_regular
from layerkit_runner.observers.base import Background, Observer, RunInfo

PHASES = (
    *("steps", "compile", "input_wait", "save", "eval", "decode", "profile"),
    *("start", "lost", "other"),
)
_SECONDS_BETWEEN_WRITES = 30.0


class Goodput:
    """A clock that splits time into phases; a nested phase interrupts the one around it.

    Attributes:
      num_steps: Number of completed steps whose time is in `steps`.
      num_lost_steps: Number of steps that a later run repeated.
      seconds_between_runs: Time from the last record of a run to the start of the next.
      num_runs: Number of runs of this job, including this one.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start the phase `start`; `clock` returns seconds."""
        self._clock = clock
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._stack = ["start"]
        self._mark = clock()
        self.num_steps = 0
        self.num_lost_steps = 0
        self.seconds_between_runs = 0.0
        self.num_runs = 1

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the `with` block as `name`, one of `PHASES`."""
        self._count()
        self._stack.append(name)
        try:
            yield
        finally:
            self._count()
            self._stack.pop()

    def outermost(self, name: str) -> None:
        """Count time outside all `with` blocks as `name` from now on."""
        self._count()
        self._stack[0] = name

    def moved(self, name: str, seconds: float) -> None:
        """Count the last `seconds` of the current phase as `name` instead."""
        self._seconds[self._stack[-1]] -= seconds
        self._seconds[name] += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds by phase, up to now."""
        self._count()
        return dict(self._seconds)

    def shares(self) -> dict[str, float]:
        """Return the share of each phase that is not empty, by `goodput/<phase>`."""
        seconds = self.seconds()
        total = max(sum(seconds.values()), 1e-9)
        return {f"goodput/{name}": value / total for name, value in seconds.items() if value > 0}

    def add_earlier(
        self, record: Mapping[str, Any], *, start_step: int, seconds_between: float
    ) -> None:
        """Add the `record()` of earlier runs of the job."""
        done = record["num_steps"]
        lost = min(done, max(0, record["step"] - start_step))
        lost_seconds = record["seconds"]["steps"] * lost / done if done else 0.0
        for name in PHASES:
            self._seconds[name] += record["seconds"].get(name, 0.0)
        self._seconds["steps"] -= lost_seconds
        self._seconds["lost"] += lost_seconds
        self.num_steps += done - lost
        self.num_lost_steps += record["num_lost_steps"] + lost
        self.num_runs += record["num_runs"]
        self.seconds_between_runs += record["seconds_between_runs"] + max(0.0, seconds_between)

    def record(self) -> dict[str, Any]:
        """Return all counts as JSON values."""
        return {
            "seconds": {name: round(value, 3) for name, value in self.seconds().items()},
            "num_steps": self.num_steps,
            "num_lost_steps": self.num_lost_steps,
            "num_runs": self.num_runs,
            "seconds_between_runs": round(self.seconds_between_runs, 3),
        }

    def summary(self) -> str:
        """Return `goodput: 91.2 % of 1:02:03 in steps; compile 4.0 %, …`."""
        shares = self.shares()
        total = sum(self.seconds().values())
        rest = [
            f"{name.removeprefix('goodput/')} {share:.1%}"
            for name, share in sorted(shares.items(), key=lambda item: -item[1])
            if name != "goodput/steps" and share >= 0.0005
        ]
        text = f"goodput: {shares.get('goodput/steps', 0.0):.1%} of {_clock_text(total)} in steps"
        if rest:
            text += f"; {', '.join(rest)}"
        if self.num_runs > 1:
            text += f"; {self.num_runs} runs, {_clock_text(self.seconds_between_runs)} between them"
        if self.num_lost_steps:
            word = "step" if self.num_lost_steps == 1 else "steps"
            text += f", {self.num_lost_steps} {word} repeated"
        return text

    def _count(self) -> None:
        now = self._clock()
        self._seconds[self._stack[-1]] += now - self._mark
        self._mark = now


class GoodputLog(Observer):
    """An observer that records the goodput of a training job, over all its runs, in goodput.json.

    The file is written in the background, every 30 seconds, with each save and at the end. The
    hooks run on the main thread, whose time they read.
    """

    in_background = False

    def __init__(self, goodput: Goodput, *, clock: Callable[[], float] = time.time) -> None:
        """Store the goodput to record; `clock` returns Unix time in seconds."""
        self._goodput = goodput
        self._clock = clock
        self._background = Background()
        self._path: epath.Path | None = None
        self._step = 0
        self._last_write = clock()

    def start(self, info: RunInfo) -> None:
        """Add the record of earlier runs, and write the first one."""
        if info.job_log_dir is None or info.mode != "train":
            return
        self._step = info.start_step
        path = info.job_log_dir / "goodput.json"
        if path.exists():
            record = json.loads(read_regular(path))
            began = self._clock() - sum(self._goodput.seconds().values())
            self._goodput.add_earlier(
                record, start_step=info.start_step, seconds_between=began - record["time"]
            )
        self._path = path
        self.flush()

    def progress(self, step: int) -> None:
        """Count the step, and write the record every 30 seconds."""
        self._step = step
        self._goodput.num_steps += 1
        if self._clock() - self._last_write >= _SECONDS_BETWEEN_WRITES:
            self.flush()

    def flush(self) -> None:
        """Start writing the record."""
        if self._path is not None:
            self._last_write = self._clock()
            head = {"step": self._step, "time": round(self._last_write, 3)}
            text = json.dumps({**head, **self._goodput.record()}, indent=2) + "\n"
            self._background.submit(atomic_write, self._path, text)

    def close(self) -> None:
        """Write the last record."""
        try:
            self.flush()
        finally:
            self._path = None
            self._background.close()


def _clock_text(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
