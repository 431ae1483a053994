"""Products of NVFP4 numbers: 4-bit floats in blocks of 16, with scales of blocks and tensors.

The recipe of training is that of NVIDIA, "Pretraining Large Language Models with NVFP4" (2025,
arXiv:2509.25149):

- Numbers are e2m1: 0, ½, 1, 1½, 2, 3, 4 and 6 with a sign. A block has a scale in e4m3, and the
  tensor has one in float32, by which the scales of blocks use all of e4m3.
- A block of activations or gradients is 16 numbers of the contracted axis. A block of weights is
  16 × 16, so that the forward and the backward product multiply by the same numbers.
- Gradients are rounded stochastically: up or down with probabilities that make the mean exact.
- Both factors of a weight's gradient are multiplied by an orthogonal matrix along the tokens, 16 at
  a time, which cancels out in the product and spreads the largest values: a Hadamard matrix with
  random signs.

The gradient of rounding is that of the identity.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from layerkit.layers.quantization.current_scaling import largest_of_group, scale_of

BLOCK_SIZE = 16
_VALUE, _SCALE = jnp.float4_e2m1fn, jnp.float8_e4m3fn
_LARGEST_VALUE, _LARGEST_SCALE = 6.0, 448.0
# One sign for each token of a block, drawn once. All layers and steps share them, as in the paper.
_SIGNS = np.array([1, 1, -1, 1, -1, -1, -1, 1, -1, 1, 1, 1, -1, 1, -1, -1])
_SYLVESTER = reduce(np.kron, [np.array([[1, 1], [1, -1]])] * 4)
# Its rows are orthonormal.
ROTATION = _SIGNS[:, None] * _SYLVESTER / np.sqrt(BLOCK_SIZE)


class NvFp4Dot(BlockScaledDot):
    """A product of factors and of output gradients in NVFP4, for Blackwell GPUs and CPUs.

    In training, gradients are rounded stochastically, for which the layer needs a key. Outside of
    training they are rounded to the nearest number.
    """

    def multiply(self, x: jax.Array, w: jax.Array, kernel: Kernel) -> jax.Array:
        """Multiply `[group, tokens, in]` by `[group, in, out]`; see `nvfp4_matmul`.

        Raises:
          ConfigError: The layer is in training, and the caller gave no key.
        """
        return nvfp4_matmul(x, w, self.next_prng_key() if self.is_training else None, kernel)

    def rounded(
        self, rows: jax.Array, w: jax.Array, product: GroupedProduct
    ) -> tuple[jax.Array, jax.Array]:
        """Round sorted rows `[rows, in]` and weights `[group, in, out]`; both stay float32.

        The rows of a group share the scale of a tensor, as do its weights.
        """
        largest = jnp.max(jnp.abs(rows.astype(jnp.float32)), axis=1)
        scale = _tensor_scale(largest_of_group(largest, product))[:, None]
        rounded_rows = restored(_round(rows, scale)) * scale
        scale = _tensor_scale(product.maximum(_largest(w)))
        rounded_w = restored(_round_weights(w, scale, contracted=1)) * scale
        return rounded_rows[:, : rows.shape[1]], rounded_w[..., : w.shape[1]].swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def nvfp4_matmul(x: jax.Array, w: jax.Array, key: jax.Array | None, kernel: Kernel) -> jax.Array:
    """Multiply `[group, tokens, in]` by `[group, in, out]` in NVFP4, in the dtype of `x`.

    Without a key, gradients are rounded to the nearest number.
    """
    del key
    return _times_weights(x, w, kernel, contracted=1)


def _forward(
    x: jax.Array, w: jax.Array, key: jax.Array | None, kernel: Kernel
) -> tuple[jax.Array, Any]:
    return nvfp4_matmul(x, w, key, kernel), (x, w, key)


def _backward(kernel: Kernel, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    x, w, key = saved
    of_inputs, of_weights = (None, None) if key is None else jax.random.split(key)
    of_x = _times_weights(g, w, kernel, contracted=2, key=of_inputs)
    left, right = _rotated(x), _rotated(g)
    left_scale, right_scale = _tensor_scale(_largest(left)), _tensor_scale(_largest(right))
    blocks = _round(left, left_scale), _round(right, right_scale, key=of_weights)
    of_w = multiply_blocks(*blocks, kernel, jnp.float32) * left_scale * right_scale
    of_key = None if key is None else np.zeros(key.shape, jax.dtypes.float0)
    return of_x, of_w.astype(w.dtype), of_key


nvfp4_matmul.defvjp(_forward, _backward)


def _times_weights(
    x: jax.Array, w: jax.Array, kernel: Kernel, *, contracted: int, key: jax.Array | None = None
) -> jax.Array:
    """Multiply `[group, tokens, k]` by `[group, in, out]`, whose axis `contracted` is k.

    A key rounds `x` stochastically. The result has the dtype of `x`.
    """
    x_scale, w_scale = _tensor_scale(_largest(x)), _tensor_scale(_largest(w))
    blocks = _round(x, x_scale, key=key), _round_weights(w, w_scale, contracted=contracted)
    # The product of both scales could underflow.
    return (multiply_blocks(*blocks, kernel, jnp.float32) * x_scale * w_scale).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Return `[group, tokens, dims]` as float32 `[group, dims, tokens]`, rotated by `ROTATION`."""
    # The padding is part of the product, since the rotation of a block mixes all of its numbers.
    tokens_last = padded(x, 1).astype(x.dtype).swapaxes(1, 2)
    blocks = tokens_last.reshape(*tokens_last.shape[:2], -1, BLOCK_SIZE)
    # A quarter with a sign is exact in every dtype.
    matrix = jnp.asarray(ROTATION, x.dtype)
    rotated = jnp.einsum("gdbi,ij->gdbj", blocks, matrix, preferred_element_type=jnp.float32)
    return rotated.reshape(tokens_last.shape)


