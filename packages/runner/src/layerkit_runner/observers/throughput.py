"""How fast a run trains, from the steps it completed and the time they took.

The first step carries compilation, so the clock starts when it ends. Time the run spends on other
work (evaluation, a blocking save) is taken out by `pause()`.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator

from layerkit_runner.observers.base import RunInfo


class Throughput:
    """Counts completed steps and the time between them.

    >>> from layerkit_runner.observers.base import RunInfo
    >>> info = RunInfo(
    ...     job_log_dir=None, experiment='Toy', mode='train', num_params=10, num_train_steps=9,
    ...     start_step=0, tokens_per_step=64, examples_per_step=4, flops_per_step=None,
    ...     num_devices=1, device_kind='cpu', peak_flops_per_device=None)
    >>> ticks = iter([100.0, 100.5, 101.0])
    >>> throughput = Throughput(info, clock=lambda: next(ticks))
    >>> for step in (1, 2, 3):
    ...     throughput.completed(step)
    >>> rates = throughput.rates()
    >>> rates['step_time'], rates['examples_per_sec'], rates['tokens_per_sec']
    (0.5, 8.0, 128.0)
    """

    def __init__(self, info: RunInfo, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._info = info
        self._clock = clock
        self._mark: tuple[int, float] | None = None  # step, time up to which all is counted
        self._pause_depth = 0
        # Steps, seconds, and seconds of waiting for data, since `rates` was last asked.
        self._window: tuple[float, ...] = (0, 0.0, 0.0)
        self._total: tuple[float, ...] = (0, 0.0, 0.0)

    def completed(self, step: int) -> None:
        """Says that `step` has ended on the device, now.

        A step that ends within a pause counts neither as a step nor as time, for it shared its time
        with the work that the pause stands for.
        """
        now = self._clock()
        if self._mark is not None and self._pause_depth == 0:
            self._add(step - self._mark[0], now - self._mark[1], 0.0)
        self._mark = (step, now)

    def waited(self, seconds: float) -> None:
        """Says that the devices stood still for so long, because there was no batch for them."""
        if self._mark is not None and self._pause_depth == 0:
            self._add(0, 0.0, seconds)

    def _add(self, *amounts: float) -> None:
        self._window = tuple(map(operator.add, self._window, amounts))
        self._total = tuple(map(operator.add, self._total, amounts))

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

    def rates(self) -> dict[str, float]:
        """Rates since this was last asked; empty when no timed step ended since then.

        Returns:
          step_time (seconds), steps_per_sec, input_wait (the share of the time in which the devices
          stood still for want of a batch) and examples_per_sec always; tokens_per_sec,
          tflops_per_sec_per_device (model FLOPs, 1e12) and mfu (a fraction) where known.
        """
        window, self._window = self._window, (0, 0.0, 0.0)
        return _rates(self._info, *window)

    def overall(self) -> dict[str, float]:
        """The same rates over all timed steps of this run."""
        return _rates(self._info, *self._total)


def _rates(info: RunInfo, steps: float, seconds: float, waited: float) -> dict[str, float]:
    if steps <= 0 or seconds <= 0:
        return {}
    steps_per_sec = steps / seconds
    rates = {
        "step_time": seconds / steps,
        "steps_per_sec": steps_per_sec,
        "input_wait": min(1.0, waited / seconds),
        "examples_per_sec": steps_per_sec * info.examples_per_step,
    }
    if info.tokens_per_step > 0:
        rates["tokens_per_sec"] = steps_per_sec * info.tokens_per_step
    if info.flops_per_step is not None:
        flops_per_sec_per_device = steps_per_sec * info.flops_per_step / info.num_devices
        rates["tflops_per_sec_per_device"] = flops_per_sec_per_device / 1e12
        if info.peak_flops_per_device is not None:
            rates["mfu"] = flops_per_sec_per_device / info.peak_flops_per_device
    return rates
