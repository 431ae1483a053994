"""How far a run is, for people: a bar on a terminal, a few plain lines anywhere else.

A log file wants some dozens of lines from a run, whether it takes a minute or a month, and a sign
of life in between; `LinePacer` decides which steps those are.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from layerkit_runner.observers.base import TOTAL_WEIGHT, Observer, RunInfo

if TYPE_CHECKING:
    import tqdm

_LINES_PER_RUN = 40
_NOTED_INPUT_WAIT = 0.05
_BAR_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Progress(Observer):
    """Shows steps, loss, tokens per second and the time left, as the stream allows.

    Every observer's `message` and every evaluation goes through here, since a bar and a stray
    `print` would spoil each other.
    """

    in_background = False
    optional = False

    def __init__(
        self, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._view: _Bar | _Lines | None = None

    def start(self, info: RunInfo) -> None:
        if info.mode != "train":
            return  # nothing to count: evaluations are shown as they come
        if self._stream.isatty():
            self._view = _Bar(info, self._stream)
        else:
            self._view = _Lines(info, self._stream, self._clock)

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._view is not None:
            self._view.train_metrics(step, scalars)

    def progress(self, step: int) -> None:
        if self._view is not None:
            self._view.progress(step)

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        if self._view is None or self._view.shows_eval(step, dataset):
            # The weight is the same each time, and in every record of the evaluation.
            shown = [
                f"{name} {value:.4g}" for name, value in scalars.items() if name != TOTAL_WEIGHT
            ]
            parts = [f"step {step}", f"eval {dataset}", *shown]
            self.message(_joined(parts, width=terminal_width(self._stream)))

    def message(self, text: str) -> None:
        if isinstance(self._view, _Bar):
            self._view.message(text)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.close()


@dataclasses.dataclass
class LinePacer:
    """Decides which steps deserve a line.

    Due are the first step offered, the last step of the run, each further fortieth of the steps,
    and any step after a silence: of a tenth of the time passed, at least 30 seconds and at most an
    hour. So runs of an hour print some 40 lines, and none is silent for long.

    Attributes:
      start_step: where this run begins.
      num_train_steps: where it ends.
    """

    start_step: int
    num_train_steps: int
    _began: float | None = dataclasses.field(default=None, init=False)
    _last_time: float = dataclasses.field(default=0.0, init=False)
    _last_step: int = dataclasses.field(default=-1, init=False)

    @property
    def last_step(self) -> int:
        """The newest step that got a line; -1 before the first."""
        return self._last_step

    def due(self, step: int, now: float) -> bool:
        """Whether `step` gets a line at the time `now` (seconds of any clock)."""
        if self._began is None:
            self._began = now
            is_due = True
        else:
            stride = max(1.0, (self.num_train_steps - self.start_step) / _LINES_PER_RUN)
            is_new = step > self._last_step
            is_due = is_new and (
                step - self._last_step >= stride
                or step == self.num_train_steps
                or self.silence(now) >= self._patience(now)
            )
        if is_due:
            self._last_step, self._last_time = step, now
        return is_due

    def overdue(self, now: float) -> bool:
        """Whether the silence has grown past twice what `due` allows."""
        return self._began is not None and self.silence(now) >= 2 * self._patience(now)

    def silence(self, now: float) -> float:
        """Seconds since the newest line."""
        return now - self._last_time

    def _patience(self, now: float) -> float:
        assert self._began is not None
        return min(3600.0, max(30.0, (now - self._began) / 10))


class _Lines:
    """Plain lines, paced."""

    def __init__(self, info: RunInfo, stream: TextIO, clock: Callable[[], float]) -> None:
        self._info = info
        self._stream = stream
        self._clock = clock
        self._pacer = LinePacer(info.start_step, info.num_train_steps)
        self._eval_pacers: dict[str, LinePacer] = {}
        self._metrics: tuple[int, Mapping[str, float]] | None = None
        self._first: tuple[int, float] | None = None  # step, time: compilation lies before it
        self._step = info.start_step

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        self._metrics = (step, scalars)
        if self._pacer.due(step, self._clock()):
            self._print(step)

    def progress(self, step: int) -> None:
        now = self._clock()
        self._first = self._first or (step, now)
        self._step = step
        # Metrics may come seldom: past twice the usual silence, a line with older ones is better.
        if self._pacer.overdue(now) and self._pacer.due(step, now):
            self._print(step)

    def shows_eval(self, step: int, dataset: str) -> bool:
        pacer = self._eval_pacers.setdefault(
            dataset, LinePacer(self._info.start_step, self._info.num_train_steps)
        )
        return step == pacer.last_step or pacer.due(step, self._clock())

    def close(self) -> None:
        if self._metrics is not None and self._step > self._pacer.last_step:
            self._print(self._step)

    def _print(self, step: int) -> None:
        parts = [f"step {step}/{self._info.num_train_steps}"]
        if self._metrics is not None:
            metrics_step, scalars = self._metrics
            parts += _highlights(scalars, self._info.train_programs)
            if metrics_step != step:
                parts.append(f"(as of step {metrics_step})")
        left = self._seconds_left(step)
        if left is not None:
            parts.append(f"{datetime.timedelta(seconds=round(left))} left")
        print(" | ".join(parts), file=self._stream, flush=True)

    def _seconds_left(self, step: int) -> float | None:
        if self._first is None or step <= self._first[0] or step >= self._info.num_train_steps:
            return None
        seconds_per_step = (self._clock() - self._first[1]) / (step - self._first[0])
        return seconds_per_step * (self._info.num_train_steps - step)


class _Bar:
    """A tqdm bar, with messages above it."""

    def __init__(self, info: RunInfo, stream: TextIO) -> None:
        import tqdm  # only a terminal needs it

        self._stream = stream
        self._programs = info.train_programs
        self._started = False
        fixed_width = _width_if_unknown(stream)
        self._bar: tqdm.tqdm[None] = tqdm.tqdm(
            total=info.num_train_steps,
            initial=info.start_step,
            file=stream,
            bar_format=_BAR_FORMAT,
            ncols=fixed_width,
            nrows=24,  # else a terminal without a known height hides the bar
            dynamic_ncols=fixed_width is None,
            mininterval=0.2,
        )

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        del step
        self._bar.set_postfix_str(", ".join(_highlights(scalars, self._programs)), refresh=False)

    def progress(self, step: int) -> None:
        if not self._started:
            # Compilation lies before the first step: neither it nor the step may bend the estimate.
            self._started = True
            self._bar.initial = self._bar.n = self._bar.last_print_n = step
            self._bar.unpause()
            self._bar.refresh()
        else:
            self._bar.update(step - self._bar.n)

    def shows_eval(self, step: int, dataset: str) -> bool:
        del step, dataset
        return True

    def message(self, text: str) -> None:
        self._bar.write(text, file=self._stream)

    def close(self) -> None:
        self._bar.close()


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal behind `stream`; None where there is no terminal.

    A terminal that does not tell has 80.
    """
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # not backed by a terminal device
        return 80


