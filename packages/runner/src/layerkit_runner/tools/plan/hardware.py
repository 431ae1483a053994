"""What is known of the devices that plans are made for: memory, bandwidths, networks.

Figures are of one JAX device, which is a chip of a TPU (half a chip of TPU7x) or one GPU. A
bandwidth of a network counts what a device can SEND in a second, all its links together; vendors
that print the sum of both directions print the double. What no vendor says stands as None.
"""

from __future__ import annotations

import dataclasses
import re

from layerkit.near_names import near_names
from layerkit_runner.distributed.xla_flags import GPU_MEMORY_SHARE
from layerkit_runner.errors import UsageError
from layerkit_runner.observers.device_peaks import peak_flops

_GIB = 2**30
_GIGA = 10**9
_GIGABIT = 10**9 / 8


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A kind of device.

    Attributes:
      name: As in `--target`.
      platform: As JAX says it: `tpu`, `gpu` or `cpu`.
      device_kind: As `jax.Device.device_kind` says it.
      pattern: A regular expression of all device kinds that these figures are true of.
      memory_bytes: Of the device, as its driver counts it.
      reserved_bytes: Of these, what a program cannot have: the runtime keeps it.
      memory_bandwidth: Bytes/s that the device reads from and writes to its memory.
      fast_bandwidth: Bytes/s that the device sends within its slice or node (ICI, NVLink).
      fast_links: Over how many links; a ring along one axis of a torus uses two of them, while
        those of NVLink all lead to the switches.
      slow_bandwidth: Bytes/s that the device sends to other slices or nodes, which is its share of
        the host's network cards (DCN, InfiniBand).
      devices_per_host: Of one machine, and of a node of GPUs.
      peak_flops: Dense bfloat16 FLOP/s, from `observers.device_peaks`.
    """

    name: str
    platform: str
    device_kind: str
    pattern: str
    memory_bytes: int | None = None
    reserved_bytes: int = 0
    memory_bandwidth: float | None = None
    fast_bandwidth: float | None = None
    fast_links: int | None = None
    slow_bandwidth: float | None = None
    devices_per_host: int | None = None
    peak_flops: float | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", peak_flops(self.device_kind))

    @property
    def usable_bytes(self) -> int | None:
        """Memory that a program can have."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserved_bytes


# The compiler of TPUs tells what it grants a program when one is too large: 30.75 GiB of a v4,
# 15.75 of a v5e, 95.73 of a v5p (of which Google's page counts 95), 31.24 of a v6e,
# 94.74 of half a TPU7x.
def _kept(memory: float, granted: float) -> int:
    """What the runtime keeps of a TPU's memory, from GiB."""
    return round((memory - granted) * _GIB)


def _gpu(
    name: str,
    device_kind: str,
    pattern: str,
    *,
    memory_bytes: int,
    memory_bandwidth: float,
    fast_bandwidth: float,
    fast_links: int,
    slow_bandwidth: float,
) -> DeviceKind:
    """A GPU of an eight-GPU node with NVLink switches.

    Reserved is what a run leaves to CUDA's context, NCCL's buffers and libraries.
    """
    return DeviceKind(
        name,
        "gpu",
        device_kind,
        pattern,
        memory_bytes=memory_bytes,
        reserved_bytes=round((1 - GPU_MEMORY_SHARE) * memory_bytes),
        memory_bandwidth=memory_bandwidth,
        fast_bandwidth=fast_bandwidth,
        fast_links=fast_links,
        slow_bandwidth=slow_bandwidth,
        devices_per_host=8,
    )


