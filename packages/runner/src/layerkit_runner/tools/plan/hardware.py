"""The devices that plans are made for, with the figures of hardware.toml; and `--target`.

docs/planning.md has a table of the forms of `--target`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerkit.config.checks import require
from layerkit_runner.distributed.devices import GPU_MEMORY_SHARE
from layerkit_runner.errors import UsageError
from layerkit_runner.observers.speed import peak_flops

_TABLES = tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A kind of device; None for unknown figures.

    `pattern` matches `jax.Device.device_kind` of all devices with these figures. Of `memory_bytes`,
    a program cannot have `reserved_bytes`. Bandwidths are in bytes/s: of the memory, within a slice
    or node (ICI, NVLink), and between them (DCN, InfiniBand). `peak_flops` is for dense bfloat16,
    and `speedups` are the peaks of narrower dtypes over it.
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
    speedups: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peak_flops: float | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Look up the peak FLOP/s, which `dataclasses.asdict` includes."""
        object.__setattr__(self, "peak_flops", peak_flops(self.device_kind))

    @property
    def usable_bytes(self) -> int | None:
        """Memory available to programs."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserved_bytes


def _make_kind(name: str, figures: dict[str, Any]) -> DeviceKind:
    values = {key: value for key, value in figures.items() if key != "chip"}
    kind = DeviceKind(name, **{"pattern": values["device_kind"], **values})
    if kind.platform != "gpu" or kind.memory_bytes is None:
        return kind
    # The rest is for CUDA's context, NCCL's buffers and libraries, as in a run.
    reserved = round((1 - GPU_MEMORY_SHARE) * kind.memory_bytes)
    return dataclasses.replace(kind, reserved_bytes=reserved)


KINDS = tuple(_make_kind(name, figures) for name, figures in _TABLES["kinds"].items())


def device_kind(name: str) -> DeviceKind:
    """Return the kind with a name, in any case.

    Raises:
      UsageError: The name is unknown.

    >>> device_kind("h100").devices_per_host
    8
    """
    kinds = {kind.name: kind for kind in KINDS}
    if match := kinds.get(name.lower()):
        return match
    raise UsageError(field="kind of device", value=name, choices=kinds)


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
        **_TABLES["every_chip"],
        **_TABLES["chips"][_TABLES["kinds"][kind.name]["chip"]],
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

_FORM = re.compile(
    r"(?P<kind>[a-z]\w*?(?:-40gb)?)"
    r"(?:x(?P<count>[1-9]\d*)|:(?P<sizes>[1-9]\d*(?:x[1-9]\d*)*)(?:\*(?P<slices>[1-9]\d*))?)?"
)

# Slices of these are three-dimensional.
_THREE_DIMENSIONS = ("v4", "v5p", "v7x")
_DEVICES_PER_CHIP = {"v7x": 2}

_FORMS = (
    "cpux8 (simulated), here (the devices of this machine), v5p:8x8x4 (a TPU slice), v5e:4x4*2 (two"
    " slices) or h100x256 (GPUs in nodes of 8)"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices to plan for: those of this machine if `kind` is None.

    `num_devices` is None for as many CPU devices or GPUs as the mesh has. A slice is a TPU slice of
    the chips `topology`, or a node of GPUs.
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
    match = _FORM.fullmatch(text)
    if match is None:
        raise UsageError(expected=_FORMS)
    kind = device_kind(match["kind"])
    if match["sizes"] is not None:
        if kind.platform != "tpu":
            expected = f"a number of devices, such as {kind.name}x8, and no topology"
            raise UsageError(expected=expected)
        sizes = tuple(map(int, match["sizes"].split("x")))
        return _slices(kind, sizes, int(match["slices"] or 1))
    if kind.platform == "tpu":
        raise UsageError(expected=f"the shape of a TPU slice, such as {_example(kind)}")
    return Target(kind) if match["count"] is None else counted(kind, int(match["count"]))


def _example(kind: DeviceKind) -> str:
    return f"{kind.name}:{'4x4x4' if kind.name in _THREE_DIMENSIONS else '4x4'}"


def counted(kind: DeviceKind, count: int) -> Target:
    """Return a target of CPU devices, or of GPUs in full nodes."""
    per_node = kind.devices_per_host
    if per_node is None or count <= per_node:
        return Target(kind, count)
    field = f"number of {kind.name} devices"
    expected = f"1 to {per_node}, or full nodes of {per_node}"
    require(count % per_node == 0, None, field, count, expected, UsageError)
    return Target(kind, count, num_slices=count // per_node)


def _slices(kind: DeviceKind, topology: tuple[int, ...], num_slices: int) -> Target:
    dimensions = 3 if kind.name in _THREE_DIMENSIONS else 2
    if len(topology) != dimensions:
        raise UsageError(expected=f"{dimensions} sizes of a slice, as in {_example(kind)}")
    devices = math.prod(topology) * _DEVICES_PER_CHIP.get(kind.name, 1)
    return Target(kind, devices * num_slices, num_slices, topology)
