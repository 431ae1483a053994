"""What `--target` says: which kind of devices a plan is for, how many, and how they are connected.

| written | means |
|---|---|
| `cpu`, `cpux256` | simulated devices, as many as the mesh has, or 256 |
| `here` | the devices of this machine |
| `v5p:8x8x4` | one slice of 8 · 8 · 4 TPU chips |
| `v5e:4x4*2` | two slices of 4 · 4 chips each, connected by the data center's network |
| `v4-128`, `2xv4-128` | what Google Cloud calls a slice, and two of them |
| `h100x256` | 256 GPUs in 32 nodes of 8 |
| `v5p`, `h100` | as many slices and devices as the mesh has |

Nothing here needs JAX's devices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.hardware import DeviceKind, device_kind

HERE = "here"

_COUNTED = re.compile(r"(?P<kind>[a-z]\w*?(?:-40gb)?)x(?P<count>\d+)")
_TOPOLOGY = re.compile(r"(?P<kind>\w+):(?P<sizes>\d+(?:x\d+)*)(?:\*(?P<slices>\d+))?")
_CLOUD = re.compile(r"(?:(?P<slices>\d+)x)?(?P<kind>\w+)-(?P<number>\d+)")

# In the names of these, Google Cloud counts TensorCores, of which a chip has two; else chips.
_COUNTED_BY_CORES = ("v4", "v5p", "v7x")
_THREE_DIMENSIONS = ("v4", "v5p", "v7x")
_DEVICES_PER_CHIP = {"v7x": 2}

FORMS = (
    "cpux8 (simulated), here (the devices of this machine), v5p:8x8x4 (a TPU slice), v5e:4x4*2 (two"
    " slices), v4-128 or 2xv4-128 (as Google Cloud names them), h100x256 (GPUs in nodes of 8)"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """What to plan for.

    Attributes:
      kind: Of the devices; None for those that are here, before they were asked.
      num_devices: Of all slices together; None where the mesh is to say.
      num_slices: Slices of a TPU, nodes of GPUs: groups that a fast network connects.
      topology: Chips of a TPU slice along each dimension; empty for others.
    """

    kind: DeviceKind | None
    num_devices: int | None = None
    num_slices: int = 1
    topology: tuple[int, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether it stands for the devices of this machine."""
        return self.kind is None

    def describe(self) -> str:
        """As it can be written on a command line."""
        if self.kind is None:
            return HERE
        if self.topology:
            slices = f"*{self.num_slices}" if self.num_slices > 1 else ""
            return f"{self.kind.name}:{'x'.join(map(str, self.topology))}{slices}"
        return self.kind.name + (f"x{self.num_devices}" if self.num_devices else "")


def parse_target(text: str) -> Target:
    """Reads a target.

    Raises:
      UsageError: a form or a kind of device that does not exist, or a number that cannot be.
    """
    written = text.strip().lower()
    try:
        return _parse(written)
    except UsageError as error:
        raise UsageError(f"--target={text}: {error}") from None


def _parse(text: str) -> Target:
    if text == HERE:
        return Target(None)
    if match := _TOPOLOGY.fullmatch(text):
        kind = _tpu(match["kind"])
        sizes = tuple(int(size) for size in match["sizes"].split("x"))
        return _slices(kind, sizes, int(match["slices"] or 1))
    if match := _COUNTED.fullmatch(text):
        kind = device_kind(match["kind"])
        if kind.platform == "tpu":
            raise UsageError(
                f"a TPU slice has a shape: {_example(kind)}, or {_cloud_example(kind)} as Google"
                " Cloud names it"
            )
        return counted(kind, int(match["count"]))
    if (match := _CLOUD.fullmatch(text)) and match["kind"] != "a100":
        kind = _tpu(match["kind"])
        chips = _chips(kind, int(match["number"]), written=text)
        return _slices(kind, usual_topology(kind, chips), int(match["slices"] or 1))
    if re.fullmatch(r"[a-z][\w-]*", text):
        return Target(device_kind(text))
    raise UsageError(f"no form of a target. Targets: {FORMS}")


def _tpu(name: str) -> DeviceKind:
    kind = device_kind(name)
    if kind.platform != "tpu":
        raise UsageError(f"{kind.name} has no topology; write {kind.name}x8 for eight of them")
    return kind


