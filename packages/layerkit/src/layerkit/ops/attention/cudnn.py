"""Attention by cuDNN's fused kernel on NVIDIA GPUs, called by `jax.nn.dot_product_attention`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.attention.pallas.kernel_blocks import FusedAttention


class CudnnAttention(FusedAttention):
    """Attention by cuDNN, which selects the blocks and has no cap and no interpret mode."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: AttentionMask | None = None,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Compute `layerkit.ops.attention.dot_product.dot_product_attention` by cuDNN.

        The mask is in row order; the bias `[batch or 1, heads or 1, queries, keys]` has the dtype
        of the queries.
        """
        window = None if mask is None else mask.window
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias=bias,
            scale=self.scale,
            is_causal=mask is not None and mask.causal,
            # JAX counts the keys before a query; windows here count the query itself as well.
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )


@functools.cache
def find_missing_cudnn() -> str:
    """Return why JAX fails to trace a call of cuDNN and how to install a version, else ""."""
    probe = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    try:
        jax.eval_shape(lambda x: CudnnAttention(1.0)(x, x, x), probe)
    except RuntimeError as error:  # cuDNN is missing, or older than this GPU requires.
        install = "pip install -U nvidia-cudnn-cu13, or -cu12 with CUDA 12"
        return f"cuDNN cannot run ({str(error).rstrip('.')}): {install}"
    return ""
