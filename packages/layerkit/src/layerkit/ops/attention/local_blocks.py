"""Attention within a window as array code whose time and memory grow linearly with the length.

Rows are cut into blocks at least as long as the window reaches. The queries of a block are
multiplied with the keys that any of them may see, which are those of the block and of parts of the
blocks beside it. Blocks become rows of a batch, which any function of queries, keys and values then
reads. Source: `LocalSelfAttention` of Praxis; Parmar et al., 2018 (arXiv:1802.05751), section 3.2.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.ops.attention.backends import AttentionCall
from layerkit.ops.attention.distance_bias import DistanceBias, align_distances
from layerkit.ops.attention.masks import AttentionMask, count_visible_pairs

_LOG = logging.getLogger(__name__)

# Shorter blocks save few products, and the matrices of a block become too small.
_SMALLEST_BLOCK = 64


def find_local_block(call: AttentionCall) -> int | None:
    """Return the number of queries of a block, or None if blocks cannot run a call or save little.

    It depends on the call's shapes and mask alone, so that random numbers of dropout are the same
    on every platform, except where devices split rows.
    """
    has_bias_of_pairs = call.bias_dtype is not None and not call.has_distance_bias
    # An export may leave the length open.
    is_whole = call.num_length_shards == 1 and isinstance(call.num_keys, int)
    is_square = call.num_queries == call.num_keys
    if call.reach is None or has_bias_of_pairs or not (is_whole and is_square):
        return None
    before, after = call.reach
    # Chunks of `look_ahead`, which see `after` keys after their first query, stay in one block.
    size = -(-max(before + 1, _SMALLEST_BLOCK) // (after + 1)) * (after + 1)
    return size if 2 * (before + size + after) <= call.num_keys else None


def attend_by_local_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    options: Any,
    *,
    attend: Callable[..., jax.Array],
    size: int,
) -> jax.Array:
    """Compute attention of whole rows within the window of a mask.

    Args:
      query: `[batch, length, heads, head_dim]`.
      key: `[batch, length, kv_heads, head_dim]`.
      value: `[batch, length, kv_heads, value_dim]`.
      options: `AttentionOptions`, of a call for which `find_local_block` returns a number.
      attend: Function that reads `[batch · blocks, …]`. Positions of its mask are consecutive.
      size: Number of queries of a block.

    Returns:
      `[batch, length, heads, value_dim]` in the dtype of `value`.
    """
    mask: AttentionMask = options.mask
    assert mask.reach is not None
    (batch, length), (before, after) = query.shape[:2], mask.reach
    num_blocks, num_keys = -(-length // size), before + size + after
    _LOG.info("attention by local blocks of %d queries and %d keys", size, num_keys)
    # The mask may have one row for all rows.
    mask = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, length)), mask)

    def split(x: jax.Array, fill: int = 0) -> jax.Array:
        widths = [(0, 0), (0, num_blocks * size - length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=fill)
        return x.reshape(batch, num_blocks, size, *x.shape[2:])

    def queries(x: jax.Array, fill: int = 0) -> jax.Array:
        return split(x, fill).reshape(batch * num_blocks, size, *x.shape[2:])

    def keys(x: jax.Array, fill: int = 0) -> jax.Array:
        widths = [(0, 0), (1, 1)] + [(0, 0)] * (x.ndim - 1)
        blocks = jnp.pad(split(x, fill), widths, constant_values=fill)
        left, right = blocks[:, :-2, size - before :], blocks[:, 2:, :after]
        joined = jnp.concatenate([left, blocks[:, 1:-1], right], axis=2)
        return joined.reshape(batch * num_blocks, -1, *x.shape[2:])

    # Keys outside of the row have a segment of their own.
    segments = mask.query_segments, mask.key_segments
    query_segments, key_segments = (
        jnp.ones((batch, length), jnp.int32) if one is None else one for one in segments
    )
    starts = jnp.broadcast_to(jnp.arange(num_blocks) * size, (batch, num_blocks))
    starts = starts.reshape(batch * num_blocks, 1)
    block_mask = dataclasses.replace(
        mask,
        query_positions=queries(mask.query_positions),
        key_positions=starts + jnp.arange(-before, size + after),
        query_segments=queries(query_segments),
        key_segments=keys(key_segments, fill=-1),
        key_in_prefix=None if mask.key_in_prefix is None else keys(mask.key_in_prefix),
        query_ends=None if mask.query_ends is None else queries(mask.query_ends),
        in_row_order=False,
        num_ahead=0,
    )
    bias = options.bias
    if isinstance(bias, DistanceBias):
        num_distances = 2 * size + before + after - 1
        start = length - size - before
        by_distance = bias.by_distance[..., None, start : start + num_distances]
        shape = (*by_distance.shape[:2], size, num_distances)
        bias = align_distances(jnp.broadcast_to(by_distance, shape))
    options = dataclasses.replace(options, mask=block_mask, bias=bias)
    # Model FLOPs count the pairs that the window shows.
    num_pairs = count_visible_pairs(length, (before, after), mask.chunk)
    with jax.named_scope(f"rows_{num_pairs}_of_{num_blocks * size * num_keys}"):
        read = attend(queries(query), keys(key), keys(value), options)
    return read.reshape(batch, num_blocks * size, *read.shape[2:])[:, :length]
