"""Attention by Tokamax's fused kernels for Hopper and Blackwell GPUs (Pallas' Mosaic GPU backend).

Tokamax (https://github.com/openxla/tokamax) is the extra `layerkit[kernels]`. Its kernels read a
mask as the first and the last key of each query, so that packed rows and windows skip blocks of
keys. They know no attention sinks: here the sink joins the sum of each softmax
afterwards, and the backward pass, which reads that sum, then gives the exact gradients.

The public function of Tokamax has no such masks, so this module calls the operations below it, and
`pyproject.toml` and `find_missing_tokamax` bound the version.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.attention.pallas.kernel_blocks import FusedAttention

# (scale, logit_cap, is_causal) of an attention.
_Options = tuple[float, float | None, bool]


class TokamaxAttention(FusedAttention):
    """Attention by Tokamax, which selects the blocks and has no interpret mode."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: AttentionMask | None = None,
        bias: jax.Array | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Compute `layerkit.ops.attention.dot_product.dot_product_attention` by Tokamax.

        Args:
          query: `[batch, queries, heads, head_dim]`.
          key: `[batch, keys, kv_heads, head_dim]`.
          value: `[batch, keys, kv_heads, value_dim]`.
          mask: Mask of self-attention in row order; None for all pairs.
          bias: `[batch or 1, heads or 1, queries, keys]`; None for no bias.
          sinks: `[heads]`; None for no sinks.

        Returns:
          `[batch, queries, heads, value_dim]`, NaN in rows of `find_split_documents`: which tokens
          a document has is known at run time only.
        """
        options = self.scale, self.logit_cap, mask is not None and mask.causal
        ranges = (None, None) if mask is None else key_ranges(mask)
        if mask is not None and mask.query_segments is not None:
            is_split = find_split_documents(mask.query_segments, mask.window)
            query = jnp.where(is_split[:, None, None, None], jnp.nan, query)
        return _attend(options, sinks, query, key, value, bias, ranges)


def key_ranges(mask: AttentionMask) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the first key of each query and the end of its keys, int32 `[batch, 1, queries]`.

    None stands for no bound of its own; the end of a causal mask is not included.

    Args:
      mask: Mask of self-attention in row order, whose segments are runs of consecutive tokens.
    """
    segments, length = mask.query_segments, mask.query_positions.shape[1]
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    start = end = None
    if segments is not None:
        changes = segments[:, 1:] != segments[:, :-1]
        is_first = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
        start = jax.lax.cummax(jnp.where(is_first, positions, 0), axis=1)
        is_last = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
        end = jax.lax.cummin(jnp.where(is_last, positions + 1, length), axis=1, reverse=True)
    if mask.window is not None:
        start = jnp.maximum(0 if start is None else start, positions - (mask.window - 1))
        end = jnp.minimum(length if end is None else end, positions + mask.window)
    end = None if mask.causal else end
    return start if start is None else start[:, None], end if end is None else end[:, None]


def find_split_documents(segments: jax.Array, window: int | None) -> jax.Array:
    """Return whether a document sees its tokens before other ones or padding, bool `[batch]`.

    Args:
      segments: Number of each token's document, int32 `[batch, length]`; 0 is padding.
      window: Number of positions back that a query sees, itself included; None for all.
    """
    order = jnp.argsort(segments, axis=1)  # The order of the row within a document.
    sorted_segments, steps = jnp.take_along_axis(segments, order, axis=1), jnp.diff(order, axis=1)
    is_same = (jnp.diff(sorted_segments, axis=1) == 0) & (sorted_segments[:, 1:] != 0)
    is_seen = (steps > 1) & (steps < (segments.shape[1] if window is None else window))
    return jnp.any(is_same & is_seen, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, sinks: jax.Array | None, *inputs: Any) -> jax.Array:
    return _forward(options, sinks, *inputs)[0]


def _forward(options: _Options, sinks: jax.Array | None, *inputs: Any) -> tuple[jax.Array, Any]:
    out, (largest, total) = tokamax_attention(options, *inputs)
    if sinks is not None:
        # The softmax of [batch, heads, queries] with one more logit, relative to the new maximum.
        sink = sinks.astype(jnp.float32)[None, :, None]
        maximum = jnp.maximum(largest, sink)
        key_total = total * jnp.exp(largest - maximum)
        largest, total = maximum, key_total + jnp.exp(sink - maximum)
        share = jnp.swapaxes(key_total / total, 1, 2)[..., None]
        out = (out.astype(jnp.float32) * share).astype(out.dtype)
    return out, (inputs, sinks, out, (largest, total))


def _backward(options: _Options, residuals: Any, out_gradient: jax.Array) -> Any:
    inputs, sinks, out, softmax = residuals
    changes = tokamax_attention_gradients(
        options, *inputs, softmax=softmax, out=out, out_gradient=out_gradient
    )
    sink_gradient = None
    if sinks is not None:
        largest, total = softmax
        weight = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - largest) / total
        products = (out.astype(jnp.float32) * out_gradient.astype(jnp.float32)).sum(axis=-1)
        sink_gradient = (
            -(weight * jnp.swapaxes(products, 1, 2)).sum(axis=(0, 2)).astype(sinks.dtype)
        )
    return sink_gradient, *(changes.get(name) for name in ("q", "k", "v", "bias")), (None, None)


_attend.defvjp(_forward, _backward)


# The count of FLOPs reads the names and the first arguments of the two functions below.
@functools.partial(jax.jit, static_argnums=(0,))
def tokamax_attention(options: _Options, *inputs: Any) -> Any:
    """Return outputs and (maximum, sum) of each softmax, float32 `[batch, heads, queries]`."""
    operation, _, arguments, keywords = _bind(options, inputs)
    return operation(*arguments, return_residuals=True, **keywords)


@functools.partial(jax.jit, static_argnums=(0,))
def tokamax_attention_gradients(
    options: _Options,
    *inputs: Any,
    softmax: Any,
    out: jax.Array,
    out_gradient: jax.Array,
) -> Any:
    """Return the gradients of queries, keys, values and bias, `[batch, length, heads, dims]`."""
    _, gradient, arguments, keywords = _bind(options, inputs)
    bound = gradient.bind(softmax, out, out_gradient, *arguments, **keywords)
    gradient = gradient.replace(config=bound.heuristics_config)
    return gradient(softmax, out, out_gradient, *arguments, **keywords)


def _bind(options: _Options, inputs: Any) -> tuple[Any, ...]:
    """Return Tokamax's (operation, operation of its gradients, arguments, keywords)."""
    from tokamax._src.ops.attention import base, pallas_mosaic_gpu

    query, key, value, bias, (start, end) = inputs
    scale, logit_cap, is_causal = options
    operation = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()
    bound = operation.bind(
        query,
        key,
        value,
        bias=bias,
        logits_scale=scale,
        logits_soft_cap=logit_cap,
        mask=base.Mask(k_start=start, k_end=end, is_causal=is_causal),
    )
    keywords = {name: value for name, value in bound.kwargs.items() if name != "return_residuals"}
    # Without a configuration Tokamax looks for measured ones and warns of each shape without.
    chosen = operation.replace(config=bound.heuristics_config)
    return chosen, operation.vjp, bound.args, keywords


@functools.cache
def find_missing_tokamax() -> str:
    """Return how to install Tokamax, or "" if it is installed."""
    if importlib.util.find_spec("tokamax") is not None:
        return ""
    return "tokamax is not installed: pip install tokamax==0.0.17, in Python 3.12 or later"
