"""The devices that a plan is compiled for, which this machine need not have.

The CPU backend simulates any number of devices. The compilers of TPUs and GPUs come with packages
from PyPI (libtpu, JAX's CUDA plugin) and work from a description of the machine.
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

from layerkit.errors import pip_install
from layerkit_runner.distributed.devices import use_cpu_without_accelerators
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.partitioning.mesh import num_mesh_devices
from layerkit_runner.tools.plan.hardware import (
    DeviceKind,
    Target,
    counted,
    kind_of_device,
    parse_target,
    target_config,
)

_FORCED_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")

# Without these libtpu queries the machine for its TPU, and locks it against other processes. A
# plan runs nothing on a TPU.
_TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
_TPU_NAMES = {"v7x": "tpu7x"}
# libtpu ends the process for an unknown flag.
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
    """Return the target that flags ask for, completed from the mesh, which may not fit it.

    Args:
      partitioner: Partitioner, whose mesh gives the number of devices if its sizes are set.
      target: `--target`; None for simulated CPU devices.
      num_devices: `--num_devices`.
      default: Number of devices if neither the flags nor the mesh give one.

    Raises:
      UsageError: The target is unknown, or the flags contradict each other.
    """
    asked = parse_target("cpu" if target is None else target)
    has_number = asked.kind is None or asked.num_devices is not None
    if num_devices is not None and has_number and num_devices != asked.num_devices:
        expected = f"no number beside --target={target}"
        raise UsageError(field="--num_devices", value=num_devices, expected=expected)
    if (kind := asked.kind) is None:
        return asked
    dcn = max(1, math.prod(getattr(partitioner, "dcn_mesh_shape", None) or ()))
    if asked.num_devices is None:
        mesh_size = num_mesh_devices(partitioner)
        mesh_size = default if mesh_size is None else max(1, mesh_size)
        asked = counted(kind, num_devices or mesh_size)
    # Simulated slices are those of the mesh.
    return dataclasses.replace(asked, num_slices=dcn) if kind.platform == "cpu" else asked


def start_simulated(
    partitioner: Partitioner, *, num_devices: int | None = None, default: int = 1
) -> list[jax.Device]:
    """Start a partitioner on simulated devices; see `planned_target` for their number."""
    devices = target_devices(planned_target(partitioner, num_devices=num_devices, default=default))
    partitioner.start(devices)
    return devices


def target_devices(target: Target) -> list[jax.Device]:
    """Return the devices of a target, slice by slice."""
    if target.kind is None:
        use_cpu_without_accelerators()
        return jax.devices()
    assert target.num_devices is not None, target
    if target.kind.platform == "cpu":
        return simulated_devices(target.num_devices)
    jax.config.update("jax_platforms", "cpu")  # touches no accelerator of this machine
    if target.kind.platform == "tpu":
        return _tpu_devices(target, target.kind)
    return _gpu_devices(target, target.kind)


def described_kind(target: Target, devices: Sequence[jax.Device]) -> DeviceKind:
    """Return the figures of a target's devices; devices of this machine report their memory."""
    if target.kind is not None:
        return target.kind
    device = devices[0]
    kind = kind_of_device(device.device_kind, platform=device.platform)
    stats = (device.memory_stats() or {}) if device.platform != "cpu" else {}
    if (limit := stats.get("bytes_limit")) is None:
        return kind
    # The limit of the allocator is all for the program.
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
            f"libtpu does not support the slice: {error}", owner=f"--target={target.describe()}"
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
        raise UsageError(str(error), owner=f"--target={target.describe()}") from None
    return list(described.devices)


def _not_installed(target: Target, what: str, extra: str) -> UsageError:
    return UsageError(
        field="--target",
        value=target.describe(),
        expected=f"{what}, to be installed; it needs no such device",
        hint=pip_install("layerkit-runner", extra),
    )


def simulated_devices(count: int) -> list[jax.Device]:
    """Return `count` simulated CPU devices, which are only compiled for.

    This works before JAX is first used in a process; after that, its CPU devices are fixed.
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
            field="number of simulated devices",
            value=count,
            expected=f"at most {len(devices)}, with which JAX has started in this process",
            hint="Plan in a separate process.",
        )
    return devices[:count]