KINDS: tuple[DeviceKind, ...] = (
    # docs.cloud.google.com/tpu/docs/v4: 32 GiB, 1200 GB/s, hosts of 4 chips. Links: Jouppi et al.,
    # "TPU v4", ISCA 2023, table 4: 6 × 50 GB/s. The network of its hosts is not published.
    DeviceKind(
        "v4",
        "tpu",
        "TPU v4",
        "TPU v4",
        memory_bytes=32 * _GIB,
        reserved_bytes=_kept(32, 30.75),
        memory_bandwidth=1200 * _GIGA,
        fast_bandwidth=300 * _GIGA,
        fast_links=6,
        devices_per_host=4,
    ),
    # docs.cloud.google.com/tpu/docs/v6e, table "v5e and v6e": 16 GB, 819 GB/s, ICI 1600 Gbit/s over
    # 4 ports; hosts of 8 chips with 2 × 100 Gbit/s.
    DeviceKind(
        "v5e",
        "tpu",
        "TPU v5 lite",
        "TPU v5 lite|TPU v5e",
        memory_bytes=16 * _GIB,
        reserved_bytes=_kept(16, 15.75),
        memory_bandwidth=819 * _GIGA,
        fast_bandwidth=1600 * _GIGABIT,
        fast_links=4,
        slow_bandwidth=200 * _GIGABIT / 8,
        devices_per_host=8,
    ),
    # docs.cloud.google.com/tpu/docs/v5p: 95 GiB, 2765 GB/s, ICI 1200 GB/s in both directions (3D
    # torus), DCN 50 Gbit/s per chip, hosts of 4 chips.
    DeviceKind(
        "v5p",
        "tpu",
        "TPU v5",
        "TPU v5|TPU v5p",
        memory_bytes=96 * _GIB,
        reserved_bytes=_kept(96, 95.73),
        memory_bandwidth=2765 * _GIGA,
        fast_bandwidth=600 * _GIGA,
        fast_links=6,
        slow_bandwidth=50 * _GIGABIT,
        devices_per_host=4,
    ),
    # docs.cloud.google.com/tpu/docs/tpu7x, table with v6e: 32 GiB, 1638 GB/s, ICI 800 GB/s in both
    # directions, DCN 100 Gbit/s per chip; docs/v6e: 4 ports, hosts of 8 chips.
    DeviceKind(
        "v6e",
        "tpu",
        "TPU v6 lite",
        "TPU v6 lite|TPU v6e",
        memory_bytes=32 * _GIB,
        reserved_bytes=_kept(32, 31.24),
        memory_bandwidth=1638 * _GIGA,
        fast_bandwidth=400 * _GIGA,
        fast_links=4,
        slow_bandwidth=100 * _GIGABIT,
        devices_per_host=8,
    ),
    # docs.cloud.google.com/tpu/docs/tpu7x (Ironwood): a chip has 192 GiB, 7380 GB/s, ICI 1200 GB/s
    # in both directions (3D torus), DCN 100 Gbit/s, and is two devices.
    DeviceKind(
        "v7x",
        "tpu",
        "TPU7x",
        "TPU7x",
        memory_bytes=96 * _GIB,
        reserved_bytes=_kept(96, 94.74),
        memory_bandwidth=7380 * _GIGA / 2,
        fast_bandwidth=600 * _GIGA / 2,
        fast_links=6,
        slow_bandwidth=100 * _GIGABIT / 2,
        devices_per_host=8,
    ),
    # Memory as CUDA reports it to a program. NVIDIA's data sheets: A100 80GB SXM 2039 GB/s, NVLink
    # 600 GB/s in both directions (12 links). DGX A100: a 200 Gbit/s card for each GPU.
    _gpu(
        "a100",
        "NVIDIA A100-SXM4-80GB",
        r"NVIDIA A100-SXM4-80GB",
        memory_bytes=85_100_068_864,
        memory_bandwidth=2039 * _GIGA,
        fast_bandwidth=300 * _GIGA,
        fast_links=12,
        slow_bandwidth=200 * _GIGABIT,
    ),
    # A100 40GB SXM: 1555 GB/s.
    _gpu(
        "a100-40gb",
        "NVIDIA A100-SXM4-40GB",
        r"NVIDIA A100-SXM4-40GB",
        memory_bytes=42_298_834_944,
        memory_bandwidth=1555 * _GIGA,
        fast_bandwidth=300 * _GIGA,
        fast_links=12,
        slow_bandwidth=200 * _GIGABIT,
    ),
    # H100 SXM: 3.35 TB/s, NVLink 900 GB/s (18 links). DGX H100: a 400 Gbit/s card for each GPU.
    _gpu(
        "h100",
        "NVIDIA H100 80GB HBM3",
        r"NVIDIA H100 80GB HBM3",
        memory_bytes=84_942_979_072,
        memory_bandwidth=3350 * _GIGA,
        fast_bandwidth=450 * _GIGA,
        fast_links=18,
        slow_bandwidth=400 * _GIGABIT,
    ),
    # H200 SXM: 4.8 TB/s, the rest as H100. CUDA reports 139.8 GiB.
    _gpu(
        "h200",
        "NVIDIA H200",
        r"NVIDIA H200( 141GB HBM3e)?",
        memory_bytes=1398 * _GIB // 10,
        memory_bandwidth=4800 * _GIGA,
        fast_bandwidth=450 * _GIGA,
        fast_links=18,
        slow_bandwidth=400 * _GIGABIT,
    ),
    # DGX B200: 180 GB and 8 TB/s each, NVLink 1.8 TB/s (18 links), a 400 Gbit/s card for each GPU.
    _gpu(
        "b200",
        "NVIDIA B200",
        r"NVIDIA B200",
        memory_bytes=191_514_411_008,
        memory_bandwidth=8000 * _GIGA,
        fast_bandwidth=900 * _GIGA,
        fast_links=18,
        slow_bandwidth=400 * _GIGABIT,
    ),
    DeviceKind("cpu", "cpu", "cpu", "cpu"),
)

# Other names of the same things.
_ALIASES = {"v5litepod": "v5e", "tpu7x": "v7x", "ironwood": "v7x", "trillium": "v6e"}


def device_kind(name: str) -> DeviceKind:
    """The kind of that name, or of another name of it, in any case.

    Raises:
      UsageError: no such kind is known; the nearest names are told.

    >>> device_kind("h100").devices_per_host
    8
    """
    lower = name.lower()
    wanted = _ALIASES.get(lower, lower)
    for kind in KINDS:
        if kind.name == wanted:
            return kind
    known = [kind.name for kind in KINDS]
    raise UsageError(
        f"no kind of device {name!r} is known{near_names(name, [*known, *_ALIASES])} Known:"
        f" {', '.join(known)}"
    )


def kind_of_device(jax_device_kind: str, *, platform: str) -> DeviceKind:
    """The kind of a device that is here; one without figures where nothing is known of it."""
    for kind in KINDS:
        if re.fullmatch(kind.pattern, jax_device_kind):
            return kind
    return DeviceKind(jax_device_kind, platform, jax_device_kind, re.escape(jax_device_kind))
