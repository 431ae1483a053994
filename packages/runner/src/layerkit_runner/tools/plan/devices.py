"""The devices that a plan is compiled for, which need not be here.

A program is compiled for devices, not run on them. The CPU backend simulates any number of devices.
The compilers of TPUs and GPUs come with packages from PyPI (libtpu, JAX's CUDA plugin) and work
from a description of the machine.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.partitioning.mesh import flags_for
from layerkit_runner.tools.plan.hardware import DeviceKind, kind_of_device, target_config
from layerkit_runner.tools.plan.targets import Target, parse_target, sized

_FORCED_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")

# libtpu asks the machine what it is unless it is told, and wants to be the only one on it; nothing
# here runs on a TPU.
_TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
_TPU_NAMES = {"v7x": "tpu7x"}
# libtpu ends the process when it meets a flag that it does not know.
_FLAGS_OF_OTHERS = re.compile(r"--xla_(?:cpu|gpu|force_host)_\w+(?:=\S*)?")
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# XLA warns of programs that leave less than a fifth of the memory free, which the plan reports
# anyway. "1", warnings, is JAX's own default; "2" is errors.
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def planned_target(
    partitioner: Partitioner,
    *,
    target: str | None = None,
    num_devices: int | None = None,
    default: int = 1,
) -> Target:
    """Return the target that flags ask for, completed from the mesh.

    Args:
      partitioner: Partitioner, not started.
      target: Value of `--target`; None for simulated CPU devices.
      num_devices: Value of `--num_devices`.
      default: Number of devices if neither flags nor mesh give one.

    Raises:
      UsageError: a target that does not exist, or numbers that contradict each other.
    """
    asked = parse_target("cpu" if target is None else target)
    if asked.kind is None:
        if num_devices is not None:
            raise UsageError(
                f"--target=here and --num_devices={num_devices} contradict each other: a plan for"
                " the devices of this machine takes all of them"
            )
        return asked
    count = asked.num_devices if num_devices is None else num_devices
    if asked.num_devices not in (None, count):
        raise UsageError(f"--target={target} and --num_devices={num_devices} contradict each other")
    if count is not None and count < 1:
        raise UsageError(f"--num_devices={count}: a plan needs at least 1 device")
    ici: Sequence[int] | None = getattr(partitioner, "ici_mesh_shape", None)
    dcn = max(1, math.prod(getattr(partitioner, "dcn_mesh_shape", None) or ()))
    needed = None if ici is None else max(1, math.prod(ici) * dcn)  # the mesh rejects sizes below 1
    if count is not None and needed not in (None, count):
        flag = f"--target={target}" if num_devices is None else f"--num_devices={count}"
        size = f" ({count} devices)" if asked.topology else ""
        other = f"write --target={asked.kind.name}" if num_devices is None else "leave it out"
        raise UsageError(
            f"{flag}{size}, but the mesh of this experiment has {needed} devices"
            f" ({_sizes(partitioner)}).\nFor these devices try"
            f" {_mesh_flags(partitioner, asked, count)}, or {other} for as many as it has"
        )
    # Slices are connected by another network than their chips, so a mesh must know of them.
    if asked.topology and dcn % asked.num_slices and (ici is not None or dcn > 1):
        raise UsageError(
            f"--target={asked.describe()} has {asked.num_slices} slice(s), but the mesh lies in"
            f" {dcn} ({_sizes(partitioner) or 'no dcn_mesh_shape'}).\nWith"
            f" {_slices_flag(partitioner, asked.num_slices)} and"
            " --fdl.partitioner.ici_mesh_shape=… for the chips of one slice it lies in as many"
        )
    if asked.num_devices is None:
        count = count or needed or default
        asked = sized(asked, per_slice=count // dcn or 1, num_slices=dcn)
    if asked.kind is not None and asked.kind.platform == "cpu":
        return dataclasses.replace(asked, num_slices=dcn)  # simulated slices are those of the mesh
    return asked


def num_planned_devices(
    partitioner: Partitioner, *, num_devices: int | None = None, default: int = 1
) -> int:
    """Return the number of simulated devices: that of the mesh if it has sizes, else as asked.

    Raises:
      UsageError: numbers that contradict each other.
    """
    found = planned_target(partitioner, num_devices=num_devices, default=default)
    assert found.num_devices is not None
    return found.num_devices


def _mesh_flags(partitioner: Partitioner, asked: Target, count: int) -> str:
    num_axes = len(getattr(partitioner, "mesh_axis_names", ("data",)))
    if asked.num_slices == 1:
        return flags_for(count, num_axes, getattr(partitioner, "dcn_mesh_shape", None))
    one_slice = flags_for(count // asked.num_slices, num_axes, None)
    return f"{one_slice} {_slices_flag(partitioner, asked.num_slices)}"


def _slices_flag(partitioner: Partitioner, num_slices: int) -> str:
    num_axes = len(getattr(partitioner, "mesh_axis_names", ("data",)))
    sizes = ",".join(map(str, [num_slices, *[1] * (num_axes - 1)]))
    return f"--fdl.partitioner.dcn_mesh_shape=[{sizes}]"


def _sizes(partitioner: Partitioner) -> str:
    fields = ("ici_mesh_shape", "dcn_mesh_shape")
    given = {field: getattr(partitioner, field, None) for field in fields}
    return " × ".join(f"{field}={list(shape)}" for field, shape in given.items() if shape)


def target_devices(target: Target) -> list[jax.Device]:
    """Return the devices of a target, slice by slice.

    Raises:
      UsageError: the compiler for them is not installed, or there is no such slice.
    """
    if target.kind is None:
        return jax.devices()
    assert target.num_devices is not None, target
    if target.kind.platform == "cpu":
        return simulated_devices(target.num_devices)
    jax.config.update("jax_platforms", "cpu")  # touches no accelerator of this machine
    if target.kind.platform == "tpu":
        return _tpu_devices(target, target.kind)
    return _gpu_devices(target, target.kind)


def described_kind(target: Target, devices: Sequence[jax.Device]) -> DeviceKind:
    """Return what is known of a target's devices; the devices here report their own memory."""
    if target.kind is not None:
        return target.kind
    device = devices[0]
    kind = kind_of_device(device.device_kind, platform=device.platform)
    stats = (device.memory_stats() or {}) if device.platform != "cpu" else {}
    if (limit := stats.get("bytes_limit")) is None:
        return kind
    # What the allocator was given is all for the program.
    return dataclasses.replace(kind, memory_bytes=limit, reserved_bytes=0)


