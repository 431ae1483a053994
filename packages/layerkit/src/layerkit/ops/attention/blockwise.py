"""Attention to a part of the keys as array code that holds the logits of one block at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.ops.attention.masks import MASKED_LOGIT, AttentionMask
from layerkit.ops.attention.pallas.kernel_blocks import FusedAttention
from layerkit.ops.soft_cap import soft_cap

# A block has a length between these limits that divides the part, or else the length of the part.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 64, 512


class BlockwiseAttention(FusedAttention):
    """A `layerkit.ops.attention.ring.PartAttention` for every platform, dtype and mask."""

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask
    ) -> tuple[jax.Array, jax.Array]:
        """Return outputs `[batch, queries, heads, dims]` and log-sum-exps; see `PartAttention`."""
        queries = _blocks(mask.query_arrays(), _grouped(query, key))
        keys = _blocks(mask.key_arrays(), key, value)

        def attend(block: Any) -> tuple[jax.Array, jax.Array]:
            query_mask, (q,) = block
            batch, length, kv_heads, group, _ = q.shape
            numbers = (batch, kv_heads, group, length)
            read = jnp.zeros((*numbers, value.shape[-1]), jnp.float32)
            largest = jnp.full(numbers, MASKED_LOGIT, jnp.float32)

            def step(state: Any, block: Any) -> Any:
                read, largest, total = state
                key_mask, (k, v) = block
                logits, allowed = self._logits(q, k, {**query_mask, **key_mask}, mask)
                new_largest = jnp.maximum(largest, logits.max(axis=-1))
                weights = jnp.where(allowed, jnp.exp(logits - new_largest[..., None]), 0.0)
                shrink = jnp.exp(largest - new_largest)
                gain = _product("bngqk,bknd->bngqd", weights.astype(v.dtype), v)
                total = total * shrink + weights.sum(axis=-1)
                return (read * shrink[..., None] + gain, new_largest, total), None

            state = read, largest, jnp.zeros(numbers, jnp.float32)
            (read, largest, total), _ = jax.lax.scan(step, state, keys)
            total = jnp.where(total == 0.0, 1.0, total)  # The query sees no key, and `read` is 0.
            read, log_sum = read / total[..., None], largest + jnp.log(total)
            return jnp.moveaxis(read, 3, 1), jnp.moveaxis(log_sum, 3, 1)

        read, log_sum = jax.lax.map(attend, queries)
        heads = query.shape[2]
        return _joined(read, heads), _joined(log_sum[..., None], heads)[..., 0]

    def gradients(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        out_gradient: jax.Array,
        log_sum: jax.Array,
        common: jax.Array,
        mask: AttentionMask,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the gradients `[batch, length, heads, dims]` of a part; see `PartAttention`."""
        per_query = (query, out_gradient, log_sum[..., None], common[..., None])
        queries = _blocks(mask.query_arrays(), *(_grouped(x, key) for x in per_query))
        keys = _blocks(mask.key_arrays(), key, value)

        def query_step(totals: Any, block: Any) -> Any:
            query_mask, (q, out_grad, *numbers) = block
            block_log_sum, block_common = (jnp.moveaxis(x, 1, 3) for x in numbers)

            def key_step(query_total: jax.Array, block: Any) -> Any:
                key_mask, (k, v) = block
                logits, allowed = self._logits(q, k, {**query_mask, **key_mask}, mask)
                weights = jnp.where(allowed, jnp.exp(logits - block_log_sum), 0.0)
                change = _product("bqngd,bknd->bngqk", out_grad, v) - block_common
                change = change * weights * self.scale
                if self.logit_cap is not None:
                    slope = 1.0 - jnp.square(logits / self.logit_cap)
                    change = jnp.where(allowed, change * slope, 0.0)
                change, weights = change.astype(k.dtype), weights.astype(v.dtype)
                gains = (
                    _product("bngqk,bqngd->bknd", change, q),
                    _product("bngqk,bqngd->bknd", weights, out_grad),
                )
                return query_total + _product("bngqk,bknd->bqngd", change, k), gains

            zeros = jnp.zeros(q.shape, jnp.float32)
            query_gradient, gains = jax.lax.scan(key_step, zeros, keys)
            return jax.tree.map(jnp.add, totals, gains), query_gradient

        zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys[1])
        totals, query_gradient = jax.lax.scan(query_step, zeros, queries)
        key_gradient, value_gradient = map(_rows_of_blocks, totals)
        return _joined(query_gradient, query.shape[2]), key_gradient, value_gradient

    def largest_logits(self, query: jax.Array, key: jax.Array, mask: AttentionMask) -> jax.Array:
        """Return each head's largest logit of the pairs that may attend, without padding.

        Arguments are those of `forward`. The result is float32 `[heads]`.
        """
        if mask.query_segments is not None:
            segments = jnp.where(mask.query_segments == 0, -1, mask.query_segments)
            mask = dataclasses.replace(mask, query_segments=segments)
        queries = _blocks(mask.query_arrays(), _grouped(query, key))
        keys = _blocks(mask.key_arrays(), key)

        def find_largest(queries: Any) -> jax.Array:
            def find_largest_of_block(keys: Any) -> jax.Array:
                (query_mask, (q,)), (key_mask, (k,)) = queries, keys
                logits, _ = self._logits(q, k, {**query_mask, **key_mask}, mask)
                return jnp.max(logits, axis=(3, 4))

            return jnp.max(jax.lax.map(find_largest_of_block, keys), axis=0)

        # Rows are reduced last, so that devices exchange numbers once.
        return jnp.max(jax.lax.map(find_largest, queries), axis=(0, 1)).reshape(-1)

    def _logits(
        self, q: jax.Array, k: jax.Array, arrays: dict[str, Any], mask: AttentionMask
    ) -> tuple[jax.Array, jax.Array]:
        """Return (float32 `[batch, kv_heads, group, queries, keys]`, mask of the allowed pairs)."""
        logits = _product("bqngd,bknd->bngqk", q, k) * self.scale
        allowed = dataclasses.replace(mask, **arrays).dense()[:, :, None]
        return jnp.where(allowed, soft_cap(logits, self.logit_cap), MASKED_LOGIT), allowed


def _grouped(x: jax.Array, key: jax.Array) -> jax.Array:
    """Reshape `[batch, queries, heads, dims]` to `[batch, queries, kv_heads, group, dims]`."""
    kv_heads = key.shape[2]
    return x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, x.shape[3])


def _joined(blocks: jax.Array, heads: int) -> jax.Array:
    """Merge blocks, and kv_heads and groups: `[block, batch, queries, kv_heads, group, dims]`."""
    rows = _rows_of_blocks(blocks)
    return rows.reshape(*rows.shape[:2], heads, rows.shape[-1])


def _blocks(mask_arrays: dict[str, jax.Array], *arrays: jax.Array) -> Any:
    """Return the blocks of the mask's arrays and of `[batch, length, …]` arrays."""
    length = arrays[0].shape[1]
    sizes = range(min(length, _LARGEST_BLOCK), _SMALLEST_BLOCK - 1, -1)
    size = next((size for size in sizes if length % size == 0), length)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, (mask_arrays, arrays))


def _rows_of_blocks(x: jax.Array) -> jax.Array:
    """Reshape `[block, batch, length, …]` to `[batch, block · length, …]`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
