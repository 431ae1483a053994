"""Products of numbers of 4 or 8 bits in blocks that share a scale, for Blackwell GPUs.

`MxFp8Dot` and `NvFp4Dot` choose formats and rounding. Their factors are `Blocks` with scales along
the contracted axis. Each of the three products of a training step contracts another axis, so each
tensor is rounded twice. Blackwell GPUs multiply blocks by `jax.nn.scaled_matmul`, which cuDNN
computes. On CPUs, for tests, they are multiplied in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from layerkit.base.sharding import model_device
from layerkit.errors import ConfigError
from layerkit.layers.basic.dots import Dot, GroupedProduct
from layerkit.ops.remat import name_product

Kernel = Literal["cudnn", "float32"]
# The kernel contracts a multiple of 32 numbers.
CONTRACTED_MULTIPLE = 32
# `jax.nn.scaled_matmul` gathers factors whose contracted axis and another axis are both split, as
# with split hidden features. It also gathers split positions, since they are merged with rows.
_UNSPLIT_AXES = ("act_mlp", "act_heads", "length", "residual_length")
_BLACKWELL = re.compile(r"NVIDIA G?B\d{3}\b")


class Blocks(NamedTuple):
    """Numbers of 4 or 8 bits in blocks along the last axis, each with a scale.

    Attributes:
      values: `[..., size]`.
      scales: `[..., size / block size]`.
    """

    values: jax.Array
    scales: jax.Array


class BlockScaledDot(Dot):
    """Base class of products of `Blocks`, for Blackwell GPUs and CPUs.

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
        product = self.multiply(x, w, kernel).reshape(*leading, w.shape[-1])
        return name_product(product, is_batched=is_batched)

    @nn.nowrap
    def multiply(self, x: jax.Array, w: jax.Array, kernel: Kernel) -> jax.Array:
        """Multiply `[group, tokens, in]` by `[group, in, out]`: `[group, tokens, out]`.

        Args:
          x: Activations.
          w: Weights.
          kernel: `cudnn` for Blackwell GPUs; `float32` for CPUs.
        """
        raise NotImplementedError

    @nn.nowrap
    def rounded(
        self, rows: jax.Array, w: jax.Array, product: GroupedProduct
    ) -> tuple[jax.Array, jax.Array]:
        """Round sorted rows `[rows, in]` and weights `[group, in, out]`; both stay float32.

        Args:
          rows: Activations sorted by group; unused rows are finite.
          w: Weights of the groups on this device.
          product: Product of these rows, which knows their groups.
        """
        raise NotImplementedError

    def grouped(
        self,
        rows: jax.Array,
        w: jax.Array,
        product: GroupedProduct,
        shards: Mapping[str, jax.Array],
    ) -> jax.Array:
        """Multiply sorted rows `[rows, in]` by the weights `[group, in, out]` of their groups.

        Experts with a capacity evaluate by this method. The rounded factors are multiplied in
        their dtype before rounding.

        Raises:
          ConfigError: As `fprop`; or the layer is in training, where blocks of rows, which the
            gradient of a weight contracts, would belong to several groups.
        """
        del shards
        self._kernel()
        if self.is_training:
            raise self._refusal(
                "Fp8CurrentDot, Fp8Dot or Int8Dot, since experts have no capacity",
                hint="Or set capacity_factor.",
            )
        rounded_rows, rounded_w = self.rounded(rows, w, product)
        return product(rounded_rows.astype(rows.dtype), rounded_w.astype(w.dtype))

    def _kernel(self) -> Kernel:
        """Return the kernel of the model's devices; raise ConfigError if they have none."""
        sharding = self.inherited("sharding")
        name = type(self).__name__
        nearest = "The nearest product is Fp8CurrentDot (QUANTIZATION=fp8_current)."
        for axis in _UNSPLIT_AXES:
            if sharding is not None and sharding.is_split(axis):
                raise self._refusal(
                    f"a product that supports the mesh, which splits {axis!r}",
                    hint=f"{name} supports meshes of data, fsdp, expert and stage. {nearest}",
                )
        device = model_device(sharding)
        if _BLACKWELL.match(device.device_kind):
            return "cudnn"
        if device.platform == "cpu":
            return "float32"
        # XLA would compute `scaled_matmul` in float32 on older GPUs.
        raise self._refusal(
            f"a product that the device kind {device.device_kind!r} supports",
            hint=f"{name} needs a B200, GB200, B300 or GB300. {nearest}",
        )

    def _refusal(self, expected: str, *, hint: str) -> ConfigError:
        return ConfigError(
            owner=self.path_name,
            field="dot_tpl",
            value=type(self).__name__,
            expected=expected,
            hint=hint,
        )


def multiply_blocks(left: Blocks, right: Blocks, kernel: Kernel, dtype: DTypeLike) -> jax.Array:
    """Multiply `[group, m, k]` by `[group, n, k]`: `[group, m, n]`.

    Args:
      left: Factor with blocks along k.
      right: Factor with blocks along k.
      kernel: `cudnn` for Blackwell GPUs; `float32` for CPUs.
      dtype: Dtype of the result. Sums are in float32.
    """
    if kernel == "cudnn":
        return jax.nn.scaled_matmul(
            left.values, right.values, left.scales, right.scales, preferred_element_type=dtype
        )
    return jnp.einsum("gmk,gnk->gmn", restored(left), restored(right)).astype(dtype)


def restored(blocks: Blocks) -> jax.Array:
    """Return the numbers `[..., size]` in float32."""
    values, scales = blocks.values, blocks.scales.astype(jnp.float32)
    scales = jnp.repeat(scales, values.shape[-1] // scales.shape[-1], axis=-1)
    return values.astype(jnp.float32) * scales


def padded(x: jax.Array, *axes: int) -> jax.Array:
    """Return float32 `[...]` with zeros at the end of axes, whose sizes become multiples of 32."""
    sizes = [0] * x.ndim
    for axis in axes:
        sizes[axis] = -x.shape[axis] % CONTRACTED_MULTIPLE
    return jnp.pad(x.astype(jnp.float32), [(0, size) for size in sizes])
