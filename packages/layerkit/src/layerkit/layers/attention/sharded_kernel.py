"""A fused kernel on each device's share of rows and heads.

A kernel is opaque to the compiler, which would gather all rows on every device to call it.
`on_each_device` maps it over the mesh by hand: queries keep their rows, heads and part of the
length; keys and values keep their rows and heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.layers.masks import AttentionMask
from layerkit.sharding import BoundSharding

QUERY_AXES = ("batch", "length", "act_heads", None)


def key_axes(num_kv_heads: int) -> tuple[str | None, ...]:
    """Logical axes of whole rows of keys or values; a single head is on every device."""
    return ("batch", None, "act_kv_heads" if num_kv_heads > 1 else None, None)


def on_each_device(
    kernel: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    sharding: BoundSharding | None,
    mask: AttentionMask | None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    prepare: Callable[[], Any] | None = None,
    **options: Any,
) -> jax.Array:
    """Runs `kernel(query, key, value, mask=…, …)` on each device's share.

    Args:
      kernel: A fused attention.
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      sharding: The model's; without a mesh, the kernel runs as it is.
      mask: Which query may attend which key.
      sinks: `[heads]`, for kernels that know them.
      bias: `[batch or 1, heads or 1, queries, keys]`, for kernels that know one.
      prepare: Makes the `kernel` argument of splash attention, of which each device gets its part.
      options: Passed on.

    Returns:
      `[batch, queries, heads, value_dim]`.
    """
    arrays = {"mask": mask, "sinks": sinks, "bias": bias}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    kernel = functools.partial(kernel, **({"mask": None} if mask is None else {}), **options)
    if sharding is None or sharding.mesh is None or sharding.mesh.size == 1:
        return kernel(query, key, value, **arrays)
    if mask is not None:
        arrays["mask"] = _for_shares(mask, query.shape[0], sharding)
    if prepare is not None:
        arrays["kernel"] = prepare()
    query_spec, key_spec = sharding.spec(QUERY_AXES), sharding.spec(key_axes(key.shape[2]))
    mapped = jax.shard_map(
        lambda query, key, value, arrays: kernel(query, key, value, **arrays),
        mesh=sharding.mesh,
        in_specs=(query_spec, key_spec, key_spec, _specs(arrays, sharding)),
        out_specs=query_spec,
        check_vma=False,  # a kernel does not tell over which axes its result varies
    )
    read: jax.Array = mapped(query, key, value, arrays)
    return read


def split_obstacle(query: Any, key: Any, sharding: BoundSharding) -> str:
    """Why `on_each_device` cannot share out such queries and keys; "" if it can.

    Args:
      query: `[batch, queries, heads, head_dim]`; only its shape is read.
      key: `[batch, keys, kv_heads, head_dim]`; likewise.
      sharding: The model's.
    """
    if sharding.mesh is None:
        return ""
    try:
        heads = sharding.spec(QUERY_AXES, shape=query.shape, owner="queries")[2]
        kv_heads = sharding.spec(key_axes(key.shape[2]), shape=key.shape, owner="keys")[2]
    except ValueError as error:
        return str(error)
    if heads != kv_heads and key.shape[2] > 1:
        return f"heads are split over mesh axes {heads} and kv_heads over {kv_heads}"
    return ""


def _for_shares(mask: AttentionMask, batch: int, sharding: BoundSharding) -> AttentionMask:
    """The mask with an entry for each row, no longer in row order if a device has a later part."""
    mask = jax.tree.map(lambda mark: jnp.broadcast_to(mark, (batch, *mark.shape[1:])), mask)
    in_row_order = mask.in_row_order and not sharding.is_split("length")
    return dataclasses.replace(mask, in_row_order=in_row_order)


def _specs(arrays: dict[str, Any], sharding: BoundSharding) -> dict[str, Any]:
    specs: dict[str, Any] = {}
    if "mask" in arrays:
        mask = arrays["mask"]
        queries, keys = sharding.spec(("batch", "length")), sharding.spec(("batch", None))
        has_segments = mask.query_segments is not None
        specs["mask"] = dataclasses.replace(
            mask,
            query_positions=queries,
            key_positions=keys,
            query_segments=queries if has_segments else None,
            key_segments=keys if has_segments else None,
        )
    if "sinks" in arrays:
        specs["sinks"] = sharding.spec(("act_heads",))
    if "bias" in arrays:
        rows, heads, *_ = arrays["bias"].shape
        names = ("batch" if rows > 1 else None, "act_heads" if heads > 1 else None)
        specs["bias"] = sharding.spec((*names, "length", None))
    if "kernel" in arrays:
        layout = sharding.sharding((None, "length"))
        specs["kernel"] = arrays["kernel"].manual_sharding_spec(layout)
    return specs
