"""Causal attention by blocks of queries, for a single CPU.

A block of queries is multiplied with the keys up to its last query only. With four blocks this
leaves out three eighths of the products, logits and exponentials of array code, which are all
masked. Each block is compiled separately, so that more blocks cost more than they save.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from layerkit.base.sharding import BoundSharding, is_single_cpu
from layerkit.ops.attention.backends import AttentionCall
from layerkit.ops.attention.options import AttentionOptions
from layerkit.ops.attention.xla import xla_attention

_NUM_BLOCKS = 4
# With shorter blocks, a step saves less than the compilation of the blocks costs.
_SMALLEST_BLOCK = 64


def uses_causal_blocks(call: AttentionCall, sharding: BoundSharding | None) -> bool:
    """Return whether `attend_by_causal_blocks` is faster than `xla_attention`, and equal to it.

    Dropout draws its random numbers for all pairs at once, and a prefix makes later keys visible.

    Args:
      call: The attention.
      sharding: Sharding of the model; None or without a mesh for JAX's devices.
    """
    block, rest = divmod(call.num_queries, _NUM_BLOCKS)
    fits = rest == 0 and block >= _SMALLEST_BLOCK
    hides_later_keys = call.is_causal and call.is_self_attention and not call.has_prefix
    is_on_cpu = call.platform == "cpu" and is_single_cpu(sharding)
    return fits and hides_later_keys and not call.has_dropout and is_on_cpu


def attend_by_causal_blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
) -> jax.Array:
    """Compute causal attention of whole rows, queries and keys `[batch, length, heads, head_dim]`.

    See `xla_attention` for all arguments and the result.
    """
    size = query.shape[1] // _NUM_BLOCKS
    mask, bias = options.mask, options.dense_bias
    assert mask is not None

    def attend(end: int) -> jax.Array:
        queries, keys = slice(end - size, end), slice(end)
        part = dataclasses.replace(
            options,
            mask=mask.part(queries, keys),
            bias=None if bias is None else bias[:, :, queries, keys],
        )
        return xla_attention(query[:, queries], key[:, keys], value[:, keys], part)

    # Model FLOPs count half of all pairs of queries and keys, which is this share of the computed.
    with jax.named_scope(f"rows_{_NUM_BLOCKS}_of_{_NUM_BLOCKS + 1}"):
        return jnp.concatenate([attend(size * (i + 1)) for i in range(_NUM_BLOCKS)], axis=1)
