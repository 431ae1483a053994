"""The observer protocol: what a run reports, and how reports reach several observers.

Programs report host values only: plain numbers and NumPy arrays that the program has fetched from
the device. An observer therefore never waits for a device, and this file needs no JAX. Only
process 0 has observers. `Observers` calls each one with `in_background` on a thread of its own, so
that its work does not delay a training step.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from layerkit_runner.errors import UsageError

if TYPE_CHECKING:
    from layerkit.config import Config

DECODE_PREFIX = "decode/"
"""Prefix of a data set's name where the scalars describe what was decoded of it."""

TOTAL_WEIGHT = "total_weight"
"""Name of the scalar by which an evaluation reports the weight behind its loss."""

# Reports that may wait for an observer before it counts as too slow.
_MAX_PENDING_REPORTS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known about a run before its first step.

    Attributes:
      job_log_dir: Folder of the run's files; None keeps nothing on disk.
      experiment: Name of the experiment, as the user gave it.
      mode: 'train', 'eval', 'decode', …
      num_params: Number of trained scalars.
      num_train_steps: Step at which training ends.
      start_step: Number of completed steps; above 0 when a run is resumed.
      tokens_per_step: Tokens of one global batch, the mean where several data sets take turns; 0
        if the batches hold no tokens.
      examples_per_step: Examples of one global batch, likewise.
      flops_per_step: Model FLOPs of one global training step; None if they are unknown.
      num_devices: Number of devices that share a step.
      device_kind: Name that JAX gives the devices, such as 'TPU v5 lite'.
      peak_flops_per_device: Dense bfloat16 FLOP/s (see `peak_flops`); None if it is unknown.
      train_programs: Names of the training programs, where there are several.
    """

    job_log_dir: epath.Path | None
    experiment: str
    mode: str
    num_params: int
    num_train_steps: int
    start_step: int
    tokens_per_step: float
    examples_per_step: float
    flops_per_step: float | None
    num_devices: int
    device_kind: str
    peak_flops_per_device: float | None
    train_programs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Histogram:
    """The distribution of the numbers in one array.

    Attributes:
      edges: float64 `[buckets + 1]`, from the lowest number to the highest.
      counts: float64 `[buckets]`. A bucket includes its upper edge; the first one also includes
        the lowest number.
      sum: Sum of the numbers.
      sum_of_squares: Sum of their squares.
    """

    edges: np.ndarray
    counts: np.ndarray
    sum: float
    sum_of_squares: float

    @property
    def norm(self) -> float:
        """√Σ x²."""
        return math.sqrt(self.sum_of_squares)

    @property
    def is_finite(self) -> bool:
        """Whether the buckets can be drawn; False if any number is NaN or infinite."""
        return math.isfinite(self.sum_of_squares) and bool(np.isfinite(self.edges).all())


class Observer:
    """Base class of everything that watches a run. Each hook does nothing unless it is overridden.

    `Observers` calls the hooks in the order of the reports, on process 0 only.

    Attributes:
      in_background: Whether the hooks run one after another on a thread of the observer's own;
        False runs them on the main thread, between the training steps. The first call of a
        background observer is `start`; it receives no report from before.
      optional: Whether the run continues without this observer after it raised an exception or
        fell behind by 10,000 reports; False ends the run with its exception.
    """

    in_background: bool = True
    optional: bool = True

    def start(self, info: RunInfo) -> None:
        """Prepare for the run. It is called once, before the first step."""

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the scalars of a training step; called at step 1 and every summary interval."""

    def progress(self, step: int) -> None:
        """Take note of a completed training step; called after each."""

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        """Take the scalars of one evaluation of the weights after `step` steps."""

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Take histograms of metrics in a training step, and of weights after it, by path."""

    def eval_histograms(self, step: int, dataset: str, histograms: Mapping[str, Histogram]) -> None:
        """Take histograms of metrics over the examples of one evaluation, by name."""

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Take images that layers reported in a step, uint8 `[height, width, channels]`."""

    def text(self, step: int, name: str, text: str) -> None:
        """Take a text, such as a sample of what was decoded of the data set `name`."""

    def message(self, text: str) -> None:
        """Take a line for people, such as 'resuming from step 500'."""

    def flush(self) -> None:
        """Start writing out all earlier reports; called with each save, does not wait."""

    def close(self) -> None:
        """Write out what is left, and release files and threads."""


