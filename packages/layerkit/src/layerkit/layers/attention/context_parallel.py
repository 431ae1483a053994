"""Attention over rows that are split over devices (context parallelism).

If the rule of `length` names a mesh axis, each device holds a shard of every row. Other layers work
on their shard alone; attention needs the keys of the other shards:

- `all_gather`: each device gathers all keys and values of its rows and keeps its queries (as in
  Llama 3; arXiv:2407.21783, section 3.3.2). All options of attention are supported. Memory for
  keys and values, and for logits unless a fused kernel runs, grows with the whole length.
- `ring`: keys and values are passed around a ring of devices, one shard at a time, and each device
  accumulates its outputs with a running maximum and sum (Liu et al., 2023, arXiv:2310.01889). A
  device never holds more than two shards of keys and values, nor more logits than those of its
  queries with one shard. The backward pass sends them around again and recomputes the logits.

A causal ring takes the time of attention without a causal mask: devices with early shards wait for
the last one, which sees all keys. With a window, a causal mask and row order, the ring stops once
all shards within the window have passed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from layerkit.layers.attention.sharded_kernel import QUERY_AXES, check_split, key_axes
from layerkit.layers.attention.xla import MASKED_LOGIT
from layerkit.layers.losses import soft_cap
from layerkit.layers.masks import AttentionMask, row_positions
from layerkit.sharding import BoundSharding

CONTEXT_PARALLEL_NAMES = ("all_gather", "ring")


def num_length_shards(sharding: BoundSharding) -> int:
    """Return the number of devices over which the rule of `length` splits a row."""
    if not sharding.is_split("length"):
        return 1
    assert sharding.mesh is not None
    axes = sharding.spec(("length",))[0]
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(sharding.mesh.shape[axis] for axis in names)


def gather_keys(
    query: jax.Array, key: jax.Array, value: jax.Array, sharding: BoundSharding
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split queries over the length, and replicate keys and values over it.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      sharding: Sharding of the model.

    Returns:
      (query, key, value), with the same shapes and values.

    Raises:
      ConfigError: queries that cannot be split evenly.
    """
    sharding.spec(("length",), shape=query.shape[1:2], owner="queries")
    whole = key_axes(key.shape[2])
    query = sharding.constrain(query, QUERY_AXES)
    return query, sharding.constrain(key, whole), sharding.constrain(value, whole)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Static properties of a ring, for which it is compiled."""

    sharding: BoundSharding
    has_one_kv_head: bool
    num_devices: int
    num_steps: int
    scale: float
    logit_cap: float | None

    def spec(self, *names: str | None) -> PartitionSpec:
        """Return the spec of logical axes. With one key head, groups are split instead of heads."""
        logical = {"kv_heads": "act_kv_heads", "group": None}
        if self.has_one_kv_head:
            logical = {"kv_heads": None, "group": "act_heads"}
        return self.sharding.spec([name and logical.get(name, name) for name in names])

    @property
    def queries(self) -> PartitionSpec:
        """Spec of `[batch, queries, kv_heads, group, head_dim]`."""
        return self.spec("batch", "length", "kv_heads", "group", None)

    @property
    def keys(self) -> PartitionSpec:
        """Spec of `[batch, keys, kv_heads, head_dim]`."""
        return self.spec("batch", "length", "kv_heads", None)

    @property
    def per_query(self) -> PartitionSpec:
        """Spec of an array with one number per query, `[batch, kv_heads, group, queries]`."""
        return self.spec("batch", "kv_heads", "group", "length")

    def mask_specs(self, mask: AttentionMask) -> Any:
        """Return the specs of the arrays of a mask."""
        return jax.tree.map(lambda _: self.spec("batch", "length"), mask)

    def shift(self, tree: Any, *, by: int = 1) -> Any:
        """Return the arrays of the device that is `by` places before this one in the ring."""
        axes, count = self.spec("length")[0], self.num_devices
        pairs = [(i, (i + by) % count) for i in range(count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, pairs), tree)

    def shard_map(self, f: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Any:
        """Map `f` over the rows, heads and shard of the length of each device."""
        mesh = self.sharding.mesh
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: AttentionMask | None,
    scale: float,
    sharding: BoundSharding,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
) -> jax.Array:
    """Compute attention by passing keys and values around the devices that share a row.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: Mask of the (query, key) pairs that may attend; None for all pairs.
      scale: Factor of the products of queries and keys.
      sharding: Sharding of the model; its rule of `length` names the mesh axes of the ring.
      sinks: `[heads]`, a logit per head that takes probability and adds no value.
      logit_cap: Bound of the logits, which tanh squeezes into ±logit_cap; None for no bound.

    Returns:
      `[batch, queries, heads, value_dim]` in the dtype of `value`; 0 for a query that sees no key.

    Raises:
      ConfigError: queries or keys that cannot be split evenly, or heads and kv_heads that are split
        over different mesh axes.
    """
    check_split(query, key, sharding)
    sharding.spec(("length",), shape=key.shape[1:2], owner="keys")
    batch, count = query.shape[0], num_length_shards(sharding)
    if mask is None:
        queries, keys = (row_positions(batch, x.shape[1]) for x in (query, key))
        mask = AttentionMask(queries, keys)
    mask = jax.tree.map(lambda array: jnp.broadcast_to(array, (batch, *array.shape[1:])), mask)
    assert mask is not None
    ring = _Ring(
        sharding=sharding,
        has_one_kv_head=key.shape[2] == 1,
        num_devices=count,
        num_steps=_num_steps(mask, query.shape[1], key.shape[1], count),
        scale=scale,
        logit_cap=logit_cap,
    )
    *leading, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    grouped = query.reshape(*leading, kv_heads, heads // kv_heads, head_dim)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, heads // kv_heads)
    read = _ring(ring, grouped, key, value, sinks, mask)
    return read.reshape(*leading, heads, value_dim)


def _num_steps(mask: AttentionMask, queries: int, keys: int, count: int) -> int:
    in_order = mask.in_row_order and mask.causal and queries == keys
    if mask.window is None or not in_order or mask.key_in_prefix is not None:
        return count
    shard = keys // count
    return min(count, 1 + -(-(mask.window - 1) // shard))


# Queries have the shape [batch, queries, kv_heads, group, head_dim]; arrays with one number per
# query have the shape [batch, kv_heads, group, queries].
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _Ring, query: Any, key: Any, value: Any, sinks: Any, mask: Any) -> jax.Array:
    return _ring_forward(ring, query, key, value, sinks, mask)[0]


def _ring_forward(
    ring: _Ring, query: Any, key: Any, value: Any, sinks: Any, mask: Any
) -> tuple[jax.Array, Any]:
    forward = ring.shard_map(
        functools.partial(_forward_shard, ring),
        in_specs=(
            ring.queries,
            ring.keys,
            ring.keys,
            None if sinks is None else ring.spec("kv_heads", "group"),
            ring.mask_specs(mask),
        ),
        out_specs=(ring.queries, ring.per_query),
    )
    read, log_sum = forward(query, key, value, sinks, mask)
    return read, (query, key, value, sinks, mask, read, log_sum)


def _ring_backward(ring: _Ring, residuals: Any, read_gradient: jax.Array) -> Any:
    query, key, value, sinks, mask, read, log_sum = residuals
    products = read.astype(jnp.float32) * read_gradient.astype(jnp.float32)
    # The softmax subtracts this number from each of a query's gradients.
    common = jnp.moveaxis(products.sum(axis=-1), 1, 3)
    backward = ring.shard_map(
        functools.partial(_backward_shard, ring),
        in_specs=(
            ring.queries,
            ring.keys,
            ring.keys,
            ring.queries,
            ring.per_query,
            ring.per_query,
            ring.mask_specs(mask),
        ),
        out_specs=(ring.queries, ring.keys, ring.keys),
    )
    gradients = backward(query, key, value, read_gradient, log_sum, common, mask)
    sinks_gradient = None
    if sinks is not None:
        weight = jnp.exp(sinks[None, :, :, None] - log_sum)
        sinks_gradient = -(weight * common).sum(axis=(0, 3))
    return *gradients, sinks_gradient, None


_ring.defvjp(_ring_forward, _ring_backward)


def _forward_shard(
    ring: _Ring, query: Any, key: Any, value: Any, sinks: Any, mask: AttentionMask
) -> tuple[jax.Array, jax.Array]:
    batch, queries, kv_heads, group, _ = query.shape
    per_query = (batch, kv_heads, group, queries)
    if sinks is None:
        largest, total = jnp.full(per_query, MASKED_LOGIT, jnp.float32), jnp.zeros(per_query)
    else:
        largest, total = jnp.broadcast_to(sinks[None, :, :, None], per_query), jnp.ones(per_query)
    read = jnp.zeros((*per_query, value.shape[-1]), jnp.float32)

    def attend(state: Any, shard: Any) -> Any:
        read, largest, total = state
        k, v, key_mask = shard
        logits, allowed = _logits(ring, query, k, dataclasses.replace(mask, **key_mask))
        new_largest = jnp.maximum(largest, logits.max(axis=-1))
        weights = jnp.where(allowed, jnp.exp(logits - new_largest[..., None]), 0.0)
        shrink = jnp.exp(largest - new_largest)
        gain = _product("bngqk,bknd->bngqd", weights.astype(v.dtype), v)
        total = total * shrink + weights.sum(axis=-1)
        return read * shrink[..., None] + gain, new_largest, total

    def step(carry: Any, _: None) -> Any:
        state, shard = carry
        shard = ring.shift(shard)
        return (attend(state, shard), shard), None

    shard = key, value, _key_arrays(mask)
    state = attend((read, largest, total), shard)
    (state, _), _ = jax.lax.scan(step, (state, shard), length=ring.num_steps - 1)
    read, largest, total = state
    total = jnp.where(total == 0.0, 1.0, total)  # The query sees no key, and `read` is 0.
    read = jnp.moveaxis(read / total[..., None], 3, 1).astype(value.dtype)
    return read, largest + jnp.log(total)


def _backward_shard(
    ring: _Ring,
    query: Any,
    key: Any,
    value: Any,
    read_gradient: Any,
    log_sum: Any,
    common: Any,
    mask: AttentionMask,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def attend(query_total: Any, shard: Any) -> Any:
        k, v, key_mask, key_total, value_total = shard
        logits, allowed = _logits(ring, query, k, dataclasses.replace(mask, **key_mask))
        weights = jnp.where(allowed, jnp.exp(logits - log_sum[..., None]), 0.0)
        change = _product("bqngd,bknd->bngqk", read_gradient, v) - common[..., None]
        change = change * weights * ring.scale
        if ring.logit_cap is not None:
            slope = 1.0 - jnp.square(logits / ring.logit_cap)
            change = jnp.where(allowed, change * slope, 0.0)
        change, weights = change.astype(k.dtype), weights.astype(v.dtype)
        query_total += _product("bngqk,bknd->bqngd", change, k)
        key_total += _product("bngqk,bqngd->bknd", change, query)
        value_total += _product("bngqk,bqngd->bknd", weights, read_gradient)
        return query_total, (k, v, key_mask, key_total, value_total)

    def step(carry: Any, _: None) -> Any:
        query_total, shard = carry
        return attend(query_total, ring.shift(shard)), None

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    query_total, key_total, value_total = zeros
    carry = attend(query_total, (key, value, _key_arrays(mask), key_total, value_total))
    (query_total, shard), _ = jax.lax.scan(step, carry, length=ring.num_steps - 1)
    # The sums were passed around with their keys; return them to the devices of these keys.
    totals = ring.shift(shard[3:], by=1 - ring.num_steps)
    axes = ring.spec("group")[0]
    if axes is not None:
        # Each device has some of the query heads that read the single key head.
        totals = jax.lax.psum(totals, axes)
    key_total, value_total = totals
    return (
        query_total.astype(query.dtype),
        key_total.astype(key.dtype),
        value_total.astype(value.dtype),
    )


def _logits(ring: _Ring, query: Any, key: Any, mask: AttentionMask) -> tuple[jax.Array, jax.Array]:
    """Return (float32 `[batch, kv_heads, group, queries, keys]`, mask of the allowed pairs)."""
    logits = _product("bqngd,bknd->bngqk", query, key) * ring.scale
    allowed = mask.dense()[:, :, None]
    return jnp.where(allowed, soft_cap(logits, ring.logit_cap), MASKED_LOGIT), allowed


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _key_arrays(mask: AttentionMask) -> dict[str, Any]:
    """Return the arrays of a mask that describe keys and are passed around with them."""
    names = ("key_positions", "key_segments", "key_in_prefix")
    arrays = {name: getattr(mask, name) for name in names}
    return {name: array for name, array in arrays.items() if array is not None}
