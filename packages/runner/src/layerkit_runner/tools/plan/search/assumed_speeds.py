"""What a step is taken to cost where the speed of its devices is not known: for an order alone.

Bytes that are sent say little of a step's time: an axis that splits neither rows nor activations
sends next to nothing, since all of its devices work on the same. So candidates are compared by all
that a device does, as they are where its speeds are known (the roofline model, see `bounds`), and
one of which nothing is known is taken for a typical one: an order hangs on the ratios alone. Small
steps wait more than they send, so that each collective costs a latency besides, as in Thakur,
Rabenseifner and Gropp, 2005.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from layerkit_runner.tools.plan.bounds import DeviceWork
from layerkit_runner.tools.plan.collectives import Traffic
from layerkit_runner.tools.plan.hardware import DeviceKind, device_kind

# It computes 240 FLOPs while it reads a byte of memory, and 985 while it sends one; the other known
# kinds 150 to 560, and 760 to 3,850.
TYPICAL = device_kind("v5e")
# What vendors tell of the networks between slices lies between 3 and 50 GB/s.
_BETWEEN_SLICES = 1e10
# One hop between TPUs; what libraries for GPUs do takes several times as long.
_LATENCY = 1e-6


@dataclasses.dataclass(frozen=True)
class AssumedSpeeds:
    """The speeds of a device, typical ones in the place of those that are not known.

    Attributes:
      peak_flops: FLOP/s.
      memory_bandwidth: Bytes/s, as those below.
      fast_bandwidth: Within a slice or node.
      slow_bandwidth: To other slices or nodes.
      latency: Seconds that each collective takes besides; 0 where the network is known, as bounds
        are told without.
    """

    peak_flops: float
    memory_bandwidth: float
    fast_bandwidth: float
    slow_bandwidth: float
    latency: float

    def order_seconds(self, work: DeviceWork, collectives: Iterable[Traffic]) -> float:
        """What candidates are put in order by: a step with all communication hidden, and one with
        none hidden, together.

        Args:
          work: Of each device.
          collectives: That it takes part in.
        """
        compute = max(work.flops / self.peak_flops, work.memory_bytes / self.memory_bandwidth)
        fast, slow = work.fast_bytes / self.fast_bandwidth, work.slow_bytes / self.slow_bandwidth
        waiting = self.latency * sum(traffic.executions for traffic in collectives)
        return max(compute, fast, slow) + compute + fast + slow + waiting

    def figures(self, unknown: Iterable[str]) -> dict[str, float]:
        """What is assumed.

        Args:
          unknown: In the place of these figures, named as in `Bounds.unknown`.
        """
        by_name = {
            "peak FLOP/s": self.peak_flops,
            "memory bandwidth": self.memory_bandwidth,
            "bandwidth within a slice": self.fast_bandwidth,
            "bandwidth between slices": self.slow_bandwidth,
        }
        named = set(unknown)
        found = {name: figure for name, figure in by_name.items() if name in named}
        return {**found, "latency": self.latency} if found and self.latency else found


def assumed_speeds(kind: DeviceKind) -> AssumedSpeeds:
    """The speeds of a kind of device; what is not known goes with what it computes.

    >>> assumed_speeds(device_kind("cpu")).fast_bandwidth == TYPICAL.fast_bandwidth
    True
    """
    typical_peak, typical_memory, typical_fast = (
        TYPICAL.peak_flops,
        TYPICAL.memory_bandwidth,
        TYPICAL.fast_bandwidth,
    )
    assert typical_peak and typical_memory and typical_fast
    peak = kind.peak_flops or typical_peak
    size = peak / typical_peak
    return AssumedSpeeds(
        peak_flops=peak,
        memory_bandwidth=kind.memory_bandwidth or size * typical_memory,
        fast_bandwidth=kind.fast_bandwidth or size * typical_fast,
        slow_bandwidth=kind.slow_bandwidth or _BETWEEN_SLICES,
        latency=0.0 if kind.fast_bandwidth else _LATENCY,
    )
