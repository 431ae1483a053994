"""What a run tells its observers, and how one run speaks to many of them.

Programs report host values only: plain numbers, fetched from the device by the program in its own
time. An observer therefore never waits for a device, and this file needs no JAX. All calls come
from one thread of process 0; an observer that talks to a slow store does so in a thread of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from etils import epath

DECODE_PREFIX = "decode/"
"""Before the name of a data set where the scalars are over what was decoded of it."""

TOTAL_WEIGHT = "total_weight"
"""Name of the scalar by which an evaluation reports the weight behind its loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known about a run before its first step.

    Attributes:
      job_log_dir: where the run's files go; None keeps nothing on disk.
      experiment: name of the experiment, as the user gave it.
      mode: 'train', 'eval', 'decode', …
      num_params: number of trained scalars.
      num_train_steps: the step at which training ends.
      start_step: steps already done; above 0 when a run is resumed.
      tokens_per_step: tokens of one global batch, the mean where several data sets take turns; 0
        when the notion does not apply.
      examples_per_step: examples of one global batch, likewise.
      flops_per_step: model FLOPs of one global training step (see `training/flops.py`).
      num_devices: devices that share a step.
      device_kind: as JAX names it, such as 'TPU v5 lite'.
      peak_flops_per_device: dense bfloat16 FLOP/s (see `device_peaks`).
      train_programs: names of the training programs, where there are several.
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
    """How the numbers of one array are spread.

    Attributes:
      edges: float64 `[buckets + 1]`, from the lowest number to the highest.
      counts: float64 `[buckets]`: how many lie above an edge, up to and with the next one; the
        first bucket holds the lowest number too.
      sum: Of all.
      sum_of_squares: Of all; its root is their norm.
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
        """Whether it can be drawn: one number that is NaN or infinite leaves no buckets to fill."""
        return math.isfinite(self.sum_of_squares) and bool(np.isfinite(self.edges).all())


class Observer:
    """Base of everything that watches a run; each method does nothing until overridden.

    Attributes:
      optional: True for an observer whose failure must not end the run. It suits writers to
        outside stores, where the fault is seldom the run's own.
    """

    optional: bool = False

    def start(self, info: RunInfo) -> None:
        """Called once, before the first step."""

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars of the training step `step`, fetched at step 1 and every summary interval."""

    def progress(self, step: int) -> None:
        """Called after every completed step; must be cheap."""

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        """Scalars of one evaluation of the weights after `step` steps."""

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """How numbers of a training step are spread: metrics, weights after it, by path."""

    def eval_histograms(self, step: int, dataset: str, histograms: Mapping[str, Histogram]) -> None:
        """How metrics are spread over the examples of one evaluation, by name."""

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """What the layers drew in the training step `step`, uint8 `[height, width, channels]`."""

    def text(self, step: int, name: str, text: str) -> None:
        """A text the run produced, such as a sample of what was decoded of the data set `name`."""

    def message(self, text: str) -> None:
        """A line for people, such as 'resumed from step 500'."""

    def flush(self) -> None:
        """Starts writing out what was reported so far; called with each save, does not wait."""

    def close(self) -> None:
        """Writes out what is left and lets go of files and threads."""


class Observers(Observer):
    """Passes every report on to several observers, in the order given.

    The first failure of an `optional` observer is told to the others by one message; that observer
    is then closed and left out, and the run goes on. Failures of any other observer are raised.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)

    def start(self, info: RunInfo) -> None:
        self._tell(lambda observer: observer.start(info))

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        self._tell(lambda observer: observer.train_metrics(step, scalars))

    def progress(self, step: int) -> None:
        self._tell(lambda observer: observer.progress(step))

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        self._tell(lambda observer: observer.eval_metrics(step, dataset, scalars))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._tell(lambda observer: observer.histograms(step, histograms))

    def eval_histograms(self, step: int, dataset: str, histograms: Mapping[str, Histogram]) -> None:
        self._tell(lambda observer: observer.eval_histograms(step, dataset, histograms))

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        self._tell(lambda observer: observer.images(step, images))

    def text(self, step: int, name: str, text: str) -> None:
        self._tell(lambda observer: observer.text(step, name, text))

    def message(self, text: str) -> None:
        self._tell(lambda observer: observer.message(text))

    def flush(self) -> None:
        self._tell(lambda observer: observer.flush())

    def close(self) -> None:
        """Closes every observer, also when one fails; the first failure that counts is raised."""
        failure: Exception | None = None
        # Last first: whoever shows messages usually stands first, and can still show these.
        while self._observers:
            observer = self._observers.pop()
            try:
                observer.close()
            except Exception as error:
                if observer.optional:
                    self.message(_dropped(observer, error))
                else:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _tell(self, report: Callable[[Observer], None]) -> None:
        losses = []
        for observer in tuple(self._observers):
            try:
                report(observer)
            except Exception as error:
                if not observer.optional:
                    raise
                self._observers.remove(observer)
                losses.append(_dropped(observer, error))
                with contextlib.suppress(Exception):
                    observer.close()
        for loss in losses:
            self.message(loss)


def _dropped(observer: Observer, error: Exception) -> str:
    return (
        f"{type(observer).__name__} failed and is left out from here on; the run continues. "
        f"{type(error).__name__}: {error}"
    )
