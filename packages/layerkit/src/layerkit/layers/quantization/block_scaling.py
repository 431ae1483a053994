"""Products of MXFP8 numbers: 8-bit floats in blocks of 32 that share a scale.

The format is that of the OCP Microscaling Formats (MX) Specification 1.0, 2023: blocks of 32
numbers along the contracted axis, in e4m3, with a power of two as their scale. As in Mishra et al.,
"Recipes for Pre-training LLMs with MXFP8" (2025, arXiv:2506.08027), gradients are rounded to e4m3
too, since a block spans fewer magnitudes than a tensor, and the scale of a block is rounded up, so
that no number is clipped. The gradient of rounding is that of the identity.

Each of the three products of a training step contracts another axis, so each tensor is rounded
twice. Blackwell GPUs multiply the rounded factors by `jax.nn.scaled_matmul`, which cuDNN computes.
On CPUs, for tests, they are multiplied in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from layerkit.errors import ConfigError
from layerkit.layers.products import Dot, GroupedProduct
from layerkit.layers.remat import name_product
from layerkit.sharding import model_device

Kernel = Literal["cudnn", "float32"]
BLOCK_SIZE = 32
_VALUE, _SCALE = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
_MANTISSA_BITS = 23  # of float32
# `jax.nn.scaled_matmul` gathers factors whose contracted axis and another axis are both split, as
# with split hidden features. It also gathers split positions, since they are merged with rows.
_UNSPLIT_AXES = ("act_mlp", "act_heads", "length", "residual_length")
_BLACKWELL = re.compile(r"NVIDIA G?B\d{3}\b")


class MxFp8Dot(Dot):
    """A product of factors and of output gradients in MXFP8, for Blackwell GPUs and CPUs.

    Axes whose size is no multiple of 32 are padded with zeros where they are contracted.
    """

    def fprop(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiply `[..., in]` by `[in, out]`; the result has the dtype of `x`.

        A group of weights `[group, in, out]` multiplies inputs `[group, tokens, in]`.

        Raises:
          ConfigError: The devices are neither Blackwell GPUs nor CPUs, or the mesh splits hidden
            features or positions.
        """
        kernel = self._kernel()
        leading, is_batched = x.shape[:-1], w.ndim > 2
        if not is_batched:
            x, w = x.reshape(1, math.prod(leading), x.shape[-1]), w[None]
        product = mxfp8_matmul(x, w, kernel).reshape(*leading, w.shape[-1])
        return name_product(product, is_batched=is_batched)

    @nn.nowrap
    def grouped(
        self, rows: jax.Array, w: jax.Array, product: GroupedProduct, own: Mapping[str, jax.Array]
    ) -> jax.Array:
        """Multiply sorted rows `[rows, in]` by the weights `[group, in, out]` of their groups.

        Experts with a capacity evaluate by this method. The rounded factors are multiplied in
        their dtype before rounding.

        Raises:
          ConfigError: As `fprop`; or the layer is in training, where blocks of 32 rows, which the
            gradient of a weight contracts, would belong to several groups.
        """
        del own
        self._kernel()
        if self.is_training:
            raise self._refusal(
                "Fp8CurrentDot, Fp8Dot or Int8Dot, since experts have no capacity",
                hint="Or set capacity_factor.",
            )
        rounded_w = _restored(w.swapaxes(1, 2)).swapaxes(1, 2)
        return product(_restored(rows).astype(rows.dtype), rounded_w.astype(w.dtype))

    @nn.nowrap
    def _kernel(self) -> Kernel:
        """Return the kernel of the model's devices; raise ConfigError if they have none."""
        sharding = self.inherited("sharding")
        nearest = "The nearest product is Fp8CurrentDot (QUANTIZATION=fp8_current)."
        for name in _UNSPLIT_AXES:
            if sharding is not None and sharding.is_split(name):
                raise self._refusal(
                    f"a product that supports the mesh, which splits {name!r}",
                    hint=f"MXFP8 supports meshes of data, fsdp, expert and stage. {nearest}",
                )
        device = model_device(sharding)
        if _BLACKWELL.match(device.device_kind):
            return "cudnn"
        if device.platform == "cpu":
            return "float32"
        # XLA would compute `scaled_matmul` in float32 on older GPUs.
        raise self._refusal(
            f"a product that the device kind {device.device_kind!r} supports",
            hint=f"MXFP8 needs a B200, GB200, B300 or GB300. {nearest}",
        )

    @nn.nowrap
    def _refusal(self, expected: str, *, hint: str) -> ConfigError:
        return ConfigError(
            owner=self.path_name,
            field="dot_tpl",
            value=type(self).__name__,
            expected=expected,
            hint=hint,
        )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def mxfp8_matmul(x: jax.Array, w: jax.Array, kernel: Kernel) -> jax.Array:
    """Multiply `[group, tokens, in]` by `[group, in, out]` in MXFP8.

    Args:
      x: `[group, tokens, in]`.
      w: `[group, in, out]`.
      kernel: `cudnn` for Blackwell GPUs; `float32` for CPUs.

    Returns:
      `[group, tokens, out]` in the dtype of `x`.
    """
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
    if kernel == "cudnn":
        left, left_scale = round_to_mxfp8(lhs)
        right, right_scale = round_to_mxfp8(rhs)
        return jax.nn.scaled_matmul(
            left, right, left_scale, right_scale, preferred_element_type=lhs.dtype
        )
    return jnp.einsum("gmk,gnk->gmn", _restored(lhs), _restored(rhs)).astype(lhs.dtype)


def _restored(x: jax.Array) -> jax.Array:
    """Return `[..., size]` rounded to MXFP8, in float32 without padding."""
    values, scales = round_to_mxfp8(x)
    scale_of_value = jnp.repeat(scales.astype(jnp.float32), BLOCK_SIZE, axis=-1)
    return (values.astype(jnp.float32) * scale_of_value)[..., : x.shape[-1]]


def round_to_mxfp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round floats to MXFP8 with a scale for each 32 numbers of the last axis.

    Args:
      x: `[..., size]`.

    Returns:
      (e4m3 values `[..., padded]`, e8m0 scales `[..., padded / 32]`), where `padded` is the size
      rounded up to a multiple of 32 and the padding is 0. A block with a number that is not finite
      has the scale NaN.
    """
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK_SIZE)]
    wide = jnp.pad(x.astype(jnp.float32), padding)
    blocks = wide.reshape(*wide.shape[:-1], -1, BLOCK_SIZE)
    most = float(jnp.finfo(_VALUE).max)
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), axis=-1) / most, jnp.uint32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & (2**_MANTISSA_BITS - 1)
    # A scale below 2**-126 is not a normal float32; 255 stands for NaN in e8m0.
    exponent = jnp.clip(exponent + (mantissa > 0), 1, 255)
    scale = lax.bitcast_convert_type(exponent << _MANTISSA_BITS, jnp.float32)
    values = (blocks / scale[..., None]).astype(_VALUE).reshape(wide.shape)
    return values, lax.bitcast_convert_type(exponent.astype(jnp.uint8), _SCALE)
