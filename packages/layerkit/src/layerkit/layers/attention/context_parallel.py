"""Attention over rows that are split over devices (context parallelism).

A row too long for one device is split where the rule of `length` names a mesh axis, and every
other layer works on its part alone. Attention needs the keys of the other parts, in one of two
ways:

- `all_gather`: each device takes all keys and values of its rows and keeps its queries (as in
  Llama 3; arXiv:2407.21783, section 3.3.2). Everything that attention does works so. Memory for
  keys and values, and for logits unless a fused kernel runs, grows with the whole length.
- `ring`: keys and values go round, one part at a time, and each device adds up what its queries
  read with a running maximum and sum (Liu et al., 2023, arXiv:2310.01889). No device ever holds
  more than two parts of them, nor more logits than those of its queries with one part; the
  backward pass goes round again and computes them anew.

In a causal ring the devices with early parts have little to do and wait for the last one, which
sees everything: it takes the time of attention without a causal mask. A window of a causal mask in
row order stops the ring as soon as all parts in reach have passed.
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

from layerkit.layers.attention.sharded_kernel import QUERY_AXES, key_axes, split_obstacle
from layerkit.layers.attention.xla import MASKED_LOGIT
from layerkit.layers.losses import soft_cap
from layerkit.layers.masks import AttentionMask, row_positions
from layerkit.near_names import near_names
from layerkit.sharding import BoundSharding

CONTEXT_PARALLEL_NAMES = ("all_gather", "ring")


def check_context_parallel(name: str, *, owner: str = "") -> None:
    """Raises ValueError for a name that is not in `CONTEXT_PARALLEL_NAMES`; says whose it is."""
    if name not in CONTEXT_PARALLEL_NAMES:
        where = f"{owner}: " if owner else ""
        raise ValueError(
            f"{where}context_parallel={name!r} is not a way of context parallelism"
            f"{near_names(str(name), CONTEXT_PARALLEL_NAMES)}"
            f" Ways: {', '.join(CONTEXT_PARALLEL_NAMES)}."
        )


def num_length_parts(sharding: BoundSharding) -> int:
    """Over how many devices the rule of `length` splits a row."""
    if not sharding.is_split("length"):
        return 1
    assert sharding.mesh is not None
    axes = sharding.spec(("length",))[0]
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(sharding.mesh.shape[axis] for axis in names)


def gather_keys(
    query: jax.Array, key: jax.Array, value: jax.Array, sharding: BoundSharding
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lays queries out over the length, and keys and values whole on each device.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      sharding: The model's.

    Returns:
      The three, with the same shapes and values.

    Raises:
      ValueError: queries that cannot be split evenly.
    """
    sharding.spec(("length",), shape=query.shape[1:2], owner="queries")
    whole = key_axes(key.shape[2])
    query = sharding.constrain(query, QUERY_AXES)
    return query, sharding.constrain(key, whole), sharding.constrain(value, whole)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """What the ring is compiled for."""

    sharding: BoundSharding
    has_one_kv_head: bool
    num_devices: int
    num_steps: int
    scale: float
    logit_cap: float | None

    def spec(self, *names: str | None) -> PartitionSpec:
        """The specification of an array; where there is one key head, groups are split instead."""
        logical = {"kv_heads": "act_kv_heads", "group": None}
        if self.has_one_kv_head:
            logical = {"kv_heads": None, "group": "act_heads"}
        return self.sharding.spec([name and logical.get(name, name) for name in names])

    @property
    def queries(self) -> PartitionSpec:
        """Of `[batch, queries, kv_heads, group, head_dim]`."""
        return self.spec("batch", "length", "kv_heads", "group", None)

    @property
    def keys(self) -> PartitionSpec:
        """Of `[batch, keys, kv_heads, head_dim]`."""
        return self.spec("batch", "length", "kv_heads", None)

    @property
    def numbers(self) -> PartitionSpec:
        """Of what is one number per query, `[batch, kv_heads, group, queries]`."""
        return self.spec("batch", "kv_heads", "group", "length")

    def marks(self, mask: AttentionMask) -> Any:
        """Of the arrays of a mask."""
        return jax.tree.map(lambda _: self.spec("batch", "length"), mask)

    def passed_on(self, tree: Any, *, by: int = 1) -> Any:
        """What lay `by` devices before this one."""
        axes, count = self.spec("length")[0], self.num_devices
        pairs = [(i, (i + by) % count) for i in range(count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, pairs), tree)

    def on_each_part(self, f: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Any:
        """`f` on each device's rows, heads and part of the length."""
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
    """Attention while keys and values go round the devices that share a row.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: Which query may attend which key; None for all.
      scale: Multiplies the products of queries and keys.
      sharding: The model's; its rule of `length` tells the mesh axes of the ring.
      sinks: `[heads]`, a logit per head that takes probability and gives nothing.
      logit_cap: Squeezes the logits into ±logit_cap.

    Returns:
      `[batch, queries, heads, value_dim]` in the dtype of `value`; 0 for a query that sees no key.

    Raises:
      ValueError: queries or keys that cannot be split evenly, or differently split heads.
    """
    obstacle = split_obstacle(query, key, sharding)
    if obstacle:
        raise ValueError(obstacle)
    sharding.spec(("length",), shape=key.shape[1:2], owner="keys")
    batch, count = query.shape[0], num_length_parts(sharding)
    if mask is None:
        queries, keys = (row_positions(batch, x.shape[1]) for x in (query, key))
        mask = AttentionMask(queries, keys)
    mask = jax.tree.map(lambda mark: jnp.broadcast_to(mark, (batch, *mark.shape[1:])), mask)
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
    part = keys // count
    return min(count, 1 + -(-(mask.window - 1) // part))


# Queries come as [batch, queries, kv_heads, group, head_dim]; what is one number per query, as
# [batch, kv_heads, group, queries].
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _Ring, query: Any, key: Any, value: Any, sinks: Any, mask: Any) -> jax.Array:
    return _ring_forward(ring, query, key, value, sinks, mask)[0]


def _ring_forward(
    ring: _Ring, query: Any, key: Any, value: Any, sinks: Any, mask: Any
) -> tuple[jax.Array, Any]:
    forward = ring.on_each_part(
        functools.partial(_forward_part, ring),
        in_specs=(
            ring.queries,
            ring.keys,
            ring.keys,
            None if sinks is None else ring.spec("kv_heads", "group"),
            ring.marks(mask),
        ),
        out_specs=(ring.queries, ring.numbers),
    )
    read, log_sum = forward(query, key, value, sinks, mask)
    return read, (query, key, value, sinks, mask, read, log_sum)


def _ring_backward(ring: _Ring, kept: Any, read_gradient: jax.Array) -> Any:
    query, key, value, sinks, mask, read, log_sum = kept
    products = read.astype(jnp.float32) * read_gradient.astype(jnp.float32)
    # What the softmax takes from each of a query's gradients.
    common = jnp.moveaxis(products.sum(axis=-1), 1, 3)
    backward = ring.on_each_part(
        functools.partial(_backward_part, ring),
        in_specs=(
            ring.queries,
            ring.keys,
            ring.keys,
            ring.queries,
            ring.numbers,
            ring.numbers,
            ring.marks(mask),
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


def _forward_part(
    ring: _Ring, query: Any, key: Any, value: Any, sinks: Any, mask: AttentionMask
) -> tuple[jax.Array, jax.Array]:
    batch, queries, kv_heads, group, _ = query.shape
    numbers = (batch, kv_heads, group, queries)
    if sinks is None:
        largest, total = jnp.full(numbers, MASKED_LOGIT, jnp.float32), jnp.zeros(numbers)
    else:
        largest, total = jnp.broadcast_to(sinks[None, :, :, None], numbers), jnp.ones(numbers)
    read = jnp.zeros((*numbers, value.shape[-1]), jnp.float32)

    def see(state: Any, part: Any) -> Any:
        read, largest, total = state
        k, v, marks = part
        logits, allowed = _logits(ring, query, k, dataclasses.replace(mask, **marks))
        new_largest = jnp.maximum(largest, logits.max(axis=-1))
        weights = jnp.where(allowed, jnp.exp(logits - new_largest[..., None]), 0.0)
        shrink = jnp.exp(largest - new_largest)
        gain = _product("bngqk,bknd->bngqd", weights.astype(v.dtype), v)
        total = total * shrink + weights.sum(axis=-1)
        return read * shrink[..., None] + gain, new_largest, total

    def step(carry: Any, _: None) -> Any:
        state, part = carry
        part = ring.passed_on(part)
        return (see(state, part), part), None

    part = key, value, _key_marks(mask)
    state = see((read, largest, total), part)
    (state, _), _ = jax.lax.scan(step, (state, part), length=ring.num_steps - 1)
    read, largest, total = state
    total = jnp.where(total == 0.0, 1.0, total)  # sees no key, and has read nothing
    read = jnp.moveaxis(read / total[..., None], 3, 1).astype(value.dtype)
    return read, largest + jnp.log(total)


def _backward_part(
    ring: _Ring,
    query: Any,
    key: Any,
    value: Any,
    read_gradient: Any,
    log_sum: Any,
    common: Any,
    mask: AttentionMask,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def see(query_total: Any, part: Any) -> Any:
        k, v, marks, key_total, value_total = part
        logits, allowed = _logits(ring, query, k, dataclasses.replace(mask, **marks))
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
        return query_total, (k, v, marks, key_total, value_total)

    def step(carry: Any, _: None) -> Any:
        query_total, part = carry
        return see(query_total, ring.passed_on(part)), None

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    query_total, key_total, value_total = zeros
    carry = see(query_total, (key, value, _key_marks(mask), key_total, value_total))
    (query_total, part), _ = jax.lax.scan(step, carry, length=ring.num_steps - 1)
    # The sums have gone round with their keys, and go home.
    totals = ring.passed_on(part[3:], by=1 - ring.num_steps)
    axes = ring.spec("group")[0]
    if axes is not None:  # each device has some of the query heads that read the one key head
        totals = jax.lax.psum(totals, axes)
    key_total, value_total = totals
    return (
        query_total.astype(query.dtype),
        key_total.astype(key.dtype),
        value_total.astype(value.dtype),
    )


def _logits(ring: _Ring, query: Any, key: Any, mask: AttentionMask) -> tuple[jax.Array, jax.Array]:
    """Float32 `[batch, kv_heads, group, queries, keys]`, and which of the pairs are allowed."""
    logits = _product("bqngd,bknd->bngqk", query, key) * ring.scale
    allowed = mask.dense()[:, :, None]
    return jnp.where(allowed, soft_cap(logits, ring.logit_cap), MASKED_LOGIT), allowed


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _key_marks(mask: AttentionMask) -> dict[str, Any]:
    """What a mask knows of keys, which goes round with them."""
    marks = {"key_positions": mask.key_positions}
    for name in ("key_segments", "key_in_prefix"):
        if getattr(mask, name) is not None:
            marks[name] = getattr(mask, name)
    return marks
