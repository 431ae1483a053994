"""Progress of a run: a bar on a terminal or in a notebook, a few plain lines elsewhere.

`LinePacer` selects the steps that are printed, so that a log file gets some dozens of lines from a
run of a minute or a month, without long gaps.
"""

from __future__ import annotations

import datetime
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

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
        """Advance the bar, or print a line after a long gap."""
        self._view.progress(step)

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        """Print the scalars of an evaluation."""
        if isinstance(self._view, _Lines):
            if not self._view.eval_is_due(step, dataset):
                return
            self._view.print_rest()  # early stopping may end the run with this evaluation
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


class LinePacer:
    """A selection of the steps that are printed.

    They are the first step, the last step, each fortieth of the steps, and any step after a gap of
    a tenth of the elapsed time, which is at least 30 seconds and at most an hour.
    """

    def __init__(self, start_step: int, num_train_steps: int) -> None:
        """Start without printed steps; see the class for the arguments."""
        self._stride = max(1.0, (num_train_steps - start_step) / _LINES_PER_RUN)
        self._num_train_steps = num_train_steps
        self._began: float | None = None
        self._last_time = 0.0
        self.last_step = -1

    def due(self, step: int, now: float) -> bool:
        """Return whether to print `step` at the time `now` (seconds), and count it as printed."""
        is_first = self._began is None
        self._began = now if self._began is None else self._began
        is_due = is_first or (
            step > self.last_step
            and (
                step - self.last_step >= self._stride
                or step == self._num_train_steps
                or now - self._last_time >= self._patience(now)
            )
        )
        if is_due:
            self.count(step, now)
        return is_due

    def count(self, step: int, now: float) -> None:
        """Count `step` as printed at the time `now` (seconds)."""
        self.last_step, self._last_time = step, now

    def is_overdue(self, now: float) -> bool:
        """Return whether the gap is longer than twice the limit of `due`."""
        return self._began is not None and now - self._last_time >= 2 * self._patience(now)

    def _patience(self, now: float) -> float:
        assert self._began is not None
        return min(3600.0, max(30.0, (now - self._began) / 10))


class _Lines(Observer):
    def __init__(self, info: RunInfo, stream: TextIO, clock: Callable[[], float]) -> None:
        self._info = info
        self._stream = stream
        self._clock = clock
        self._pacer = LinePacer(info.start_step, info.num_train_steps)
        self._eval_pacers: dict[str, LinePacer] = {}
        self._metrics: tuple[int, Mapping[str, float]] | None = None
        self._first: tuple[int, float] | None = None  # step, time; excludes compilation
        self._step = info.start_step

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        self._metrics = (step, scalars)
        if self._pacer.due(step, self._clock()):
            self._print(step)

    def progress(self, step: int) -> None:
        now = self._clock()
        self._first = self._first or (step, now)
        self._step = step
        # If metrics are rare, a line with older ones fills a long gap.
        if self._pacer.is_overdue(now) and self._pacer.due(step, now):
            self._print(step)

    def print_rest(self, *, has_ended: bool = False) -> None:
        """Print the latest step, unless it is printed."""
        if self._metrics is not None and self._step > self._pacer.last_step:
            self._pacer.count(self._step, self._clock())
            self._print(self._step, has_ended=has_ended)

    def close(self) -> None:
        self.print_rest(has_ended=True)

    def eval_is_due(self, step: int, dataset: str) -> bool:
        new = LinePacer(self._info.start_step, self._info.num_train_steps)
        pacer = self._eval_pacers.setdefault(dataset, new)
        return step == pacer.last_step or pacer.due(step, self._clock())

    def _print(self, step: int, *, has_ended: bool = False) -> None:
        parts = [f"step {step}/{self._info.num_train_steps}"]
        if self._metrics is not None:
            metrics_step, scalars = self._metrics
            parts += _highlights(scalars, self._info.train_programs)
            if metrics_step != step:
                parts.append(f"(as of step {metrics_step})")
        num_left = self._info.num_train_steps - step
        if not has_ended and self._first is not None and self._first[0] < step and num_left:
            seconds_per_step = (self._clock() - self._first[1]) / (step - self._first[0])
            left = datetime.timedelta(seconds=round(seconds_per_step * num_left))
            parts.append(f"{left} left")
        print(" | ".join(parts), file=self._stream, flush=True)


class _Bar(Observer):
    def __init__(self, info: RunInfo, stream: TextIO) -> None:
        self._stream = stream
        self._programs = info.train_programs
        self._started = False
        span = {"total": info.num_train_steps, "initial": info.start_step, "mininterval": 0.2}
        self._bar: tqdm.tqdm[None]
        if stream.isatty():
            import tqdm

            self._bar = tqdm.tqdm(
                **span,
                file=stream,
                bar_format=_BAR_FORMAT,
                dynamic_ncols=True,
                nrows=24,  # tqdm hides the bar on a terminal of unknown height
            )
        else:
            with warnings.catch_warnings():
                # Without ipywidgets, tqdm warns and draws the bar as text.
                warnings.simplefilter("ignore")
                import tqdm.auto

                self._bar = tqdm.auto.tqdm(**span, desc="train", unit="step")

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
