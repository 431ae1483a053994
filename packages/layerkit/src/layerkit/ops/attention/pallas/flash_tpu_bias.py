"""Attention with a bias by distance as fused kernels on TPUs.

JAX's splash attention has no bias. Its older flash attention reads a dense bias, with one number
for each pair of query and key. These kernels read one number per distance (`DistanceBias`) and make
the bias of a block from the numbers of its distances: a row of the block is the row above, shifted
by one. The method is that of `layerkit.ops.triton.flash_gpu`, FlashAttention-2 (Dao,
2023, arXiv:2307.08691).

A separate kernel computes the gradient of a learned bias. It visits the blocks on one diagonal of
the logits, which have the same bias, one after the other and adds their gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.ops.attention.distance_bias import DistanceBias, sum_diagonals
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.attention.pallas.flash_tpu_bias_kernels import (
    Arrays,
    BiasedOptions,
    bias_tile_gradients,
    forward,
    key_gradients,
    query_gradient,
)


def biased_attention_tpu(
    options: BiasedOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask | None,
    bias: DistanceBias,
    sinks: jax.Array | None,
) -> jax.Array:
    """Compute self-attention `[batch, length, heads, value_dim]` with a bias by distance.

    See `layerkit.ops.attention.pallas.flash_tpu.SplashAttention`. The blocks of the options are
    multiples of 128 that divide the length.
    """
    segments: tuple[Any, Any] = (None, None)
    if mask is not None and mask.query_segments is not None:
        assert mask.key_segments is not None
        segments = mask.query_segments[:, None, :], mask.key_segments[:, :, None]
    by_distance = bias.by_distance[0].astype(jnp.float32)
    sinks = None if sinks is None else sinks[:, None, None]
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    return jnp.swapaxes(_attend(options, query, key, value, sinks, by_distance, segments), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: BiasedOptions, *arrays: Any) -> jax.Array:
    return _attend_forward(options, *arrays)[0]


def _attend_forward(
    options: BiasedOptions,
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    by_distance: Any,
    segments: Any,
) -> tuple[jax.Array, Any]:
    arrays = _arrays(by_distance, segments)
    out, log_sum = forward(options, query, key, value, sinks, arrays)
    return out, (query, key, value, sinks, by_distance, segments, out, log_sum)


def _attend_backward(options: BiasedOptions, residuals: Any, out_gradient: jax.Array) -> Any:
    query, key, value, sinks, by_distance, segments, out, log_sum = residuals
    products = out.astype(jnp.float32) * out_gradient.astype(jnp.float32)
    # The softmax subtracts this number from each of a query's gradients.
    common = products.sum(axis=-1)[:, :, None]
    arrays = _arrays(by_distance, segments)
    inputs = (query, key, value, out_gradient, log_sum, common, arrays)
    changes = query_gradient(options, *inputs), *key_gradients(options, *inputs)
    sinks_gradient, bias_gradient = None, jnp.zeros_like(by_distance)
    if sinks is not None:
        weight = jnp.exp(sinks.astype(jnp.float32) - log_sum)
        sinks_gradient = -(weight * common).sum(axis=(0, 3))[..., None].astype(sinks.dtype)
    if options.learns_bias:
        # The diagonals are in the order of query position - key position.
        bias_gradient = sum_diagonals(bias_tile_gradients(options, *inputs))[:, ::-1]
    return *changes, sinks_gradient, bias_gradient, (None, None)


_attend.defvjp(_attend_forward, _attend_backward)


def _arrays(by_distance: jax.Array, segments: Any) -> Arrays:
    reversed_bias = jnp.pad(by_distance[:, ::-1], ((0, 0), (0, 1)))
    return Arrays(reversed_bias[:, None], *segments)
