"""Training speed and memory: rates of completed steps, peak rates of devices, bytes in use.

The rates start at the end of the first step, which includes compilation. `pause` excludes the time
of other work, such as an evaluation or a blocking save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from layerkit_runner.observers.base import RunInfo


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The work of one training step, which may differ between training programs."""

    examples: float
    tokens: float
    flops: float | None


class Throughput:
    """A counter of completed steps and of the time between them."""

    def __init__(self, info: RunInfo, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start without steps; `clock` returns seconds."""
        self._info = info
        self._usual = StepWork(info.examples_per_step, info.tokens_per_step, info.flops_per_step)
        self._clock = clock
        self._mark: tuple[int, float] | None = None  # newest counted step and time
        self._pause_depth = 0
        self._total = _Counts()

    def completed(self, step: int, work: StepWork | None = None) -> None:
        """Count a step that has just ended on the device, with its work or that of `info`.

        A step that ends within a pause is not counted, since it shared its time with other work.
        """
        now = self._clock()
        if self._mark is not None and self._pause_depth == 0:
            work, steps = work or self._usual, step - self._mark[0]
            self._add(
                _Counts(
                    steps=steps,
                    seconds=now - self._mark[1],
                    examples=steps * work.examples,
                    tokens=steps * work.tokens,
                    flops=steps * (work.flops or 0.0),
                )
            )
        self._mark = (step, now)

    def waited(self, seconds: float) -> None:
        """Count time in which the devices were idle for lack of a batch."""
        if seconds and self._mark is not None and self._pause_depth == 0:
            self._add(_Counts(input_wait=seconds))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of the `with` block, which may be nested, from every rate."""
        began = self._clock()
        self._pause_depth += 1
        try:
            yield
        finally:
            self._pause_depth -= 1
            if self._pause_depth == 0 and self._mark is not None:
                step, marked = self._mark
                # The time between the mark and the pause belongs to the current step.
                self._mark = (step, self._clock() - max(0.0, began - marked))

    def rates_since_asked(self) -> Callable[[], dict[str, float]]:
        """Return a function that returns the rates since its last call, the first time since now.

        They are fractions, seconds and 1e12 model FLOPs, as the names say; unknown ones are left
        out.
        """
        last = self._total

        def rates() -> dict[str, float]:
            nonlocal last
            before, last = last, self._total
            return _rates(self._info, _Counts(*map(operator.sub, last, before)))

        return rates

    def overall(self) -> dict[str, float]:
        """Return the rates over all timed steps of this run."""
        return _rates(self._info, self._total)

    def _add(self, more: _Counts) -> None:
        self._total = _Counts(*map(operator.add, self._total, more))


class _Counts(NamedTuple):
    """Work done in `seconds`, which include `input_wait` seconds of waiting for data."""

    steps: float = 0
    seconds: float = 0.0
    input_wait: float = 0.0
    examples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


def _rates(info: RunInfo, done: _Counts) -> dict[str, float]:
    if done.steps <= 0 or done.seconds <= 0:
        return {}
    rates = {
        "step_time": done.seconds / done.steps,
        "steps_per_sec": done.steps / done.seconds,
        "input_wait": min(1.0, done.input_wait / done.seconds),
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


def memory_scalars() -> dict[str, float]:
    """Return the bytes in use by name, without unknown ones.

    `memory/device_…` are the maximum over the devices of this process, unknown for CPUs, and
    `memory/host_rss_bytes` is the resident memory of this process, known on systems with /proc.
    """
    import jax  # importing the observers does not load it

    scalars = {}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    for name in ("bytes_in_use", "peak_bytes_in_use"):
        known = [device[name] for device in stats if name in device]
        if known:
            scalars[f"memory/device_{name}"] = float(max(known))
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as statm:
        pages = int(statm.read().split()[1])
        scalars["memory/host_rss_bytes"] = float(pages * os.sysconf("SC_PAGE_SIZE"))
    return scalars


# Dense (no structured sparsity) bfloat16 FLOP/s of one JAX device, float16 for V100 and T4. Vendors
# print double that for GPUs since Ampere, with sparsity. If a TPU chip is two JAX devices, each has
# half. The first pattern that matches the whole device kind applies, so variants come first.
_TERA = 1e12
_PEAKS: tuple[tuple[str, float | None], ...] = (
    # Cloud TPU documentation, "Peak compute per chip (bf16)", one page per version.
    # A v2 or v3 chip (45, 123 TFLOP/s) is two devices; so is a TPU7x chip (2307).
    (r"TPU v2", 22.5 * _TERA),
    (r"TPU v3", 61.5 * _TERA),
    # TPU v4i: Jouppi et al., "Ten Lessons From Three Generations", 2021.
    (r"TPU v4 lite", 138 * _TERA),
    (r"TPU v4", 275 * _TERA),
    (r"TPU v5 lite|TPU v5e", 197 * _TERA),
    (r"TPU v5|TPU v5p", 459 * _TERA),
    (r"TPU v6 lite|TPU v6e", 918 * _TERA),
    (r"TPU7x", 2307 / 2 * _TERA),
    # NVIDIA data sheets and architecture white papers of each product. The peak of a slice of a
    # partitioned GPU (MIG) is unknown.
    (r".*\bMIG\b.*", None),
    (r".*\b(GB300|GB200)\b.*", 2500 * _TERA),
    (r".*\b(B300|B200)\b.*", 2250 * _TERA),
    (r".*\b(H200 NVL|H100 NVL)\b.*", 835.5 * _TERA),
    (r".*\bH100 PCIe\b.*", 756 * _TERA),
    (r".*\b(GH200|H200|H100)\b.*", 989.4 * _TERA),
    (r".*\bA100\b.*", 312 * _TERA),
    (r".*\bL40S\b.*", 362 * _TERA),
    (r".*\bL4\b.*", 121 * _TERA),
    (r".*\bV100\b.*", 125 * _TERA),  # float16
    (r".*\bT4\b.*", 65 * _TERA),  # float16
)


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of one device, or None if unknown, as for CPUs.

    Args:
      device_kind: Value of `jax.Device.device_kind`.

    >>> peak_flops('NVIDIA H100 80GB HBM3')
    989400000000000.0
    >>> peak_flops('cpu') is None
    True
    """
    matches = (peak for pattern, peak in _PEAKS if re.fullmatch(pattern, device_kind))
    return next(matches, None)
