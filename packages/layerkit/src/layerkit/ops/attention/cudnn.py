"""Attention by cuDNN's fused kernel on NVIDIA GPUs, called by `jax.nn.dot_product_attention`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from layerkit.ops.attention.masks import AttentionMask


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    mask: AttentionMask | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Compute `layerkit.ops.attention.dot_product.dot_product_attention` by cuDNN.

    The mask is in row order; the bias `[batch or 1, heads or 1, queries, keys]` has the dtype of
    the queries.
    """
    window = None if mask is None else mask.window
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        scale=scale,
        is_causal=mask is not None and mask.causal,
        # JAX counts the keys before a query; windows here count the query itself as well.
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


@functools.cache
def has_cudnn() -> bool:
    """Return whether JAX finds cuDNN. Without it, tracing cuDNN attention fails."""
    probe = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    try:
        jax.eval_shape(lambda x: cudnn_attention(x, x, x, scale=1.0), probe)
    except RuntimeError:
        return False
    return True


def find_missing_cudnn() -> str:
    """Return a sentence if cuDNN is not installed, else ""."""
    return "" if has_cudnn() else "cuDNN is not installed"
