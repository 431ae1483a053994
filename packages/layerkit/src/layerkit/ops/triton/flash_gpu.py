"""Attention as one fused kernel on GPUs, written in Pallas for Triton.

FlashAttention-2 (Dao, 2023, arXiv:2307.08691): a program holds one block of queries, loops over the
blocks of keys with a running maximum and sum, and never writes logits to memory. The backward pass
recomputes them from the log-sum-exp of each query. It has one kernel for queries and one for keys
and values, where a program sums over all query heads of its key head without repeating keys.

Positions and segments are read as arrays, so a row or a cache may begin at any position. Blocks of
other documents are skipped, and if positions are in row order those outside the causal triangle or
the window, too. A query that sees no key reads 0.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from layerkit.ops.attention.distance_bias import DistanceBias, sum_diagonals
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.attention.pallas.kernel_blocks import FusedAttention, Passes, gpu_tiles
from layerkit.ops.triton.flash_gpu_bias import bias_tile_gradients
from layerkit.ops.triton.flash_gpu_kernels import (
    BackwardInputs,
    KernelOptions,
    MaskArrays,
    forward,
    key_gradients,
    query_gradient,
)


class FlashAttention(FusedAttention):
    """Attention by the GPU kernels; a `layerkit.ops.attention.ring.PartAttention`.

    A block is of at least 16 queries and keys.
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
    ) -> jax.Array:
        """Compute attention to all keys.

        Args:
          query: `[batch, queries, heads, head_dim]`, queries a multiple of 16.
          key: `[batch, keys, kv_heads, head_dim]`, keys a multiple of 16.
          value: `[batch, keys, kv_heads, value_dim]`.
          mask: Mask of the (query, key) pairs that may attend, without a prefix; None for all.
          bias: Bias by distance, for as many queries as keys in row order; None for no bias.
          sinks: `[heads]`, a logit per head that takes probability and adds no value.

        Returns:
          `[batch, queries, heads, value_dim]` in the dtype of `value`; 0 for a query that sees no
          key.
        """
        learns_bias = bias is not None and bias.is_learned
        options = self._passes(query, key, value, mask, learns_bias=learns_bias)
        arrays = mask_arrays(mask, query.shape[0])
        q, k, v = (_pad_heads(x) for x in (query, key, value))
        by_distance = None if bias is None else bias.by_distance[0].astype(jnp.float32)
        return _flash(options, q, k, v, sinks, by_distance, arrays)[..., : value.shape[-1]]

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask
    ) -> tuple[jax.Array, jax.Array]:
        """Return outputs `[batch, queries, heads, dims]` and log-sum-exps; see `PartAttention`."""
        options = self._passes(query, key, value, mask, result_dtype=jnp.float32)
        q, k, v = (_pad_heads(x) for x in (query, key, value))
        arrays = mask_arrays(mask, query.shape[0])
        read, log_sum = forward(options.forward, q, k, v, None, arrays)
        return read[..., : value.shape[-1]], jnp.swapaxes(log_sum, 1, 2)

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
        options = self._passes(query, key, value, mask, result_dtype=jnp.float32)
        q, k, v, out_grad = (_pad_heads(x) for x in (query, key, value, out_gradient))
        log_sum, common = (jnp.swapaxes(x, 1, 2) for x in (log_sum, common))
        arrays = mask_arrays(mask, query.shape[0])
        changes = _gradients(options, BackwardInputs(q, k, v, out_grad, log_sum, common, arrays))
        of_query, of_key, of_value = (
            change[..., : x.shape[-1]]
            for change, x in zip(changes, (query, key, value), strict=True)
        )
        return of_query, of_key, of_value

    def _passes(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: AttentionMask | None,
        **fields: Any,
    ) -> Passes[KernelOptions]:
        tiles = gpu_tiles(
            self.blocks,
            lengths=(query.shape[1], key.shape[1]),
            dtype=query.dtype,
            largest_dim=max(query.shape[-1], value.shape[-1]),
            device_kind=self.device_kind,
        )
        options = functools.partial(
            KernelOptions,
            scale=self.scale,
            causal=mask is not None and mask.causal,
            window=None if mask is None else mask.window,
            in_row_order=mask is not None and mask.in_row_order,
            logit_cap=self.logit_cap,
            interpret=self.interpret,
            **fields,
        )
        return Passes(*(options(tile=tile) for tile in tiles))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(options: Passes[KernelOptions], *arrays: Any) -> jax.Array:
    return _flash_forward(options, *arrays)[0]


def _flash_forward(
    options: Passes[KernelOptions],
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    bias: Any,
    arrays: MaskArrays,
) -> tuple[jax.Array, Any]:
    out, log_sum = forward(options.forward, query, key, value, sinks, arrays, bias)
    return out, (query, key, value, sinks, bias, arrays, out, log_sum)


def _flash_backward(options: Passes[KernelOptions], residuals: Any, out_gradient: jax.Array) -> Any:
    query, key, value, sinks, bias, arrays, out, log_sum = residuals
    products = out.astype(jnp.float32) * out_gradient.astype(jnp.float32)
    # The softmax subtracts this number from each of a query's gradients, [batch, heads, queries].
    common = jnp.swapaxes(products.sum(axis=-1), 1, 2)
    inputs = BackwardInputs(query, key, value, out_gradient, log_sum, common, arrays, bias)
    changes = _gradients(options, inputs)
    sinks_gradient = bias_gradient = None
    if sinks is not None:
        weight = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - log_sum)
        sinks_gradient = -(weight * common).sum(axis=(0, 2)).astype(sinks.dtype)
    if options.forward.learns_bias:
        bias_gradient = sum_diagonals(bias_tile_gradients(options.query_gradient, inputs))
    elif bias is not None:
        bias_gradient = jnp.zeros_like(bias)
    return *changes, sinks_gradient, bias_gradient, MaskArrays()


_flash.defvjp(_flash_forward, _flash_backward)


def _gradients(
    options: Passes[KernelOptions], inputs: BackwardInputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values."""
    of_keys = key_gradients(options.key_gradients, inputs)
    return query_gradient(options.query_gradient, inputs), *of_keys


def mask_arrays(mask: AttentionMask | None, batch: int) -> MaskArrays:
    """Return the arrays of a mask that the kernels read, each with a row for each of the batch."""
    if mask is None:
        return MaskArrays()
    arrays = MaskArrays(query_segments=mask.query_segments, key_segments=mask.key_segments)
    if mask.causal or mask.window is not None:
        arrays = arrays._replace(
            query_positions=mask.query_positions, key_positions=mask.key_positions
        )
    return MaskArrays(*(None if m is None else _broadcast_rows(m, batch) for m in arrays))


def _pad_heads(x: jax.Array) -> jax.Array:
    """Pad heads with zeros to a power of two of at least 16, as Triton's blocks require."""
    size = x.shape[-1]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, max(16, pl.next_power_of_2(size)) - size)])


def _broadcast_rows(array: jax.Array, batch: int) -> jax.Array:
    return jnp.broadcast_to(array.astype(jnp.int32), (batch, array.shape[1]))
