"""Execution of a fused kernel on each device's shard of rows and heads.

A kernel is opaque to the compiler, which would gather all rows on every device to call it.
`run_kernel_on_mesh` maps it over the mesh by `jax.shard_map`: queries stay split by rows, heads and
length; keys and values stay split by rows and heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base.sharding import BoundSharding
from layerkit.errors import ConfigError
from layerkit.ops.attention.distance_bias import DistanceBias, LogitBias
from layerkit.ops.attention.masks import AttentionMask

QUERY_AXES = ("batch", "length", "act_heads", None)


def key_axes(num_kv_heads: int) -> tuple[str | None, ...]:
    """Return the logical axes of whole rows of keys or values; a single head is replicated."""
    return ("batch", None, "act_kv_heads" if num_kv_heads > 1 else None, None)


def run_kernel_on_mesh(
    kernel: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    sharding: BoundSharding | None,
    mask: AttentionMask | None,
    sinks: jax.Array | None = None,
    bias: LogitBias | None = None,
    prepare: Callable[[], Any] | None = None,
) -> jax.Array:
    """Run `kernel(query, key, value, mask=…, …)` on the shard of each device.

    Args:
      kernel: Fused attention kernel.
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      sharding: Sharding of the model; without a mesh, the kernel is called directly.
      mask: Mask of the (query, key) pairs that may attend; None for all pairs.
      sinks: `[heads]`, for kernels that support attention sinks.
      bias: `[batch or 1, heads or 1, queries, keys]` or a bias by distance, for kernels that
        support it.
      prepare: Function that makes the `kernel` argument of splash attention; each device gets its
        shard of it.

    Returns:
      `[batch, queries, heads, value_dim]`.
    """
    arrays = {"mask": mask, "sinks": sinks, "bias": bias}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    if sharding is None or sharding.mesh is None or sharding.mesh.size == 1:
        return kernel(query, key, value, **arrays)
    if mask is not None:
        arrays["mask"] = _shardable_mask(mask, query.shape[0], sharding)
    if prepare is not None:
        arrays["kernel"] = prepare()
    query_spec, key_spec = sharding.spec(QUERY_AXES), sharding.spec(key_axes(key.shape[2]))
    mapped = jax.shard_map(
        lambda query, key, value, arrays: kernel(query, key, value, **arrays),
        mesh=sharding.mesh,
        in_specs=(query_spec, key_spec, key_spec, _specs(arrays, sharding)),
        out_specs=query_spec,
        check_vma=False,  # A kernel does not declare the axes over which its result varies.
    )
    read: jax.Array = mapped(query, key, value, arrays)
    return read


def split_key_heads(
    query: jax.Array, key: jax.Array, value: jax.Array, sharding: BoundSharding
) -> tuple[jax.Array, jax.Array, BoundSharding]:
    """Return keys and values whose heads can be split like query heads, and that sharding.

    The rules may split query heads alone, such as over more devices than there are key heads. A key
    head that several devices read is then repeated, so that each device has a copy.

    Args:
      query: `[batch, queries, heads, head_dim]`; only its shape is read.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      sharding: Sharding of the model; it is returned with the arrays as they are if its rules split
        key heads, or if one of the numbers of devices and of key heads does not divide the other.
    """
    heads, kv_heads, count = query.shape[2], key.shape[2], sharding.num_shards("act_heads")
    is_even = heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)
    if count == 1 or kv_heads == 1 or sharding.is_split("act_kv_heads") or not is_even:
        return key, value, sharding
    rules = sharding.rules.extend(act_kv_heads=sharding.split_axes("act_heads"))
    key, value = (jnp.repeat(x, max(1, count // kv_heads), axis=2) for x in (key, value))
    return key, value, BoundSharding(sharding.mesh, rules)


def find_split_problem(query: Any, key: Any, sharding: BoundSharding) -> str:
    """Return the message of the error that `check_split` raises; "" if it raises none."""
    try:
        check_split(query, key, sharding)
    except ConfigError as error:
        return str(error).rstrip(".")
    return ""


def check_split(query: Any, key: Any, sharding: BoundSharding) -> None:
    """Raise `ConfigError` unless `run_kernel_on_mesh` can split arrays of these shapes."""
    if sharding.mesh is None or sharding.mesh.size == 1:
        return
    heads = sharding.spec(QUERY_AXES, shape=query.shape, owner="queries")[2]
    kv_heads = sharding.spec(key_axes(key.shape[2]), shape=key.shape, owner="keys")[2]
    if heads != kv_heads and key.shape[2] > 1:
        expected = f"the mesh axes of act_heads, {heads!r}"
        raise ConfigError(field="mesh axes of act_kv_heads", value=kv_heads, expected=expected)


def _shardable_mask(mask: AttentionMask, batch: int, sharding: BoundSharding) -> AttentionMask:
    """Return the mask with an entry for each row. Shards of the length are not in row order."""
    mask = jax.tree.map(lambda array: jnp.broadcast_to(array, (batch, *array.shape[1:])), mask)
    in_row_order = mask.in_row_order and not sharding.is_split("length")
    return dataclasses.replace(mask, in_row_order=in_row_order)


def _specs(arrays: dict[str, Any], sharding: BoundSharding) -> dict[str, Any]:
    specs: dict[str, Any] = {}
    if "mask" in arrays:
        mask = arrays["mask"]
        queries, keys = sharding.spec(("batch", "length")), sharding.spec(("batch", None))
        specs["mask"] = dataclasses.replace(
            mask,
            **dict.fromkeys(mask.query_arrays(), queries),
            **dict.fromkeys(mask.key_arrays(), keys),
        )
    if "sinks" in arrays:
        specs["sinks"] = sharding.spec(("act_heads",))
    bias = arrays.get("bias")
    if isinstance(bias, DistanceBias):
        by_distance = sharding.spec((None, "act_heads", None))
        specs["bias"] = jax.tree.map(lambda _: by_distance, bias)
    elif bias is not None:
        rows, heads, *_ = bias.shape
        names = ("batch" if rows > 1 else None, "act_heads" if heads > 1 else None)
        specs["bias"] = sharding.spec((*names, "length", None))
    if "kernel" in arrays:
        layout = sharding.sharding((None, "length"))
        specs["kernel"] = arrays["kernel"].manual_sharding_spec(layout)
    return specs
