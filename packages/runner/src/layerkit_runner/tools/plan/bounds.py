"""How fast a step can be at best: the time that arithmetic, memory and networks need for it.

Each is what a device has to do, divided by what it can do when it does nothing else (the roofline
model: Williams, Waterman and Patterson, 2009). No step is faster than the slowest of them. What is
counted, and what is taken for granted:

- Arithmetic: the products of the whole step as it was traced, forward, backward, and those that
  rematerialisation and bubbles of a pipeline repeat, shared evenly by all devices, at the dense
  bfloat16 peak. What several devices compute alike, as all stages of a pipeline do the softmax,
  and what is no product costs more.
- Memory: state and batch are read once, and weights twice more, by the forward and the backward
  pass; results are written; what the step holds in between, and what comes over a network, is
  written and read once. Layers of a loop use the same memory again and again, so more is moved.
- Networks: what a device sends, all its links busy. A ring along one axis of a torus uses two of
  its links, and latencies are not counted.

Communication that hides behind arithmetic costs nothing, that which does not adds up: both ends
are told. The utilisation between them is what kernels as fast as the peaks would reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from layerkit_runner.tools.plan.collectives import Traffic
from layerkit_runner.tools.plan.hardware import DeviceKind
from layerkit_runner.tools.plan.memory import Memory


@dataclasses.dataclass(frozen=True)
class DeviceWork:
    """What one device has to do in a step.

    Attributes:
      flops: Of all products, with those that are repeated.
      memory_bytes: Read from its memory and written to it.
      fast_bytes: Sent within the slice or node.
      slow_bytes: Sent to other slices or nodes.
    """

    flops: float
    memory_bytes: float
    fast_bytes: float
    slow_bytes: float


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a step takes at least; None where a figure of the device is not known.

    Attributes:
      work: What it takes it for.
      compute_seconds: For the arithmetic.
      memory_seconds: For reading and writing memory.
      fast_network_seconds: For what is sent within a slice or node.
      slow_network_seconds: For what is sent to others.
      limited_by: Which of them takes longest: `compute`, `memory`, `fast network`, `slow network`.
      step_seconds: Where all communication hides behind arithmetic: the longest of the four.
      step_seconds_no_overlap: Where none does: the longer of the first two, and both networks.
      tokens_per_sec: Of all devices, in `step_seconds`.
      tokens_per_sec_no_overlap: Likewise.
      mfu: Model FLOPs utilisation in `step_seconds`: a fraction of the peak.
      mfu_no_overlap: Likewise.
      unknown: Figures of the device that were needed and are not known.
    """

    work: DeviceWork
    compute_seconds: float | None
    memory_seconds: float | None
    fast_network_seconds: float | None
    slow_network_seconds: float | None
    limited_by: str | None
    step_seconds: float | None
    step_seconds_no_overlap: float | None
    tokens_per_sec: float | None
    tokens_per_sec_no_overlap: float | None
    mfu: float | None
    mfu_no_overlap: float | None
    unknown: list[str]


def memory_traffic(memory: Memory, *, bytes_received: float) -> float:
    """Bytes that a device reads from its memory and writes to it in a step, at least.

    Args:
      memory: Of the step.
      bytes_received: From other devices; most of it lands in temporaries, so the larger counts.
    """
    between = 2 * max(memory.temporaries, bytes_received)
    return memory.arguments + memory.outputs + 2 * memory.weights + between


def step_bounds(
    work: DeviceWork,
    device: DeviceKind,
    *,
    model_flops_per_device: float,
    tokens: int | None,
) -> Bounds:
    """The bounds of a step.

    Args:
      work: Of each device.
      device: What it can do.
      model_flops_per_device: Without what is repeated; what utilisation counts.
      tokens: Of the global batch; None where it has none.
    """
    parts = {
        "compute": (work.flops, device.peak_flops, "peak FLOP/s"),
        "memory": (work.memory_bytes, device.memory_bandwidth, "memory bandwidth"),
        "fast network": (work.fast_bytes, device.fast_bandwidth, "bandwidth within a slice"),
        "slow network": (work.slow_bytes, device.slow_bandwidth, "bandwidth between slices"),
    }
    seconds = {name: _seconds(amount, rate) for name, (amount, rate, _) in parts.items()}
    known = {name: each for name, each in seconds.items() if each is not None}
    # Without the arithmetic there is no telling a step's time; an unknown network leaves a bound.
    step = no_overlap = limited_by = None
    if seconds["compute"] is not None:
        limited_by = max(known, key=lambda name: known[name])
        step = known[limited_by]
        on_device = max(known["compute"], known.get("memory", 0.0))
        no_overlap = on_device + known.get("fast network", 0) + known.get("slow network", 0)

    def rate(amount: float | None, taken: float | None) -> float | None:
        return None if amount is None or not taken else amount / taken

    peak = device.peak_flops
    share = None if peak is None else model_flops_per_device / peak
    return Bounds(
        work=work,
        compute_seconds=seconds["compute"],
        memory_seconds=seconds["memory"],
        fast_network_seconds=seconds["fast network"],
        slow_network_seconds=seconds["slow network"],
        limited_by=limited_by,
        step_seconds=step,
        step_seconds_no_overlap=no_overlap,
        tokens_per_sec=rate(tokens, step),
        tokens_per_sec_no_overlap=rate(tokens, no_overlap),
        mfu=rate(share, step),
        mfu_no_overlap=rate(share, no_overlap),
        unknown=[what for name, (_, _, what) in parts.items() if seconds[name] is None],
    )


def bounds_of(
    memory: Memory,
    collectives: Iterable[Traffic],
    device: DeviceKind,
    *,
    flops_per_device: float,
    model_flops_per_device: float,
    tokens: int | None,
) -> Bounds:
    """The bounds of a compiled step.

    Args:
      memory: Of a device.
      collectives: What each device sends.
      device: What it can do.
      flops_per_device: Of all products, with those that are repeated.
      model_flops_per_device: Without them.
      tokens: Of the global batch; None where it has none.
    """
    sent = list(collectives)
    total, slow = sum(each.bytes_sent for each in sent), sum(each.bytes_slow for each in sent)
    work = DeviceWork(
        flops=flops_per_device,
        memory_bytes=memory_traffic(memory, bytes_received=total),
        fast_bytes=total - slow,
        slow_bytes=slow,
    )
    return step_bounds(work, device, model_flops_per_device=model_flops_per_device, tokens=tokens)


def _seconds(amount: float, rate: float | None) -> float | None:
    """What nothing is asked of takes no time, whatever is known of it."""
    if amount == 0:
        return 0.0
    return None if rate is None else amount / rate