def _joined(parts: Sequence[str], *, width: int | None) -> str:
    """Return the parts in one line, or in several of at most `width` columns.

    A line is broken between parts only, and those after the first are indented.
    """
    lines = [parts[0]]
    for part in parts[1:]:
        if width is not None and len(lines[-1]) + len(part) + 3 > width:
            lines.append(f"  | {part}")
        else:
            lines[-1] += f" | {part}"
    return "\n".join(lines)


def _width_if_unknown(stream: TextIO) -> int | None:
    """80 for a terminal that says it has no columns (some containers do), else None.

    tqdm believes the zero, and would draw nothing.
    """
    try:
        return 80 if os.get_terminal_size(stream.fileno()).columns == 0 else None
    except (OSError, ValueError):  # not backed by a terminal device
        return None


def _highlights(scalars: Mapping[str, float], programs: Sequence[str]) -> list[str]:
    """The few scalars that people watch, and of which training program, where there are several."""
    shown = []
    if "loss" in scalars:
        of = next((f" ({name})" for name in programs if f"{name}/loss" in scalars), "")
        shown.append(f"loss {scalars['loss']:.4f}{of}")
    if "tokens_per_sec" in scalars:
        shown.append(f"{scalars['tokens_per_sec']:,.0f} tokens/s")
    elif "steps_per_sec" in scalars:
        shown.append(f"{scalars['steps_per_sec']:.3g} steps/s")
    if "mfu" in scalars:
        shown.append(f"mfu {scalars['mfu']:.1%}")
    if scalars.get("input_wait", 0.0) >= _NOTED_INPUT_WAIT:
        shown.append(f"waiting for input {scalars['input_wait']:.0%}")
    return shown