def _chips(kind: DeviceKind, number: int, *, written: str) -> int:
    if kind.name not in _COUNTED_BY_CORES:
        return number
    if number % 2:
        raise UsageError(
            f"the number in {written} counts TensorCores, two on each chip, so it is even"
        )
    return number // 2


def _example(kind: DeviceKind) -> str:
    return f"{kind.name}:{'4x4x4' if kind.name in _THREE_DIMENSIONS else '4x4'}"


def _cloud_example(kind: DeviceKind) -> str:
    return f"{kind.name}-{128 if kind.name in _COUNTED_BY_CORES else 16}"


def counted(kind: DeviceKind, count: int) -> Target:
    """So many CPU devices, or GPUs in full nodes.

    Raises:
      UsageError: none, or a number of GPUs that leaves a node partly empty.
    """
    if count < 1:
        raise UsageError("a plan needs at least 1 device")
    per_node = kind.devices_per_host
    if per_node is None or count <= per_node:
        return Target(kind, count)
    if count % per_node:
        raise UsageError(
            f"{count} devices are no whole number of nodes of {per_node}; use"
            f" {count // per_node * per_node} or {-(-count // per_node) * per_node}"
        )
    return Target(kind, count, num_slices=count // per_node)


def _slices(kind: DeviceKind, topology: tuple[int, ...], num_slices: int) -> Target:
    wanted = 3 if kind.name in _THREE_DIMENSIONS else 2
    if len(topology) != wanted or min(topology) < 1:
        raise UsageError(
            f"a slice of {kind.name} has {wanted} dimensions of at least 1, as in {_example(kind)}"
        )
    if num_slices < 1:
        raise UsageError("a plan needs at least 1 slice")
    devices = math.prod(topology) * devices_per_chip(kind)
    return Target(kind, devices * num_slices, num_slices, topology)


def devices_per_chip(kind: DeviceKind) -> int:
    """JAX devices on a chip of a TPU."""
    return _DEVICES_PER_CHIP.get(kind.name, 1)


def usual_topology(kind: DeviceKind, chips: int) -> tuple[int, ...]:
    """The shape in which a slice of so many chips is usually had: the nearest to a cube or square.

    Dimensions are powers of two up to 4 chips, then multiples of 4, the shortest first; those of
    two-dimensional slices are powers of two.

    Raises:
      UsageError: no such slice exists.

    >>> usual_topology(device_kind("v4"), 192)
    (4, 4, 12)
    """
    num_dimensions = 3 if kind.name in _THREE_DIMENSIONS else 2
    shapes = list(_shapes(chips, num_dimensions))
    if not shapes:
        raise UsageError(
            f"no slice of {kind.name} has {chips} chip(s); give its shape, as in {_example(kind)}"
        )
    best = min(shapes, key=sum)
    # Google Cloud writes the short side of flat slices last: 2x2x1.
    if num_dimensions == 3 and best[0] == 1:
        return tuple(sorted(best, reverse=True))
    return best


def _shapes(chips: int, num_dimensions: int) -> Iterator[tuple[int, ...]]:
    sizes = [size for size in range(1, chips + 1) if chips % size == 0]
    if num_dimensions == 2:
        sizes = [size for size in sizes if size & (size - 1) == 0]
    else:
        sizes = [size for size in sizes if size in (1, 2) or size % 4 == 0]
    for shape in itertools.combinations_with_replacement(sizes, num_dimensions):
        if math.prod(shape) == chips:
            yield shape


def sized(target: Target, *, per_slice: int, num_slices: int) -> Target:
    """A target without a number of devices, for a mesh of so many slices.

    Args:
      target: Of a known kind.
      per_slice: Devices of a slice, as the mesh within it has.
      num_slices: Of slices, as the mesh across them has.

    Raises:
      UsageError: no slice has so many chips, or they fill no whole nodes.
    """
    assert target.kind is not None, target
    if target.kind.platform != "tpu":
        return counted(target.kind, per_slice * num_slices)
    chips, rest = divmod(per_slice, devices_per_chip(target.kind))
    if rest:
        raise UsageError(f"a chip of {target.kind.name} is two devices, and {per_slice} is odd")
    return _slices(target.kind, usual_topology(target.kind, chips), num_slices)