def _tpu_devices(target: Target, kind: DeviceKind) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise _not_installed(target, "libtpu, the compiler of TPUs", "plan-tpu")
    from jax.experimental import topologies

    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["XLA_FLAGS"] = _FLAGS_OF_OTHERS.sub("", os.environ.get("XLA_FLAGS", "")).strip()
    name = f"{_TPU_NAMES.get(kind.name, kind.name)}:{'x'.join(map(str, target.topology))}"
    # Both TensorCores of a v4 chip as one device, as programs see them.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if kind.name == "v4" else {}
    if min(target.topology[:2]) == 1:  # less than the 2 × 2 chips of a host
        options["chips_per_host_bounds"] = [*(min(2, size) for size in target.topology[:2]), 1]
    try:
        described = topologies.get_topology_desc(
            name, platform="tpu", num_slices=target.num_slices, **options
        )
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(
            f"--target={target.describe()}: libtpu knows no such slice: {error}"
        ) from None
    return list(described.devices)


def _gpu_devices(target: Target, kind: DeviceKind) -> list[jax.Device]:
    if not any(importlib.util.find_spec(name) for name in _CUDA_PLUGINS):
        raise _not_installed(target, "JAX's CUDA plugin", "plan-cuda")
    from jax.experimental import topologies

    assert target.num_devices is not None
    if os.environ.get(_LOG_LEVEL, "1") == "1":
        os.environ[_LOG_LEVEL] = "2"
    per_node = target.num_devices // target.num_slices
    try:
        # Nodes × processes of a node × devices of a process.
        described = topologies.get_topology_desc(
            kind.name,
            platform="cuda",
            topology=f"{target.num_slices}x1x{per_node}",
            target_config=target_config(kind),
        )
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        raise UsageError(f"--target={target.describe()}: {error}") from None
    return list(described.devices)


def _not_installed(target: Target, what: str, extra: str) -> UsageError:
    return UsageError(
        f"--target={target.describe()} needs {what}, which is not installed. It works without"
        f" such a device: pip install 'layerkit-runner[{extra}]'"
    )


def simulated_devices(count: int) -> list[jax.Device]:
    """Return `count` simulated CPU devices, which are only compiled for.

    This works before JAX is first used in a process; after that, its CPU devices are fixed.

    Raises:
      UsageError: JAX was used before and has fewer devices.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has its devices already; they are counted below
    else:
        jax.config.update("jax_platforms", "cpu")  # touches no accelerator of this machine
        # XLA rejects two settings of the number of devices.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = _FORCED_COUNT.sub("", flags).strip()
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UsageError(
            f"a plan for {count} devices needs a process of its own: in this one JAX has started"
            f" with {len(devices)} CPU device(s), and their number cannot change any more"
        )
    return devices[:count]
