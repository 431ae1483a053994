"""Attention as one fused kernel on TPUs: JAX's splash attention, with our conventions around it.

Splash attention is the flash attention that JAX keeps for TPUs, written in Pallas; it leaves out
blocks that a static mask hides and has kernels for the backward pass. It takes positions to be the
order of the row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_masks,
)

from layerkit.layers.masks import AttentionMask


def flash_attention_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: AttentionMask | None,
    scale: float,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
    interpret: bool = False,
    kernel: splash.SplashAttentionKernel | None = None,
) -> jax.Array:
    """See `layerkit.layers.attention.dot_product.dot_product_attention`.

    Args:
      query: `[batch, queries, heads, head_dim]`, queries a multiple of 128.
      key: `[batch, keys, kv_heads, head_dim]`, keys a multiple of 128.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: Which query may attend which key, in the order of the row; None for all.
      scale: Multiplies the products of queries and keys; by way of the queries, which in bfloat16
        are rounded once more unless it is a power of two.
      sinks: `[heads]`, a logit per head that takes probability and gives nothing.
      logit_cap: Squeezes the logits into ±logit_cap.
      interpret: Runs the kernel step by step on any device, for tests.
      kernel: This device's part of a `splash_kernel` whose queries are split over devices.

    Returns:
      `[batch, queries, heads, value_dim]` in the dtype of `value`.
    """
    if kernel is None:
        kernel = splash_kernel(mask, query, key, logit_cap=logit_cap, interpret=interpret)
    query = (query.astype(jnp.float32) * scale).astype(query.dtype)
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    segments = None
    if mask is not None and mask.query_segments is not None:
        assert mask.key_segments is not None
        segments = splash.SegmentIds(mask.query_segments, mask.key_segments)

    def one_row(q: jax.Array, k: jax.Array, v: jax.Array, s: splash.SegmentIds | None) -> jax.Array:
        read: Any = kernel(q, k, v, segment_ids=s, sinks=sinks)
        return read

    read = jax.vmap(one_row)(query, key, value, segments)
    return jnp.swapaxes(read, 1, 2).astype(value.dtype)


def splash_kernel(
    mask: AttentionMask | None,
    query: jax.Array,
    key: jax.Array,
    *,
    logit_cap: float | None,
    interpret: bool,
    num_parts: int = 1,
) -> splash.SplashAttentionKernel:
    """The kernel for a mask: a pytree, of arrays that tell which blocks are visited.

    Args:
      mask: Which query may attend which key, in the order of the row; None for all.
      query: `[batch, queries, heads, head_dim]`; only its shape is read.
      key: `[batch, keys, kv_heads, head_dim]`; likewise.
      logit_cap: Squeezes the logits into ±logit_cap.
      interpret: Whether it runs step by step.
      num_parts: Over how many devices the queries are split; `manual_sharding_spec` of the kernel
        then tells `jax.shard_map` which arrays are whose.
    """
    (_, queries, heads, _), keys = query.shape, key.shape[1]
    return splash.make_splash_mha(
        splash_masks.MultiHeadMask([_static_mask(mask, queries, keys)] * heads),
        block_sizes=_block_sizes(queries // num_parts, keys),
        head_shards=1,
        q_seq_shards=num_parts,
        attn_logits_soft_cap=logit_cap,
        interpret=interpret,
    )


def _static_mask(mask: AttentionMask | None, queries: int, keys: int) -> splash_masks.Mask:
    shape = (queries, keys)
    if mask is None or not (mask.causal or mask.window):
        return splash_masks.FullMask(shape)
    if mask.window is None:
        return splash_masks.CausalMask(shape)
    reach = mask.window - 1
    return splash_masks.LocalMask(shape, (reach, 0 if mask.causal else reach), offset=0)


def _block_sizes(queries: int, keys: int) -> splash.BlockSizes:
    q, k = (_largest_block(length) for length in (queries, keys))
    return splash.BlockSizes(
        block_q=q,
        block_kv=k,
        block_kv_compute=k,
        block_q_dkv=q,
        block_kv_dkv=k,
        block_kv_dkv_compute=k,
        block_q_dq=q,
        block_kv_dq=k,
    )


def _largest_block(length: int) -> int:
    return int(np.gcd(length, 512))
