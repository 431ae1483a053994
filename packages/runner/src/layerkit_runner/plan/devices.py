"""Which devices a plan is for, and simulated ones to compile it for.

A program is compiled for devices, not run on them, so the CPU backend can stand in for any number:
it says that it has as many, and XLA partitions the step over them as it would over real ones.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

import jax

from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import Partitioner

_TARGET = re.compile(r"cpu(?:x(\d+))?")
_FORCED_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")


def num_planned_devices(
    partitioner: Partitioner,
    *,
    target: str | None = None,
    num_devices: int | None = None,
    default: int = 1,
) -> int:
    """How many devices to plan for: those of the mesh where it has sizes, else as asked.

    Args:
      partitioner: Not started.
      target: What `--target` says, `cpu` or `cpuxN`.
      num_devices: What `--num_devices` says.
      default: Where none of them says how many.

    Raises:
      UsageError: a target that does not exist yet, or numbers that contradict each other.
    """
    asked = _asked(target, num_devices)
    needed = _mesh_size(partitioner)
    if asked is not None and asked[1] < 1:
        raise UsageError(f"{asked[0]}: a plan needs at least 1 device")
    if asked is not None and needed is not None and asked[1] != needed:
        raise UsageError(
            f"{asked[0]}, but the mesh of this experiment has {needed} devices"
            f" ({_sizes(partitioner)}).\nLeave {asked[0].partition('=')[0]} out, or give the mesh"
            " other sizes with --fdl.ICI_MESH_SHAPE=…"
        )
    return asked[1] if asked is not None else needed or default


def _asked(target: str | None, num_devices: int | None) -> tuple[str, int] | None:
    """The flag that says how many devices, and how many."""
    of_target = None if target is None else _devices_of_target(target)
    if num_devices is None:
        return None if of_target is None else (f"--target={target}", of_target)
    if of_target is not None and of_target != num_devices:
        raise UsageError(f"--target={target} and --num_devices={num_devices} contradict each other")
    return f"--num_devices={num_devices}", num_devices


def _devices_of_target(target: str) -> int | None:
    match = _TARGET.fullmatch(target)
    if match is None:
        raise UsageError(
            f"--target={target}: the targets that exist now are cpu (simulated devices, as many as"
            " the mesh or --num_devices says) and cpuxN (N of them, such as cpux8)"
        )
    return None if match[1] is None else int(match[1])


def _mesh_size(partitioner: Partitioner) -> int | None:
    """The product of the mesh's sizes; None where the partitioner takes the devices there are."""
    ici = getattr(partitioner, "ici_mesh_shape", None)
    if ici is None:
        return None
    dcn: Sequence[int] = getattr(partitioner, "dcn_mesh_shape", None) or ()
    return max(1, math.prod(ici) * math.prod(dcn))  # sizes below 1 are refused with the mesh


def _sizes(partitioner: Partitioner) -> str:
    fields = ("ici_mesh_shape", "dcn_mesh_shape")
    given = {field: getattr(partitioner, field, None) for field in fields}
    return " × ".join(f"{field}={list(shape)}" for field, shape in given.items() if shape)


def simulated_devices(count: int) -> list[jax.Device]:
    """`count` CPU devices, of which nothing is asked but to be compiled for.

    Works before JAX is first used in a process; after that, its CPU devices are those there are.

    Raises:
      UsageError: JAX was used before and has fewer.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has its devices already; they are counted below
    else:
        jax.config.update("jax_platforms", "cpu")
        # XLA refuses to be told the number in two ways.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = _FORCED_COUNT.sub("", flags).strip()
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UsageError(
            f"a plan for {count} devices needs a process of its own: in this one JAX has started"
            f" with {len(devices)} CPU device(s), and their number cannot change any more"
        )
    return devices[:count]
