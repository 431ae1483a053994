"""The observer protocol: the reports of a run, and their delivery to several observers.

Programs report host values only: plain numbers and NumPy arrays that the program has fetched from
the device. So an observer never waits for a device, and this module needs no JAX. Every process
builds the observers to check their fields, but only process 0 calls them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import numpy as np
from etils import epath

from layerkit.errors import error_text

DECODE_PREFIX = "decode/"
"""Prefix of a data set's name if the scalars describe its decoded outputs."""

TOTAL_WEIGHT = "total_weight"
"""Name of the scalar with the total weight of the examples of an evaluation."""

# Limit of pending reports, beyond which an observer counts as failed.
_MAX_PENDING_REPORTS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about a run that are known before its first step.

    Attributes:
      job_log_dir: Folder of the run's files; None for a run without files.
      experiment: Name of the experiment, as on the command line.
      mode: 'train', 'eval', 'decode', …
      num_params: Number of scalars in the weights, frozen ones included.
      num_train_steps: Step at which training ends.
      start_step: Number of completed steps; above 0 for a resumed run.
      tokens_per_step: Tokens of one global batch, 0 if it has none. The mean over the steps of
        several training programs.
      examples_per_step: Examples of one global batch; the mean, as for tokens.
      flops_per_step: Model FLOPs of one global training step; None if they are unknown.
      num_devices: Number of devices of all processes.
      device_kind: JAX's name of the devices, such as 'TPU v5 lite'.
      peak_flops_per_device: Dense bfloat16 FLOP/s (see `peak_flops`); None if it is unknown.
      train_programs: Names of the training programs if there are several, else empty.
      environment: Versions of packages, host name, and the commit of the working folder, by name.
      config: The experiment as `config.json` of the job folder has it, with `fields`, `overrides`
        and `config`, the values of all fields by path; empty if it is unknown.
    """

    job_log_dir: epath.Path | None
    experiment: str
    mode: str
    num_params: int
    num_train_steps: int
    start_step: int
    tokens_per_step: float = 0
    examples_per_step: float = 0
    flops_per_step: float | None = None
    num_devices: int
    device_kind: str
    peak_flops_per_device: float | None = None
    train_programs: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Histogram:
    """The distribution of the numbers in one array.

    Attributes:
      edges: float64 `[buckets + 1]`, from the lowest number to the highest.
      counts: float64 `[buckets]`. A bucket includes its upper edge; the first one also includes the
        lowest number.
      sum_of_squares: Sum of the squares of the numbers.
    """

    edges: np.ndarray
    counts: np.ndarray
    sum: float
    sum_of_squares: float

    @classmethod
    def of(cls, counts: Any) -> Histogram:
        """Convert `layerkit.base.step_reports.BinCounts` `[bins]` on the host."""
        edges, bins = (np.asarray(x, np.float64) for x in (counts.edges, counts.counts))
        return cls(edges, bins, float(counts.sum), float(counts.sum_of_squares))

    def trimmed(self) -> Histogram:
        """Return the histogram without the empty buckets at both ends."""
        filled = np.flatnonzero(self.counts)
        if not len(filled):
            return self
        first, end = filled[0], filled[-1] + 1
        return dataclasses.replace(
            self, edges=self.edges[first : end + 1], counts=self.counts[first:end]
        )

    @property
    def norm(self) -> float:
        """The Euclidean norm √Σ x²."""
        return math.sqrt(self.sum_of_squares)

    @property
    def is_finite(self) -> bool:
        """True if all numbers are finite, so that the buckets can be drawn."""
        return math.isfinite(self.sum_of_squares) and bool(np.isfinite(self.edges).all())


class Observer:
    """Base class of observers, which record a run. By default each hook does nothing.

    `Observers` calls the hooks in the order of the reports, on process 0 only.

    Attributes:
      in_background: True to run the hooks one after another on a separate thread, so that they
        delay no training step; it receives no report before `start`. False to run them on the main
        thread.
      optional: True if the run continues without this observer after it raised an exception or fell
        behind by 10,000 reports; False if its exception ends the run.
      close_timeout_secs: Limit for the remaining reports and `close` at the end, in seconds, after
        which an observer in the background counts as failed.
    """

    in_background: bool = True
    optional: bool = True
    close_timeout_secs: float = 60.0

    def start(self, info: RunInfo) -> None:
        """Prepare for the run; called once, before the first step."""

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of a training step.

        Called for the first step of each start, every `summary_interval_steps`, for step
        `num_train_steps` and for every skipped step.
        """

    def progress(self, step: int) -> None:
        """Record that a training step has been completed; called after each step."""

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        """Record the scalars of one evaluation of the weights after `step` steps."""

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Record histograms of metrics in a training step, and of weights after it, by path."""

    def eval_histograms(self, step: int, dataset: str, histograms: Mapping[str, Histogram]) -> None:
        """Record histograms of metrics over the examples of one evaluation, by name."""

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Record images that layers reported in a step, uint8 `[height, width, channels]`."""

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text, such as a decoded sample of the data set `name`."""

    def rollback(self, step: int, facts: Mapping[str, float]) -> None:
        """Record that the run continues at an earlier `step`, with the data after `last_step`.

        `facts` are `last_step`, and the `loss` and `grad_norm` of that step. Later reports repeat
        the steps after `step`.
        """

    def message(self, text: str) -> None:
        """Print a line, such as 'resuming from step 500'."""

    def flush(self) -> None:
        """Start writing all earlier reports, without waiting; called with each save."""

    def end(self, reason: str) -> None:
        """Record why training ends: "finished", "stopped by a signal", or the text of an error."""

    def close(self) -> None:
        """Write the remaining reports, and release files and threads."""


class Background:
    """A thread that runs jobs in order, none after one that failed; later calls raise its error.

    A job that never returns does not keep the process from ending.
    """

    def __init__(self) -> None:
        """Start without jobs."""
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._has_failed = self._is_ended = False
        # A thread pool would wait for its threads when the interpreter exits.
        self._thread = threading.Thread(target=self._work, name="background", daemon=True)

    @property
    def num_pending(self) -> int:
        """Number of jobs that have not ended."""
        return self._queue.unfinished_tasks

    def raise_failure(self) -> None:
        """Raise the error of a job that has failed since the last call, without waiting."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def submit(self, job: Callable[..., Any], *args: Any) -> None:
        """Schedule `job(*args)`, without waiting; raise the error of an earlier job."""
        self.raise_failure()
        if self._is_ended:
            raise RuntimeError("the background thread is closed")
        self._put(lambda: self._has_failed or job(*args))

    def close(
        self, last: Callable[[], object] = lambda: None, *, seconds: float | None = None
    ) -> bool:
        """Wait for the pending jobs, or cancel them after a failure; then run `last`.

        Returns:
          False if a job has not returned after `seconds`; None waits without limit.
        """
        self._end(last)
        self._thread.join(seconds)
        self._has_failed |= self._thread.is_alive()
        self.raise_failure()
        return not self._thread.is_alive()

    def abandon(self, last: Callable[[], object]) -> None:
        """Cancel the pending jobs, and run `last` after the current one, without waiting."""
        self._has_failed = True
        self._end(last)

    def blocked_at(self) -> traceback.StackSummary:
        """Return the stack of the thread."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return traceback.extract_stack(frame)

    def _put(self, job: Callable[[], object]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put(job)

    def _end(self, last: Callable[[], object]) -> None:
        self._is_ended = True
        self._put(last)
        self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._error, self._has_failed = self._error or error, True
            self._queue.task_done()


_Hook = TypeVar("_Hook", bound=Callable[..., None])


def _forward(hook: _Hook) -> _Hook:
    """Return a method that passes a report on to every observer."""
    return cast(_Hook, lambda self, *args: self._report(hook.__name__, *args))


Phase = Callable[[str], contextlib.AbstractContextManager[Any]]


class Observers(Observer):
    """An observer that passes every report on to several others, in their order.

    An observer that fails is closed and removed. If it is `optional`, a message says so. Otherwise
    its error is raised once, after the others have got the report.
    """

    in_background = False

    def __init__(
        self, observers: Iterable[Observer], *, phase: Phase = contextlib.nullcontext
    ) -> None:
        """Store the observers, each with its thread.

        Args:
          observers: Observers.
          phase: Function that names the hook that the main thread runs to the watchdog.
        """
        self._callers = [_Caller(observer, phase) for observer in observers]

    start = _forward(Observer.start)
    train_metrics = _forward(Observer.train_metrics)
    progress = _forward(Observer.progress)
    eval_metrics = _forward(Observer.eval_metrics)
    histograms = _forward(Observer.histograms)
    eval_histograms = _forward(Observer.eval_histograms)
    images = _forward(Observer.images)
    text = _forward(Observer.text)
    rollback = _forward(Observer.rollback)
    message = _forward(Observer.message)
    flush = _forward(Observer.flush)
    end = _forward(Observer.end)

    def close(self) -> None:
        """Close every observer; then raise the first failure of one that is not optional."""
        failure: BaseException | None = None
        # In reverse order, since the observer that prints messages usually comes first.
        while self._callers:
            caller = self._callers.pop()
            try:
                caller.close()
            except BaseException as error:  # such as SystemExit; the others are still closed
                if caller.observer.optional and not isinstance(error, KeyboardInterrupt):
                    self.message(_removed(caller.observer, error))
                else:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _report(self, hook: str, *args: Any) -> None:
        failures = []
        for caller in tuple(self._callers):
            try:
                caller.call(hook, *args)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._callers.remove(caller)
                caller.abandon()
                failures.append((caller.observer, error))
        for observer, failure in failures:
            if observer.optional:
                self.message(_removed(observer, failure))
        for observer, failure in failures:
            if not observer.optional:
                raise failure


class _Caller:
    def __init__(self, observer: Observer, phase: Phase) -> None:
        self.observer = observer
        self._background = Background() if observer.in_background else None
        self._is_started = not observer.in_background
        self._phase = phase
        self._hook = "start"  # the hook that runs, or ran last
        self._hooks = {
            hook
            for hook, default in vars(Observer).items()
            if getattr(getattr(observer, hook), "__func__", None) is not default
        }

    def call(self, hook: str, *args: Any) -> None:
        self._is_started |= hook == "start"
        if self._background is not None:
            self._background.raise_failure()
        if hook not in self._hooks or not self._is_started:
            return
        if self._background is None:
            with self._phase(f"{type(self.observer).__name__}.{hook}"):
                getattr(self.observer, hook)(*args)
            return
        # The program may change its dicts after the report.
        copies = [dict(arg) if isinstance(arg, Mapping) else arg for arg in args]
        self._background.submit(self._run, hook, *copies)
        if self._background.num_pending > _MAX_PENDING_REPORTS:
            raise RuntimeError(f"{_MAX_PENDING_REPORTS} reports are pending")

    def close(self) -> None:
        if self._background is None:
            with self._phase(f"{type(self.observer).__name__}.close"):
                self.observer.close()
            return
        seconds = self.observer.close_timeout_secs
        hooks = ["close"] if self._is_started else []
        if not self._background.close(lambda: [*map(self._run, hooks)], seconds=seconds):
            place = _place(self.observer, self._background.blocked_at())
            raise TimeoutError(f"{self._hook} has not returned {seconds:g} s after the end {place}")

    def abandon(self) -> None:
        if self._background is None:
            with contextlib.suppress(BaseException):
                self.close()
        else:
            self._background.abandon(self.observer.close)

    def _run(self, hook: str, *args: Any) -> None:
        self._hook = hook
        getattr(self.observer, hook)(*args)


def _removed(observer: Observer, error: BaseException) -> str:
    """Return the message about an observer that failed, with the failing line of its module."""
    frames = traceback.extract_tb(error.__traceback__)
    # The text of a time limit names the line already.
    place = "" if frames[-1].filename == __file__ else f" {_place(observer, frames)}"
    text = " ".join(error_text(error).split())
    return (
        f"{type(observer).__name__} failed and was removed; the run continues. "
        f"{type(error).__name__}: {text}{place}"
    )


def _place(observer: Observer, frames: traceback.StackSummary) -> str:
    """Return the innermost line of the observer's module, as `(file.py:12)`, or else of any."""
    own_file = getattr(sys.modules.get(type(observer).__module__), "__file__", None)
    frame = next((f for f in reversed(frames) if f.filename == own_file), frames[-1])
    return f"({os.path.basename(frame.filename)}:{frame.lineno})"