def _largest(x: jax.Array) -> jax.Array:
    """Return the largest absolute value of each group of `[group, ...]`, `[group, 1, 1]`."""
    return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=(1, 2), keepdims=True)


def _tensor_scale(largest: jax.Array) -> jax.Array:
    """Return the float32 scale that maps the largest value `[...]` to the largest of NVFP4.

    The scale of a tensor with a number that is not finite is NaN, since e2m1 has no such number.
    """
    scale = scale_of(largest, _LARGEST_VALUE * _LARGEST_SCALE)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _round(x: jax.Array, scale: jax.Array, *, key: jax.Array | None = None) -> Blocks:
    """Round `[..., size]` to e2m1 with an e4m3 scale for each 16 numbers of the last axis.

    Args:
      x: Floats `[..., size]`.
      scale: Scale of the tensor, by which `x` is divided first.
      key: Key to round stochastically; None to round to the nearest number.
    """
    wide = padded(x, -1) / scale
    blocks = wide.reshape(*wide.shape[:-1], -1, BLOCK_SIZE)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    scales = _block_scales(largest)
    if key is not None:
        # No number may be clipped, for the mean to be exact. The largest of a tensor may exceed the
        # largest scale by a rounding error.
        wide_scales = scales.astype(jnp.float32)
        is_below = (wide_scales * _LARGEST_VALUE < largest) & (wide_scales < _LARGEST_SCALE)
        bits = lax.bitcast_convert_type(scales, jnp.uint8) + is_below.astype(jnp.uint8)
        scales = jnp.where(is_below, lax.bitcast_convert_type(bits, _SCALE), scales)
    scaled = (blocks * _inverse(scales)[..., None]).reshape(wide.shape)
    return Blocks(_to_e2m1(scaled, key), scales)


def _round_weights(w: jax.Array, scale: jax.Array, *, contracted: int) -> Blocks:
    """Round `[group, in, out]` to e2m1 with an e4m3 scale for each 16 × 16 numbers.

    The result is `[group, free, contracted]`, where the contracted axis is padded.
    """
    wide = padded(w, 1, 2) / scale
    if contracted == 1:
        wide = wide.swapaxes(1, 2)
    groups, free, size = wide.shape
    squares = wide.reshape(groups, free // BLOCK_SIZE, BLOCK_SIZE, -1, BLOCK_SIZE)
    scales = _block_scales(jnp.max(jnp.abs(squares), axis=(2, 4)))
    values = squares * _inverse(scales)[:, :, None, :, None]
    num_free = w.shape[3 - contracted]
    values = _to_e2m1(values.reshape(groups, free, size)[:, :num_free], None)
    return Blocks(values, jnp.repeat(scales, BLOCK_SIZE, axis=1)[:, :num_free])


def _block_scales(largest: jax.Array) -> jax.Array:
    """Return the e4m3 scales that map the largest values `[...]` of blocks to 6."""
    return jnp.clip(largest / _LARGEST_VALUE, 0.0, _LARGEST_SCALE).astype(_SCALE)


def _inverse(scales: jax.Array) -> jax.Array:
    """Return 1 / scales in float32; 0 for the scale 0, whose numbers are too small for e4m3."""
    wide = scales.astype(jnp.float32)
    return jnp.where(wide == 0.0, 0.0, 1.0 / wide)


def _to_e2m1(x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Round float32 `[...]` to e2m1, to the nearest number or, with a key, stochastically."""
    size = jnp.minimum(jnp.abs(x), _LARGEST_VALUE)
    step = jnp.where(size < 2.0, 0.5, jnp.where(size < 4.0, 1.0, 2.0))
    steps = size / step
    # XLA's conversion rounds to float16 first, and so twice, on some devices.
    steps = jnp.round(steps) if key is None else jnp.floor(steps + jax.random.uniform(key, x.shape))
    return jnp.copysign(steps * step, x).astype(_VALUE)
