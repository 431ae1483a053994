"""Products of MXFP8 numbers: 8-bit floats in blocks of 32 that share a scale.

The format is that of the OCP Microscaling Formats (MX) Specification 1.0, 2023: blocks of 32
numbers along the contracted axis, in e4m3, with a power of two as their scale. As in Mishra et al.,
"Recipes for Pre-training LLMs with MXFP8" (2025, arXiv:2506.08027), gradients are rounded to e4m3
too, since a block spans fewer magnitudes than a tensor, and the scale of a block is rounded up, so
that no number is clipped. The gradient of rounding is that of the identity.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from layerkit.layers.basic.dots import GroupedProduct
from layerkit.layers.quantization.block_scaling import (
    Blocks,
    BlockScaledDot,
    Kernel,
    multiply_blocks,
    padded,
    restored,
)

BLOCK_SIZE = 32
_VALUE, _SCALE = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
_MANTISSA_BITS = 23  # of float32


class MxFp8Dot(BlockScaledDot):
    """A product of factors and of output gradients in MXFP8, for Blackwell GPUs and CPUs."""

    def multiply(self, x: jax.Array, w: jax.Array, kernel: Kernel) -> jax.Array:
        """Multiply `[group, tokens, in]` by `[group, in, out]`; see `mxfp8_matmul`."""
        return mxfp8_matmul(x, w, kernel)

    def rounded(
        self, rows: jax.Array, w: jax.Array, product: GroupedProduct
    ) -> tuple[jax.Array, jax.Array]:
        """Round sorted rows `[rows, in]` and weights `[group, in, out]`; both stay float32."""
        del product
        size = rows.shape[-1]
        rounded_w = restored(round_to_mxfp8(w.swapaxes(1, 2)))[..., :size]
        return restored(round_to_mxfp8(rows))[..., :size], rounded_w.swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def mxfp8_matmul(x: jax.Array, w: jax.Array, kernel: Kernel) -> jax.Array:
    """Multiply `[group, tokens, in]` by `[group, in, out]` in MXFP8, in the dtype of `x`."""
    return _product(x, w.swapaxes(1, 2), kernel)


def _forward(x: jax.Array, w: jax.Array, kernel: Kernel) -> tuple[jax.Array, Any]:
    return mxfp8_matmul(x, w, kernel), (x, w)


def _backward(kernel: Kernel, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    of_x = _product(g, w, kernel)
    of_w = _product(x.swapaxes(1, 2), g.swapaxes(1, 2), kernel)
    return of_x.astype(x.dtype), of_w.astype(w.dtype)


mxfp8_matmul.defvjp(_forward, _backward)


def _product(lhs: jax.Array, rhs: jax.Array, kernel: Kernel) -> jax.Array:
    """Multiply `[group, m, k]` by `[group, n, k]`: `[group, m, n]` in the dtype of `lhs`."""
    return multiply_blocks(round_to_mxfp8(lhs), round_to_mxfp8(rhs), kernel, lhs.dtype)


def round_to_mxfp8(x: jax.Array) -> Blocks:
    """Round floats `[..., size]` to MXFP8 with a scale for each 32 numbers of the last axis.

    Returns:
      e4m3 values `[..., padded]` and e8m0 scales `[..., padded / 32]`, where `padded` is the size
      rounded up to a multiple of 32 and the padding is 0. A block with a number that is not finite
      has the scale NaN.
    """
    wide = padded(x, -1)
    blocks = wide.reshape(*wide.shape[:-1], -1, BLOCK_SIZE)
    most = float(jnp.finfo(_VALUE).max)
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), axis=-1) / most, jnp.uint32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & (2**_MANTISSA_BITS - 1)
    # A scale below 2**-126 is not a normal float32; 255 stands for NaN in e8m0.
    exponent = jnp.clip(exponent + (mantissa > 0), 1, 255)
    scale = lax.bitcast_convert_type(exponent << _MANTISSA_BITS, jnp.float32)
    values = (blocks / scale[..., None]).astype(_VALUE).reshape(wide.shape)
    return Blocks(values, lax.bitcast_convert_type(exponent.astype(jnp.uint8), _SCALE))
