"""How fast a run trains, from the steps it completed and the time they took.

The first step carries compilation, so the clock starts when it ends. Time the run spends on other
work (evaluation, a blocking save) is taken out by `pause()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from layerkit_runner.observers.base import RunInfo


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one training step comes to; several data sets may have batches of several sizes.

    Attributes:
      examples: Examples of the global batch.
      tokens: Tokens of the global batch; 0 when the notion does not apply.
      flops: Model FLOPs of all devices; None if they are not known.
    """

    examples: float
    tokens: float
    flops: float | None


class Throughput:
    """Counts completed steps and the time between them.

    >>> from layerkit_runner.observers.base import RunInfo
    >>> info = RunInfo(
    ...     job_log_dir=None, experiment='Toy', mode='train', num_params=10, num_train_steps=9,
    ...     start_step=0, tokens_per_step=64, examples_per_step=4, flops_per_step=None,
    ...     num_devices=1, device_kind='cpu', peak_flops_per_device=None)
    >>> ticks = iter([100.0, 100.5, 101.0])
    >>> throughput = Throughput(info, clock=lambda: next(ticks))
    >>> rates_since_asked = throughput.rates_since_asked()
    >>> for step in (1, 2, 3):
    ...     throughput.completed(step)
    >>> rates = rates_since_asked()
    >>> rates['step_time'], rates['examples_per_sec'], rates['tokens_per_sec']
    (0.5, 8.0, 128.0)
    """

    def __init__(self, info: RunInfo, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._info = info
        self._usual = StepWork(info.examples_per_step, info.tokens_per_step, info.flops_per_step)
        self._clock = clock
        self._mark: tuple[int, float] | None = None  # step, time up to which all is counted
        self._pause_depth = 0
        self._total = _Timed()

    def completed(self, step: int, work: StepWork | None = None) -> None:
        """Says that `step` has ended on the device, now.

        A step that ends within a pause counts neither as a step nor as time, for it shared its time
        with the work that the pause stands for.

        Args:
          step: Its number.
          work: What it came to; None for what `info` says of a step.
        """
        now = self._clock()
        if self._mark is not None and self._pause_depth == 0:
            work, steps = work or self._usual, step - self._mark[0]
            self._add(
                _Timed(
                    steps=steps,
                    seconds=now - self._mark[1],
                    examples=steps * work.examples,
                    tokens=steps * work.tokens,
                    flops=steps * (work.flops or 0.0),
                )
            )
        self._mark = (step, now)

    def waited(self, seconds: float) -> None:
        """Says that the devices stood still for so long, because there was no batch for them."""
        if self._mark is not None and self._pause_depth == 0:
            self._add(_Timed(waited=seconds))

    def _add(self, more: _Timed) -> None:
        self._total = _Timed(*map(operator.add, self._total, more))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Takes the time of the `with` block out of every rate; may be nested."""
        began = self._clock()
        self._pause_depth += 1
        try:
            yield
        finally:
            self._pause_depth -= 1
            if self._pause_depth == 0 and self._mark is not None:
                step, marked = self._mark
                # What passed between the mark and the pause belongs to the step under way.
                self._mark = (step, self._clock() - max(0.0, began - marked))

    def rates_since_asked(self) -> Callable[[], dict[str, float]]:
        """A function that tells the rates since it was last called, at first since now.

        Returns:
          Of the function, nothing when no timed step ended since then. Else step_time (seconds),
          steps_per_sec, input_wait (the share of the time in which the devices stood still for want
          of a batch) and examples_per_sec always; tokens_per_sec, tflops_per_sec_per_device (model
          FLOPs, 1e12) and mfu (a fraction) where known.
        """
        told = self._total

        def rates() -> dict[str, float]:
            nonlocal told
            before, told = told, self._total
            return _rates(self._info, _Timed(*map(operator.sub, told, before)))

        return rates

    def overall(self) -> dict[str, float]:
        """The same rates over all timed steps of this run."""
        return _rates(self._info, self._total)


class _Timed(NamedTuple):
    """What was done in some stretch of time."""

    steps: float = 0
    seconds: float = 0.0
    # Seconds of waiting for data.
    waited: float = 0.0
    examples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


def _rates(info: RunInfo, done: _Timed) -> dict[str, float]:
    if done.steps <= 0 or done.seconds <= 0:
        return {}
    rates = {
        "step_time": done.seconds / done.steps,
        "steps_per_sec": done.steps / done.seconds,
        "input_wait": min(1.0, done.waited / done.seconds),
        "examples_per_sec": done.examples / done.seconds,
    }
    if done.tokens > 0:
        rates["tokens_per_sec"] = done.tokens / done.seconds
    if info.flops_per_step is not None:
        flops_per_sec_per_device = done.flops / done.seconds / info.num_devices
        rates["tflops_per_sec_per_device"] = flops_per_sec_per_device / 1e12
        if info.peak_flops_per_device is not None:
            rates["mfu"] = flops_per_sec_per_device / info.peak_flops_per_device
    return rates