class Background:
    """A thread that runs jobs one after another, in the order given.

    No job runs after one that failed. The failure is raised by the next call of `submit` or
    `close`, on the thread of the caller.
    """

    def __init__(self) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._jobs: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
        self._has_failed = False

    @property
    def num_pending(self) -> int:
        """Number of jobs that have not ended, as far as the last `submit` knew."""
        return len(self._jobs)

    @property
    def is_idle(self) -> bool:
        """Whether every job has ended."""
        return all(job.done() for job in self._jobs)

    def submit(self, job: Callable[..., Any], *args: Any) -> None:
        """Append `job(*args)` to the work, without waiting."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        self._jobs.append(self._executor.submit(self._run, job, *args))

    def close(self, last: Callable[[], object] | None = None) -> None:
        """Wait for the work that is left, or cancel it after a failure; then run `last`."""
        try:
            while self._jobs:
                self._jobs.popleft().result()
        finally:
            ending = self._end(last)
            self._executor.shutdown()
        ending.result()

    def abandon(self, last: Callable[[], object]) -> None:
        """Cancel the work that has not begun, and run `last` after the rest, without waiting."""
        self._end(last)
        self._executor.shutdown(wait=False)

    def _run(self, job: Callable[..., Any], *args: Any) -> None:
        if self._has_failed:
            return
        try:
            job(*args)
        except BaseException:
            self._has_failed = True
            raise

    def _end(self, last: Callable[[], object] | None) -> concurrent.futures.Future[Any]:
        for job in self._jobs:
            job.cancel()
        self._jobs.clear()
        return self._executor.submit(last or (lambda: None))


class Observers(Observer):
    """Passes every report on to several observers, in the order given.

    When an `optional` observer fails, the others receive one message; it is then closed and
    removed, and the run continues. The exceptions of other observers are raised.
    """

    in_background = False

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._callers = [_Caller(observer) for observer in observers]

    def start(self, info: RunInfo) -> None:
        self._report("start", info)

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        self._report("train_metrics", step, scalars)

    def progress(self, step: int) -> None:
        self._report("progress", step)

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        self._report("eval_metrics", step, dataset, scalars)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._report("histograms", step, histograms)

    def eval_histograms(self, step: int, dataset: str, histograms: Mapping[str, Histogram]) -> None:
        self._report("eval_histograms", step, dataset, histograms)

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        self._report("images", step, images)

    def text(self, step: int, name: str, text: str) -> None:
        self._report("text", step, name, text)

    def message(self, text: str) -> None:
        self._report("message", text)

    def flush(self) -> None:
        self._report("flush")

    def close(self) -> None:
        """Close every observer, also when one fails; raise the first failure that counts."""
        failure: Exception | None = None
        # Last first: the observer that shows messages usually comes first.
        while self._callers:
            caller = self._callers.pop()
            try:
                caller.close()
            except Exception as error:
                if caller.observer.optional:
                    self.message(_removed(caller.observer, error))
                else:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _report(self, hook: str, *args: Any) -> None:
        messages = []
        for caller in tuple(self._callers):
            try:
                caller.call(hook, *args)
            except Exception as error:
                if not caller.observer.optional:
                    raise
                self._callers.remove(caller)
                messages.append(_removed(caller.observer, error))
                caller.abandon()
        for message in messages:
            self.message(message)


class _Caller:
    """Calls the hooks of one observer, on its own thread if it is a background observer."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._background = Background() if observer.in_background else None
        self._is_started = not observer.in_background

    def call(self, hook: str, *args: Any) -> None:
        self._is_started |= hook == "start"
        method = getattr(self.observer, hook)
        if getattr(method, "__func__", None) is getattr(Observer, hook) or not self._is_started:
            return
        if self._background is None:
            method(*args)
            return
        # The program that reported may change its dicts afterwards.
        copies = [dict(arg) if isinstance(arg, Mapping) else arg for arg in args]
        self._background.submit(method, *copies)
        if self._background.num_pending > _MAX_PENDING_REPORTS:
            raise RuntimeError(f"it is {_MAX_PENDING_REPORTS} reports behind the training")

    def close(self) -> None:
        """Close the observer after the calls that wait for its thread."""
        if self._background is None:
            self.observer.close()
        else:
            self._background.close(self.observer.close if self._is_started else None)

    def abandon(self) -> None:
        """Close the observer without the calls that wait for its thread, and without an error."""
        if self._background is None:
            with contextlib.suppress(Exception):
                self.observer.close()
        else:
            self._background.abandon(self.observer.close)


def _removed(observer: Observer, error: Exception) -> str:
    """Return the message about an optional observer that failed, with the line of its code."""
    frames = traceback.extract_tb(error.__traceback__)
    own_file = getattr(sys.modules.get(type(observer).__module__), "__file__", None)
    frame = next((each for each in reversed(frames) if each.filename == own_file), frames[-1])
    return (
        f"{type(observer).__name__} failed and is left out from here on; the run continues. "
        f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"
    )


def build_observers(configs: Iterable[Config]) -> list[Observer]:
    """Build the observers that an experiment lists.

    Raises:
      UsageError: A config is not of an `Observer`, or its class refuses its fields.
    """
    observers = []
    for index, config in enumerate(configs):
        try:
            observer = config.Instantiate()
        except (TypeError, ValueError) as error:
            raise UsageError(f"observers.{index}: {error}") from error
        if not isinstance(observer, Observer):
            raise UsageError(
                f"observers.{index}: {type(observer).__qualname__} is no observer. Expected a class"
                " derived from layerkit_runner.observers.Observer."
            )
        observers.append(observer)
    return observers
