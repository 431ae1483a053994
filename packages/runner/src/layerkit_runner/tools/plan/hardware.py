"""The devices that plans are made for: memory, bandwidths and networks; and `--target`.

Figures are of one JAX device: a chip of a TPU (half a chip of TPU7x) or one GPU. The bandwidth of a
network is the bytes per second that a device can send over all its links. Vendors that add up both
directions print twice as much. None stands for a figure that is not published. docs/planning.md has
a table of the forms of `--target`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from layerkit_runner.distributed.devices import GPU_MEMORY_SHARE
from layerkit_runner.errors import UsageError
from layerkit_runner.observers.speed import peak_flops

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_GIGA = 10**9
_GIGABIT = 10**9 / 8


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A kind of device; None for unknown figures.

    `pattern` matches `jax.Device.device_kind` of all devices with these figures. Of `memory_bytes`,
    a program cannot have `reserved_bytes`. Bandwidths are in bytes/s: of the memory, within a slice
    or node (ICI, NVLink), and between them (DCN, InfiniBand). `peak_flops` is for dense bfloat16.
    """

    name: str
    platform: str
    device_kind: str
    pattern: str
    memory_bytes: int | None = None
    reserved_bytes: int = 0
    memory_bandwidth: float | None = None
    fast_bandwidth: float | None = None
    slow_bandwidth: float | None = None
    devices_per_host: int | None = None
    peak_flops: float | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Look up the peak FLOP/s, which `dataclasses.asdict` includes."""
        object.__setattr__(self, "peak_flops", peak_flops(self.device_kind))

    @property
    def usable_bytes(self) -> int | None:
        """Memory available to programs."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserved_bytes


# Sources: docs.cloud.google.com/tpu/docs/v4, /v5p, /v6e and /tpu7x, whose ICI figures add up both
# directions; TPU v4's links are those of Jouppi et al., "TPU v4", ISCA 2023, table 4, and the
# network of its hosts is not published. A chip of TPU7x is two devices. "Granted" is the memory
# that the compiler leaves to a program.
_TPUS: tuple[tuple[str, str, int, float, float, float, float | None, int], ...] = (
    # name, device kinds, GiB, GiB granted, memory GB/s, ICI GB/s, DCN Gbit/s, devices per host
    ("v4", "TPU v4", 32, 30.75, 1200, 300, None, 4),
    ("v5e", "TPU v5 lite|TPU v5e", 16, 15.75, 819, 200, 200 / 8, 8),
    ("v5p", "TPU v5|TPU v5p", 96, 95.73, 2765, 600, 50, 4),
    ("v6e", "TPU v6 lite|TPU v6e", 32, 31.24, 1638, 400, 100, 8),
    ("v7x", "TPU7x", 96, 94.74, 7380 / 2, 600 / 2, 100 / 2, 8),
)
# Sources: memory as CUDA reports it to a program; bandwidths of NVIDIA's data sheets, whose NVLink
# figures add up both directions; a network card for each GPU, as in DGX.
_GPUS: tuple[tuple[str, str, str, int, float, float, float], ...] = (
    # name, device kind, suffix of other device kinds, bytes, memory GB/s, NVLink GB/s, card Gbit/s
    ("a100", "NVIDIA A100-SXM4-80GB", "", 85_100_068_864, 2039, 300, 200),
    ("a100-40gb", "NVIDIA A100-SXM4-40GB", "", 42_298_834_944, 1555, 300, 200),
    ("h100", "NVIDIA H100 80GB HBM3", "", 84_942_979_072, 3350, 450, 400),
    ("h200", "NVIDIA H200", "( 141GB HBM3e)?", 1398 * _GIB // 10, 4800, 450, 400),
    ("b200", "NVIDIA B200", "", 191_514_411_008, 8000, 900, 400),
)


def _chip(
    major: int, multiprocessors: int, fpus: int, shared_kib: int, l2: int, ghz: float
) -> dict[str, Any]:
    """Return the properties that CUDA reports of a chip, named as in XLA's `GpuDeviceInfoProto`."""
    return {
        "cuda_compute_capability": f"{{ major: {major} minor: 0 }}",
        "core_count": multiprocessors,
        "fpus_per_core": fpus,
        "shared_memory_per_core": shared_kib * _KIB,
        "shared_memory_per_block_optin": (shared_kib - 1) * _KIB,
        "l2_cache_size": l2,
        "clock_rate_ghz": ghz,
    }


_CHIPS = {
    **dict.fromkeys(("a100", "a100-40gb"), _chip(8, 108, 64, 164, 40 * _MIB, 1.41)),
    **dict.fromkeys(("h100", "h200"), _chip(9, 132, 128, 228, 50 * _MIB, 1.98)),
    "b200": _chip(10, 148, 128, 228, 132_644_864, 1.965),
}
_EVERY_CHIP = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * _KIB,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}


