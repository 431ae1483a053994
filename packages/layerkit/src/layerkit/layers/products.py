"""Products of activations with weights, laid out so that no backend needs copies.

`[batch, length, in] · [in, out]` has two axes of tokens, and its gradient for the weight contracts
both. XLA's CPU backend then transposes both operands first, which makes a feed-forward layer three
times as slow. With batch and length merged into one axis of tokens there is nothing to copy, and on
accelerators nothing changes.
"""

from __future__ import annotations

import math

import jax

from layerkit.base_layer import BaseLayer


def merge_tokens(layer: BaseLayer, x: jax.Array) -> jax.Array:
    """`[batch, length, dims]` → `[tokens, dims]`, once for all products that read it.

    Where the length is split over devices `x` stays as it is, since merging would gather it.

    Args:
      layer: Whose product it is; its bound sharding decides.
      x: Activations with any leading axes.
    """
    sharding = layer.inherited("sharding")
    if sharding is not None and sharding.is_split("length"):
        return x
    # Spelt out rather than -1, which an empty batch leaves undetermined.
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def matmul(layer: BaseLayer, x: jax.Array, w: jax.Array) -> jax.Array:
    """`[..., in]` · `[in, out]` → `[..., out]`, over one axis of tokens where possible."""
    return (merge_tokens(layer, x) @ w).reshape(*x.shape[:-1], w.shape[-1])


def constrain_tokens(layer: BaseLayer, x: jax.Array, *features: str | None) -> jax.Array:
    """Lays out `[tokens, …]` or `[batch, length, …]`, with names for what follows the tokens."""
    merged = x.ndim == 1 + len(features)
    return layer.constrain(x, *(("batch",) if merged else ("batch", "length")), *features)
