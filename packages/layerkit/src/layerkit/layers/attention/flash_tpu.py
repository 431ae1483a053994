"""Attention as one fused kernel on TPUs: an adapter of JAX's splash attention.

Splash attention is JAX's flash attention for TPUs, written in Pallas. It skips the blocks that a
static mask hides and has kernels for the backward pass. It assumes positions in row order.
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
    """Compute attention by the TPU kernel.

    See `layerkit.layers.attention.dot_product.dot_product_attention`.

    Args:
      query: `[batch, queries, heads, head_dim]`, queries a multiple of 128.
      key: `[batch, keys, kv_heads, head_dim]`, keys a multiple of 128.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: Mask of the (query, key) pairs that may attend, in row order; None for all pairs.
      scale: Factor of the products of queries and keys. It multiplies the queries, which in
        bfloat16 are rounded once more unless it is a power of two.
      sinks: `[heads]`, a logit per head that takes probability and adds no value.
      logit_cap: Bound of the logits, which tanh squeezes into ±logit_cap; None for no bound.
      interpret: True to run the kernel in interpret mode on any device, for tests.
      kernel: The device's shard of a `splash_kernel` whose queries are split over devices; None
        to make the kernel here.

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
    num_shards: int = 1,
) -> splash.SplashAttentionKernel:
    """Return the kernel for a mask, a pytree of arrays that list the blocks to visit.

    Args:
      mask: Mask of the (query, key) pairs that may attend, in row order; None for all pairs.
      query: `[batch, queries, heads, head_dim]`; only its shape is read.
      key: `[batch, keys, kv_heads, head_dim]`; only its shape is read.
      logit_cap: Bound of the logits; None for no bound.
      interpret: True to run the kernel in interpret mode.
      num_shards: Number of devices over which the queries are split. `manual_sharding_spec` of the
        kernel then gives the specs of its arrays for `jax.shard_map`.
    """
    (_, queries, heads, _), keys = query.shape, key.shape[1]
    return splash.make_splash_mha(
        splash_masks.MultiHeadMask([_static_mask(mask, queries, keys)] * heads),
        block_sizes=_block_sizes(queries // num_shards, keys),
        head_shards=1,
        q_seq_shards=num_shards,
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
    q, k = (int(np.gcd(length, 512)) for length in (queries, keys))
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