def _kinds() -> Iterator[DeviceKind]:
    for name, kinds, gib, granted, memory, ici, dcn, per_host in _TPUS:
        yield DeviceKind(
            name,
            "tpu",
            kinds.partition("|")[0],
            kinds,
            memory_bytes=gib * _GIB,
            reserved_bytes=round((gib - granted) * _GIB),
            memory_bandwidth=memory * _GIGA,
            fast_bandwidth=ici * _GIGA,
            slow_bandwidth=None if dcn is None else dcn * _GIGABIT,
            devices_per_host=per_host,
        )
    for name, kind, others, size, memory, nvlink, card in _GPUS:
        yield DeviceKind(
            name,
            "gpu",
            kind,
            kind + others,
            memory_bytes=size,
            # The rest is for CUDA's context, NCCL's buffers and libraries, as in a run.
            reserved_bytes=round((1 - GPU_MEMORY_SHARE) * size),
            memory_bandwidth=memory * _GIGA,
            fast_bandwidth=nvlink * _GIGA,
            slow_bandwidth=card * _GIGABIT,
            devices_per_host=8,
        )
    yield DeviceKind("cpu", "cpu", "cpu", "cpu")


KINDS = tuple(_kinds())
_OTHER_NAMES = {"v5litepod": "v5e", "tpu7x": "v7x", "ironwood": "v7x", "trillium": "v6e"}


def device_kind(name: str) -> DeviceKind:
    """Return the kind with a name, in any case, or with another name of the same device.

    Raises:
      UsageError: The name is unknown.

    >>> device_kind("h100").devices_per_host
    8
    """
    lower = name.lower()
    kinds = {kind.name: kind for kind in KINDS}
    if match := kinds.get(_OTHER_NAMES.get(lower, lower)):
        return match
    raise UsageError(field="kind of device", value=name, choices=(*kinds, *_OTHER_NAMES))


def kind_of_device(jax_device_kind: str, *, platform: str) -> DeviceKind:
    """Return the kind of a device of this machine, without figures if the kind is unknown."""
    for kind in KINDS:
        if re.fullmatch(kind.pattern, jax_device_kind):
            return kind
    return DeviceKind(jax_device_kind, platform, jax_device_kind, re.escape(jax_device_kind))


def target_config(kind: DeviceKind) -> str:
    """Return the text of a `GpuTargetConfigProto`, with which XLA compiles for an absent GPU.

    On a machine with GPUs XLA gets these properties from the driver.
    """
    assert kind.memory_bandwidth is not None
    device = {
        **_EVERY_CHIP,
        **_CHIPS[kind.name],
        "memory_bandwidth": round(kind.memory_bandwidth),
        "device_memory_size": kind.memory_bytes,
    }
    fields = " ".join(f"{name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{ {fields} }}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 2 }\n"
        "runtime_version { major: 12 minor: 9 patch: 0 }\n"
        f'device_description_str: "{kind.device_kind}"\n'
    )


HERE = "here"

_COUNTED = re.compile(r"(?P<kind>[a-z]\w*?(?:-40gb)?)x(?P<count>\d+)")
_TOPOLOGY = re.compile(r"(?P<kind>\w+):(?P<sizes>\d+(?:x\d+)*)(?:\*(?P<slices>\d+))?")
_CLOUD = re.compile(r"(?:(?P<slices>\d+)x)?(?P<kind>\w+)-(?P<number>\d+)")

# Slices of these are three-dimensional, and Google Cloud counts their TensorCores, two per chip.
_THREE_DIMENSIONS = ("v4", "v5p", "v7x")
_DEVICES_PER_CHIP = {"v7x": 2}

