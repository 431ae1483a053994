"""Attention as one fused kernel on TPUs: an adapter of JAX's splash attention.

Splash attention is JAX's flash attention for TPUs, written in Pallas. It skips the blocks that a
static mask hides and has kernels for the backward pass. It assumes positions in row order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

from layerkit.ops.attention.distance_bias import DistanceBias
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.attention.pallas.flash_tpu_bias import biased_attention_tpu
from layerkit.ops.attention.pallas.flash_tpu_bias_kernels import BiasedOptions
from layerkit.ops.attention.pallas.kernel_blocks import FusedAttention, KernelBlocks, tpu_blocks


class SplashAttention(FusedAttention):
    """Attention by the TPU kernels; a `layerkit.ops.attention.ring.PartAttention`.

    A part has either a causal mask in row order or no mask besides segments. Outputs and gradients
    of a part are rounded to the dtype of the inputs, before the ring adds them in float32.

    A block is of at least 128 queries and keys. `scale` multiplies the queries, which in bfloat16
    are rounded once more unless it is a power of two.
    """

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: AttentionMask | None = None,
        bias: DistanceBias | None = None,
        sinks: jax.Array | None = None,
        kernel: splash.SplashAttentionKernel | None = None,
    ) -> jax.Array:
        """Compute attention to all keys.

        Args:
          query: `[batch, queries, heads, head_dim]`, queries a multiple of 128.
          key: `[batch, keys, kv_heads, head_dim]`, keys a multiple of 128.
          value: `[batch, keys, kv_heads, value_dim]`.
          mask: Mask of the (query, key) pairs that may attend, in row order; None for all pairs.
          bias: Bias by distance, for as many queries as keys; None for no bias. It is computed by
            `layerkit.ops.attention.pallas.flash_tpu_bias`.
          sinks: `[heads]`, a logit per head that takes probability and adds no value.
          kernel: The device's shard of a `kernel` whose queries are split over devices; None to
            make the kernel here.

        Returns:
          `[batch, queries, heads, value_dim]` in the dtype of `value`.
        """
        if bias is not None:
            block_queries, block_keys = self._blocks(query.shape[1], key.shape[1]).forward
            options = BiasedOptions(
                scale=self.scale,
                causal=mask is not None and mask.causal,
                window=None if mask is None else mask.window,
                logit_cap=self.logit_cap,
                block_queries=block_queries,
                block_keys=block_keys,
                learns_bias=bias.is_learned,
                interpret=self.interpret,
            )
            return biased_attention_tpu(options, query, key, value, mask, bias, sinks)
        kernel = kernel or self.kernel(query, key, mask)
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (_scaled(query, self.scale), key, value))
        attend: Any = jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=s, sinks=sinks))
        return jnp.swapaxes(attend(q, k, v, _segments(mask)), 1, 2).astype(value.dtype)

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask
    ) -> tuple[jax.Array, jax.Array]:
        """Return outputs `[batch, queries, heads, dims]` and log-sum-exps; see `PartAttention`."""
        kernel = self.kernel(query, key, mask, save_residuals=True)
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (_scaled(query, self.scale), key, value))
        attend: Any = jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=s))
        read, (log_sum,) = attend(q, k, v, _segments(mask))
        return jnp.swapaxes(read, 1, 2).astype(jnp.float32), jnp.swapaxes(log_sum, 1, 2)

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
        kernel = self.kernel(query, key, mask)
        dq_mask_info, dkv_mask_info = kernel.dq_mask_info, kernel.dkv_mask_info
        assert dq_mask_info is not None
        assert dkv_mask_info is not None
        sizes = kernel.kwargs["block_sizes"]
        names = ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")
        shared = {name: kernel.kwargs[name] for name in names}
        shared |= {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}

        def one_row(q: Any, k: Any, v: Any, s: Any, *rest: Any) -> Any:
            out_grad, log_sum, common = rest
            inputs = q, k, v, s, None, log_sum, out_grad, common
            # JAX's own backward pass, with the log-sum-exp of all parts.
            query_gradient = splash._splash_attention_bwd_dq(
                *inputs,
                bq=sizes.block_q_dq,
                bkv=sizes.block_kv_dq,
                mask_info=dq_mask_info,
                **shared,
            )
            _, *others = splash._splash_attention_bwd_dkv(
                *inputs,
                bq=sizes.block_q_dkv,
                bkv=sizes.block_kv_dkv,
                bkv_compute=sizes.block_kv_dkv_compute,
                mask_info=dkv_mask_info,
                use_fused_bwd_kernel=False,
                **shared,
            )
            return query_gradient, *others

        heads_first = [
            jnp.swapaxes(x, 1, 2)
            for x in (_scaled(query, self.scale), key, value, out_gradient, log_sum, common)
        ]
        q, k, v, *rest = heads_first
        gradients = jax.vmap(one_row)(q, k, v, _segments(mask), *rest)
        of_query, of_key, of_value = (jnp.swapaxes(x, 1, 2).astype(jnp.float32) for x in gradients)
        return of_query * self.scale, of_key, of_value

    def kernel(
        self,
        query: jax.Array,
        key: jax.Array,
        mask: AttentionMask | None,
        *,
        num_shards: int = 1,
        save_residuals: bool = False,
    ) -> splash.SplashAttentionKernel:
        """Return the kernel for a mask, a pytree of arrays that list the blocks to visit.

        Args:
          query: `[batch, queries, heads, head_dim]`; only its shape is read.
          key: `[batch, keys, kv_heads, head_dim]`; only its shape is read.
          mask: Mask of the (query, key) pairs that may attend, in row order; None for all pairs.
          num_shards: Number of devices over which the queries are split. `manual_sharding_spec` of
            the kernel then gives the specs of its arrays for `jax.shard_map`.
          save_residuals: True for a kernel that also returns the log-sum-exp of each query.
        """
        (_, queries, heads, _), keys = query.shape, key.shape[1]
        blocks = self._blocks(queries // num_shards, keys)
        return splash.make_splash_mha(
            splash_masks.MultiHeadMask([_static_mask(mask, queries, keys)] * heads),
            block_sizes=_block_sizes(blocks),
            head_shards=1,
            q_seq_shards=num_shards,
            attn_logits_soft_cap=self.logit_cap,
            interpret=self.interpret,
            save_residuals=save_residuals,
        )

    def _blocks(self, queries: int, keys: int) -> KernelBlocks:
        return tpu_blocks(self.blocks, lengths=(queries, keys), device_kind=self.device_kind)


def _scaled(query: jax.Array, scale: float) -> jax.Array:
    return (query.astype(jnp.float32) * scale).astype(query.dtype)


def _segments(mask: AttentionMask | None) -> splash.SegmentIds | None:
    if mask is None or mask.query_segments is None:
        return None
    assert mask.key_segments is not None
    return splash.SegmentIds(mask.query_segments, mask.key_segments)


def _static_mask(mask: AttentionMask | None, queries: int, keys: int) -> splash_masks.Mask:
    shape = (queries, keys)
    if mask is None or not (mask.causal or mask.window):
        return splash_masks.FullMask(shape)
    if mask.window is None:
        return splash_masks.CausalMask(shape)
    reach = mask.window - 1
    return splash_masks.LocalMask(shape, (reach, 0 if mask.causal else reach), offset=0)


def _block_sizes(blocks: KernelBlocks) -> splash.BlockSizes:
    return splash.BlockSizes(
        block_q=blocks.forward[0],
        block_kv=blocks.forward[1],
        block_kv_compute=blocks.forward[1],
        block_q_dkv=blocks.key_gradients[0],
        block_kv_dkv=blocks.key_gradients[1],
        block_kv_dkv_compute=blocks.key_gradients[1],
        block_q_dq=blocks.query_gradient[0],
        block_kv_dq=blocks.query_gradient[1],
    )
