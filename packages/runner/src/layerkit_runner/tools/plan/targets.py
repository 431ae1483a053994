"""`--target`: the kind, number and connection of the devices that a plan is for.

| text | meaning |
|---|---|
| `cpu`, `cpux256` | simulated devices, as many as the mesh has, or 256 |
| `here` | the devices of this machine |
| `v5p:8x8x4` | one slice of 8 · 8 · 4 TPU chips |
| `v5e:4x4*2` | two slices of 4 · 4 chips each, connected by the data center's network |
| `v4-128`, `2xv4-128` | a slice by its name in Google Cloud, and two of them |
| `h100x256` | 256 GPUs in 32 nodes of 8 |
| `v5p`, `h100` | as many slices and devices as the mesh has |
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.hardware import DeviceKind, device_kind

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
    """The devices to plan for.

    Attributes:
      kind: Kind of device; None for the devices of this machine.
      num_devices: Devices of all slices together; None to take as many as the mesh has.
      num_slices: Number of TPU slices or GPU nodes, each connected by a fast network.
      topology: Chips of a TPU slice along each dimension; empty for other devices.
    """

    kind: DeviceKind | None
    num_devices: int | None = None
    num_slices: int = 1
    topology: tuple[int, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether the target is the devices of this machine."""
        return self.kind is None

    def describe(self) -> str:
        """Return the text that `parse_target` reads."""
        if self.kind is None:
            return HERE
        if self.topology:
            slices = f"*{self.num_slices}" if self.num_slices > 1 else ""
            return f"{self.kind.name}:{'x'.join(map(str, self.topology))}{slices}"
        return self.kind.name + (f"x{self.num_devices}" if self.num_devices else "")


def parse_target(text: str) -> Target:
    """Read the text of `--target`.

    Raises:
      UsageError: The form, the kind of device or the number of devices does not exist.
    """
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
    """Return a target of a known kind with the number of devices that a mesh has.

    Args:
      target: Target without a number of devices.
      per_slice: Devices of the mesh within a slice.
      num_slices: Slices that the mesh spans.

    Raises:
      UsageError: No slice has so many chips, or the devices fill no whole nodes.
    """
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
