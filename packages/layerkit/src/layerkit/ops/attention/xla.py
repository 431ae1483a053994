"""Attention as array code that supports every option and platform and holds the logits in memory.

Logits and softmax are float32 for inputs of every dtype. A masked logit becomes a large finite
negative number rather than -inf, so that the softmax and gradient of a fully masked row are finite.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.ops.attention.masks import MASKED_LOGIT
from layerkit.ops.attention.options import AttentionOptions
from layerkit.ops.losses import soft_cap


def xla_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
) -> jax.Array:
    """Compute attention by array code, on the whole arrays.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      options: Mask, scale, bias, sinks, cap and dropout; other options have no effect.

    Returns:
      `[batch, queries, heads, value_dim]` in the dtype of `value`.
    """
    batch, queries, heads, _ = query.shape
    # With heads first, the products batch over leading axes alone, and XLA's CPU backend holds
    # fewer transposed copies for the backward pass.
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    logits = _scaled_logits(query, key, options.scale)
    bias = options.dense_bias
    if bias is not None:
        logits += _group_heads(bias, kv_heads=key.shape[1])
    probabilities = _masked_softmax(soft_cap(logits, options.logit_cap), options)
    probabilities = probabilities.astype(value.dtype)
    if options.dropout is not None:
        probabilities = options.dropout(probabilities)
    read = jnp.einsum("bngqk,bnkd->bngqd", probabilities, value)
    return jnp.swapaxes(read.reshape(batch, heads, queries, value.shape[-1]), 1, 2)


def _scaled_logits(query: jax.Array, key: jax.Array, scale: float) -> jax.Array:
    """Return scale·q·k as float32 `[batch, kv_heads, group, queries, keys]`."""
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    # Scaling the queries is cheaper than scaling the logits, but would round low precision again.
    scale_queries = query.dtype == jnp.float32
    if scale_queries:
        query = query * scale
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, head_dim)
    logits = jnp.einsum("bngqd,bnkd->bngqk", grouped, key, preferred_element_type=jnp.float32)
    return logits if scale_queries else logits * scale


def _group_heads(bias: jax.Array, *, kv_heads: int) -> jax.Array:
    """Reshape `[batch, heads, …]` to float32 `[batch, kv_heads, group, queries, keys]`."""
    batch, heads, *rest = bias.shape
    groups = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return bias.astype(jnp.float32).reshape(batch, *groups, *rest)


def _masked_softmax(logits: jax.Array, options: AttentionOptions) -> jax.Array:
    mask, sinks = options.mask, options.sinks
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
    if options.zero_fully_masked_rows and allowed is not None:
        probabilities = jnp.where(allowed.any(axis=-1, keepdims=True), probabilities, 0.0)
    return probabilities
