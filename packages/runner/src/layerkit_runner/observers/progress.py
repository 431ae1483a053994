"""Progress of a run: a bar on a terminal or in a notebook, a few plain lines elsewhere.

A log file gets some dozens of lines from a run of a minute or a month, without long gaps, and a
line from each evaluation.
"""

from __future__ import annotations

import datetime
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from layerkit_runner.observers.base import TOTAL_WEIGHT, Observer, RunInfo

if TYPE_CHECKING:
    import tqdm

_LINES_PER_RUN = 40
_NOTED_INPUT_WAIT = 0.05
_BAR_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Progress(Observer):
    """An observer that prints steps, loss, tokens per second and the remaining time."""

    in_background = False
    optional = False

    def __init__(
        self, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Store the stream, by default standard output, and the clock, in seconds."""
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._view = Observer()

    def start(self, info: RunInfo) -> None:
        """Create the bar or the pacing of lines for a training run."""
        if info.mode != "train":
            return  # each evaluation is printed
        if self._stream.isatty() or (self._stream is sys.stdout and _is_notebook()):
            self._view = _Bar(info, self._stream)
        else:
            self._view = _Lines(info, self._stream, self._clock)

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Print the scalars if a line is due, or show them in the bar."""
        self._view.train_metrics(step, scalars)

    def progress(self, step: int) -> None:
        """Advance the bar."""
        self._view.progress(step)

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        """Print the scalars of an evaluation."""
        if isinstance(self._view, _Lines):
            self._view.print_latest()  # early stopping may end the run with this evaluation
        parts = [f"step {step}", f"eval {dataset}"]
        # The weight is the same each time, and in the metrics file.
        parts += [f"{name} {value:.4g}" for name, value in scalars.items() if name != TOTAL_WEIGHT]
        self.message(" | ".join(parts))

    def message(self, text: str) -> None:
        """Print the line, above the bar if there is one."""
        if isinstance(self._view, _Bar):
            self._view.message(text)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Print the last step, if lines are printed, or close the bar."""
        view, self._view = self._view, Observer()
        view.close()


class _Lines(Observer):
    """Prints the first step, the last one, each fortieth of the steps, and steps after a long gap.

    A gap is a tenth of the elapsed time, at least 30 seconds and at most an hour.
    """

    def __init__(self, info: RunInfo, stream: TextIO, clock: Callable[[], float]) -> None:
        self._info = info
        self._stream = stream
        self._clock = clock
        self._stride = (info.num_train_steps - info.start_step) / _LINES_PER_RUN
        self._first: tuple[int, float] | None = None  # step, time; excludes compilation
        self._latest: tuple[int, Mapping[str, float]] = (-1, {})
        self._printed = (-math.inf, 0.0)  # step, time

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        now = self._clock()
        self._first = self._first or (step, now)
        self._latest = (step, scalars)
        last_step, last_time = self._printed
        gap = min(3600.0, max(30.0, (now - self._first[1]) / 10))
        is_last = step == self._info.num_train_steps
        if is_last or abs(step - last_step) >= self._stride or now - last_time >= gap:
            self.print_latest()

    def print_latest(self, *, has_ended: bool = False) -> None:
        """Print the latest metrics, unless they are printed."""
        step, scalars = self._latest
        if self._first is None or step == self._printed[0]:
            return
        now, (first_step, began) = self._clock(), self._first
        self._printed = (step, now)
        num_left = self._info.num_train_steps - step
        parts = [f"step {step}/{self._info.num_train_steps}"]
        parts += _highlights(scalars, self._info.train_programs)
        if first_step < step and num_left and not has_ended:
            seconds = (now - began) / (step - first_step) * num_left
            parts.append(f"{datetime.timedelta(seconds=round(seconds))} left")
        print(" | ".join(parts), file=self._stream, flush=True)

    def close(self) -> None:
        self.print_latest(has_ended=True)


class _Bar(Observer):
    def __init__(self, info: RunInfo, stream: TextIO) -> None:
        self._stream = stream
        self._programs = info.train_programs
        self._started = False
        with warnings.catch_warnings():
            # In a notebook without ipywidgets, tqdm warns and draws the bar as text.
            warnings.simplefilter("ignore")
            import tqdm.auto
        span = {"total": info.num_train_steps, "initial": info.start_step, "mininterval": 0.2}
        style: dict[str, Any] = {"desc": "train", "unit": "step"}
        if stream.isatty():  # tqdm hides the bar on a terminal of unknown height
            style = {"file": stream, "bar_format": _BAR_FORMAT, "dynamic_ncols": True, "nrows": 24}
        self._bar: tqdm.tqdm[None] = tqdm.auto.tqdm(**span, **style)

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        del step
        self._bar.set_postfix_str(", ".join(_highlights(scalars, self._programs)), refresh=False)

    def progress(self, step: int) -> None:
        if not self._started:
            # The estimate excludes compilation and the first step.
            self._started = True
            self._bar.initial = self._bar.n = self._bar.last_print_n = step
            self._bar.unpause()
            self._bar.refresh()
        else:
            self._bar.update(step - self._bar.n)

    def message(self, text: str) -> None:
        if self._stream.isatty():
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._bar.close()


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")


def _highlights(scalars: Mapping[str, float], programs: Sequence[str]) -> list[str]:
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