_FORMS = (
    "cpux8 (simulated), here (the devices of this machine), v5p:8x8x4 (a TPU slice), v5e:4x4*2 (two"
    " slices), v4-128 or 2xv4-128 (names of Google Cloud) or h100x256 (GPUs in nodes of 8)"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices to plan for: those of this machine if `kind` is None.

    `num_devices` is None for as many as the mesh has. A slice is a TPU slice of the chips
    `topology`, or a node of GPUs.
    """

    kind: DeviceKind | None
    num_devices: int | None = None
    num_slices: int = 1
    topology: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return the text that `parse_target` reads."""
        if self.kind is None:
            return HERE
        if self.topology:
            slices = f"*{self.num_slices}" if self.num_slices > 1 else ""
            return f"{self.kind.name}:{'x'.join(map(str, self.topology))}{slices}"
        return self.kind.name + (f"x{self.num_devices}" if self.num_devices else "")


def parse_target(text: str) -> Target:
    """Read the text of `--target`."""
    try:
        return _parse(text.strip().lower())
    except UsageError as error:
        if error.field is None:
            error.field, error.value = "--target", text
        else:
            error.owner = f"--target={text}"
        raise


def _parse(text: str) -> Target:
    if text == HERE:
        return Target(None)
    if match := _TOPOLOGY.fullmatch(text):
        sizes = tuple(int(size) for size in match["sizes"].split("x"))
        return _slices(_tpu(match["kind"]), sizes, int(match["slices"] or 1))
    if match := _COUNTED.fullmatch(text):
        kind = device_kind(match["kind"])
        if kind.platform == "tpu":
            cloud = f"{kind.name}-{128 if kind.name in _THREE_DIMENSIONS else 16}"
            shape = f"the shape of a TPU slice, such as {_example(kind)}"
            raise UsageError(expected=f"{shape}, or {cloud} as Google Cloud names it")
        return _counted(kind, int(match["count"]))
    if (match := _CLOUD.fullmatch(text)) and match["kind"] != "a100":
        kind, chips = _tpu(match["kind"]), int(match["number"])
        if kind.name in _THREE_DIMENSIONS:
            chips, rest = divmod(chips, 2)
            if rest:
                raise UsageError(expected="an even number of TensorCores, two on each chip")
        return _slices(kind, usual_topology(kind, chips), int(match["slices"] or 1))
    if re.fullmatch(r"[a-z][\w-]*", text):
        return Target(device_kind(text))
    raise UsageError(expected=_FORMS)


def _tpu(name: str) -> DeviceKind:
    kind = device_kind(name)
    if kind.platform != "tpu":
        raise UsageError(expected=f"a number of devices, such as {kind.name}x8, and no topology")
    return kind


def _example(kind: DeviceKind) -> str:
    return f"{kind.name}:{'4x4x4' if kind.name in _THREE_DIMENSIONS else '4x4'}"


def _counted(kind: DeviceKind, count: int) -> Target:
    """Return a number of CPU devices, or of GPUs in full nodes."""
    if count < 1:
        raise UsageError(expected="at least 1 device")
    per_node = kind.devices_per_host
    if per_node is None or count <= per_node:
        return Target(kind, count)
    if count % per_node:
        lower, upper = (f"{kind.name}x{count // per_node * per_node + n}" for n in (0, per_node))
        raise UsageError(expected=f"full nodes of {per_node} devices, such as {lower} or {upper}")
    return Target(kind, count, num_slices=count // per_node)


def _slices(kind: DeviceKind, topology: tuple[int, ...], num_slices: int) -> Target:
    dimensions = 3 if kind.name in _THREE_DIMENSIONS else 2
    if len(topology) != dimensions or min(topology) < 1:
        raise UsageError(expected=f"{dimensions} positive sizes of a slice, as in {_example(kind)}")
    if num_slices < 1:
        raise UsageError(expected="at least 1 slice")
    devices = math.prod(topology) * _DEVICES_PER_CHIP.get(kind.name, 1)
    return Target(kind, devices * num_slices, num_slices, topology)


def usual_topology(kind: DeviceKind, chips: int) -> tuple[int, ...]:
    """Return the shape of a slice with so many chips that is nearest to a cube or square.

    Dimensions are powers of two up to 4 chips, then multiples of 4, the shortest first; those of
    two-dimensional slices are powers of two.

    Raises:
      UsageError: No such slice exists.

    >>> usual_topology(device_kind("v4"), 192)
    (4, 4, 12)
    """
    is_cube = kind.name in _THREE_DIMENSIONS
    sizes = [
        size
        for size in range(1, chips + 1)
        if chips % size == 0
        and (size in (1, 2) or size % 4 == 0 if is_cube else size & (size - 1) == 0)
    ]
    shapes = itertools.combinations_with_replacement(sizes, 3 if is_cube else 2)
    fitting = [shape for shape in shapes if math.prod(shape) == chips]
    if not fitting:
        raise UsageError(
            f"no slice of {kind.name} has {chips} chip(s)",
            expected=f"the shape of a slice, as in {_example(kind)}",
        )
    best = min(fitting, key=sum)
    # Google Cloud writes the short side of flat slices last: 2x2x1.
    return best[::-1] if is_cube and best[0] == 1 else best


def sized(target: Target, *, per_slice: int, num_slices: int) -> Target:
    """Return a target of a known kind with the number of devices that a mesh has."""
    kind = target.kind
    assert kind is not None, target
    try:
        if kind.platform != "tpu":
            return _counted(kind, per_slice * num_slices)
        chips, rest = divmod(per_slice, _DEVICES_PER_CHIP.get(kind.name, 1))
        if rest:
            raise UsageError(expected=f"an even number: a chip of {kind.name} is two devices")
        return _slices(kind, usual_topology(kind, chips), num_slices)
    except UsageError as error:
        error.owner = f"--target={kind.name}"
        error.field, error.value = "devices of the mesh", per_slice * num_slices
        raise
