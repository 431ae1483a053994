"""Attention as plain array code: every option, on every platform, with the logits in memory.

Logits and softmax are float32 whatever the inputs are. A masked logit becomes a large finite
negative rather than -inf, so that a row without any key to attend has a softmax and a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from layerkit.layers.losses import soft_cap
from layerkit.layers.masks import AttentionMask

# Half of float32's range, so that subtracting the largest logit of a row cannot overflow.
MASKED_LOGIT = -0.5 * float(jnp.finfo(jnp.float32).max)


def xla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: AttentionMask | None,
    scale: float,
    bias: jax.Array | None = None,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    zero_fully_masked_rows: bool = False,
) -> jax.Array:
    """See `layerkit.layers.attention.dot_product.dot_product_attention`.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: Which query may attend which key; None for all.
      scale: Multiplies the products of queries and keys.
      bias: `[batch or 1, heads or 1, queries, keys]`, added to the scaled products.
      sinks: `[heads]`, a logit per head that takes probability and gives nothing.
      logit_cap: Squeezes the logits into ±logit_cap.
      dropout: Applied to the probabilities.
      zero_fully_masked_rows: A query that may attend no key gives exactly 0.

    Returns:
      `[batch, queries, heads, value_dim]` in the dtype of `value`.
    """
    batch, queries, heads, _ = query.shape
    # Heads come first, so that the products batch over leading axes alone: XLA's CPU backend
    # then holds fewer transposed copies for the backward pass.
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    logits = _scaled_logits(query, key, scale)
    if bias is not None:
        logits += _in_groups(bias, kv_heads=key.shape[1])
    logits = soft_cap(logits, logit_cap)
    probabilities = _masked_softmax(logits, mask, sinks, zero_empty_rows=zero_fully_masked_rows)
    probabilities = probabilities.astype(value.dtype)
    if dropout is not None:
        probabilities = dropout(probabilities)
    read = jnp.einsum("bngqk,bnkd->bngqd", probabilities, value)
    return jnp.swapaxes(read.reshape(batch, heads, queries, value.shape[-1]), 1, 2)


def _scaled_logits(query: jax.Array, key: jax.Array, scale: float) -> jax.Array:
    """scale·q·k as float32 `[batch, kv_heads, group, queries, keys]`."""
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    # Queries are fewer numbers than logits; in low precision they would be rounded once more.
    scale_queries = query.dtype == jnp.float32
    if scale_queries:
        query = query * scale
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, head_dim)
    logits = jnp.einsum("bngqd,bnkd->bngqk", grouped, key, preferred_element_type=jnp.float32)
    return logits if scale_queries else logits * scale


def _in_groups(bias: jax.Array, *, kv_heads: int) -> jax.Array:
    """`[batch, heads, queries, keys]` → float32 `[batch, kv_heads, group, queries, keys]`."""
    batch, heads, *rest = bias.shape
    groups = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return bias.astype(jnp.float32).reshape(batch, *groups, *rest)


def _masked_softmax(
    logits: jax.Array,
    mask: AttentionMask | None,
    sinks: jax.Array | None,
    *,
    zero_empty_rows: bool,
) -> jax.Array:
    allowed = None if mask is None else mask.dense()[:, :, None]  # [batch, 1, 1, queries, keys]
    if allowed is not None:
        logits = jnp.where(allowed, logits, MASKED_LOGIT)
    if sinks is None:
        probabilities = jax.nn.softmax(logits, axis=-1)
    else:
        _, kv_heads, group, *_ = logits.shape
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1, 1)
        sink = jnp.broadcast_to(sink, (*logits.shape[:-1], 1))
        with_sink = jnp.concatenate([logits, sink], axis=-1)
        probabilities = jax.nn.softmax(with_sink, axis=-1)[..., :-1]
    if zero_empty_rows and allowed is not None:
        probabilities = jnp.where(allowed.any(axis=-1, keepdims=True), probabilities, 0.0)
    return probabilities
