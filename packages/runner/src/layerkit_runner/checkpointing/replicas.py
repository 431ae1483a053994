"""Reading of replicated arrays by one process each, which sends them to the others.

A process reads the arrays that `assign` gives to its replica. No process waits for another then, so
all can agree on damaged files first. Afterwards `broadcast` sends the arrays over the network of
the devices. The replicas take turns, array by array, so that all of them read from storage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.base.sharding import HOST_MEMORY
from layerkit_runner.checkpointing.stored_state import LeafPath


@dataclasses.dataclass(frozen=True)
class Reading:
    """The replica that reads an array: its index along a mesh axis that does not split the array.

    Attributes:
      target: Shape, dtype and sharding of the array in all replicas.
      local: The same with the sharding within the replica; None in processes of other replicas.
    """

    target: Any
    axis: str
    local: Any

    def broadcast(self, read: jax.Array | None) -> jax.Array:
        """Wait for the array in all replicas, given that of the replica that has read it.

        All processes have to call it.
        """
        shape, sharding = self.target.shape, self.target.sharding
        parts = {} if read is None else {x.device: x.data[None] for x in read.addressable_shards}
        part_shape = (1, *sharding.shard_shape(shape))
        stacked = NamedSharding(sharding.mesh, PartitionSpec(self.axis, *sharding.spec))
        arrays = [
            parts[device]
            if device in parts
            else jnp.zeros(part_shape, self.target.dtype, device=device)
            for device in sharding.mesh.local_devices
        ]
        count = sharding.mesh.shape[self.axis]
        whole = jax.make_array_from_single_device_arrays((count, *shape), stacked, arrays)
        return jax.block_until_ready(_sum_of(sharding)(whole))


def assign(targets: Mapping[LeafPath, Any], *, in_turns: bool = True) -> dict[LeafPath, Reading]:
    """Return the readings of the arrays of which several processes hold replicas, by path.

    All processes have to call it with the same targets. Without `in_turns`, the first replica reads
    all arrays.
    """
    readings = {}
    for number, (path, target) in enumerate(targets.items()):
        if (axis := _replica_axis(target)) is None:
            continue
        mesh = target.sharding.mesh
        at, count = mesh.axis_names.index(axis), mesh.shape[axis]
        devices = np.take(mesh.devices, [number % count if in_turns else 0], axis=at)
        local = None
        if any(device.process_index == jax.process_index() for device in devices.flat):
            within = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
            sharding = NamedSharding(within, target.sharding.spec)
            local = jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=sharding)
        readings[path] = Reading(target, axis, local)
    return readings


def _replica_axis(target: Any) -> str | None:
    """Return a mesh axis along which other processes hold replicas of an array, if there is one.

    A process may hold several replicas, but not parts of some that it shares with others.
    """
    sharding = target.sharding
    if not isinstance(sharding, NamedSharding) or sharding.memory_kind == HOST_MEMORY:
        return None
    if not any(jnp.issubdtype(target.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        return None
    used = {
        name for part in sharding.spec for name in (part if isinstance(part, tuple) else [part])
    }
    mesh = sharding.mesh
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    for at, axis in enumerate(mesh.axis_names):
        replicas = {frozenset(part.flat) for part in np.moveaxis(processes, at, 0)}
        is_disjoint = sum(map(len, replicas)) == len(set().union(*replicas))
        if len(replicas) > 1 and is_disjoint and axis not in used:
            return axis
    return None


@functools.lru_cache
def _sum_of(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a function that adds an array and zeros, as bits: 0 plus -0.0 is another number."""

    def add(stacked: jax.Array) -> jax.Array:
        dtype = stacked.dtype
        bits = jax.lax.bitcast_convert_type(stacked, f"uint{8 * dtype.itemsize}")
        total = jnp.sum(bits, axis=0, dtype=bits.dtype)
        return jax.lax.bitcast_convert_type(total, dtype)

    return jax.jit(add, out_shardings=sharding)
