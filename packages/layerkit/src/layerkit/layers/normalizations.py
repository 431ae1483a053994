"""Normalisation of the last axis of `[..., dims]`: RmsNorm, with and without scale, and LayerNorm.

What they share: the statistics of a position come from that position alone, so padding never
counts; they are taken in float32 whatever the compute dtype, since sums of bfloat16 lose most of
their digits; and the learned scale enters as `scale_offset + w`. Epsilons and offsets are fields
because published weights depend on them: Llama stores the scale itself (offset 0), Gemma its
distance from 1 (offset 1), and an import that added or took 1 would no longer be exact to the bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_last_axis, check_non_negative, check_sizes
from layerkit.weights import WeightHParams, WeightInit


class RmsNorm(BaseLayer):
    """y = x / √(mean(x²) + ε) · (offset + w) (Zhang and Sennrich, 2019).

    `[..., dims]` → `[..., dims]`, mean over the last axis; y has the compute dtype.

    >>> norm = RmsNorm(dims=8)
    >>> jax.tree.map(jnp.shape, norm.init(jax.random.key(0)))
    {'params': {'scale': (8,)}}

    Attributes:
      dims: Size of the last axis.
      epsilon: Keeps a row of zeros finite. 1e-6 as in T5 and Gemma; other families differ.
      scale_offset: Added to the stored weight, which starts at 1 - scale_offset, so that the scale
        starts at 1. 0 stores the scale itself, as most families do.
    """

    dims: int = 0
    epsilon: float = 1e-6
    scale_offset: float = 0.0

    def setup(self) -> None:
        check_sizes(self, dims=self.dims)
        check_non_negative(self, epsilon=self.epsilon)
        unit = WeightInit.Constant(1.0 - self.scale_offset)
        self.create_variable("scale", WeightHParams((self.dims,), axes=("norm",), init=unit))

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """`[..., dims]` → `[..., dims]`.

        Raises:
          ValueError: the last axis of the inputs has another size.
        """
        check_last_axis(self, inputs, dims=self.dims)
        x = inputs.astype(jnp.float32)
        normalized = x * jax.lax.rsqrt(mean_square(x) + self.epsilon)
        scaled = scale_and_offset(normalized, self.scale_offset + _float32(self.theta.scale))
        return scaled.astype(self.compute_dtype)


class RmsNormNoScale(BaseLayer):
    """y = x / √(mean(x²) + ε): RmsNorm without weights, of any size of the last axis.

    `[..., dims]` → `[..., dims]`; y has the compute dtype.

    Attributes:
      epsilon: Keeps a row of zeros finite.
    """

    epsilon: float = 1e-6

    def setup(self) -> None:
        check_non_negative(self, epsilon=self.epsilon)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """`[..., dims]` → `[..., dims]`."""
        x = inputs.astype(jnp.float32)
        normalized = x * jax.lax.rsqrt(mean_square(x) + self.epsilon)
        return normalized.astype(self.compute_dtype)


class LayerNorm(BaseLayer):
    """y = (x - mean(x)) / √(variance(x) + ε) · (offset + w) + b (Ba et al., 2016).

    `[..., dims]` → `[..., dims]`, as `RmsNorm` of the centred input, plus a bias.

    >>> norm = LayerNorm(dims=8)
    >>> jax.tree.map(jnp.shape, norm.init(jax.random.key(0)))
    {'params': {'bias': (8,), 'scale': (8,)}}

    Attributes:
      dims: Size of the last axis.
      epsilon: Keeps a constant row finite.
      scale_offset: Added to the stored weight, which starts at 1 - scale_offset. 1 as in Pax:
        weight decay then pulls the scale towards 1 instead of 0.
      use_bias: Adds b, which starts at 0.
    """

    dims: int = 0
    epsilon: float = 1e-6
    scale_offset: float = 1.0
    use_bias: bool = True

    def setup(self) -> None:
        check_sizes(self, dims=self.dims)
        check_non_negative(self, epsilon=self.epsilon)
        unit = WeightInit.Constant(1.0 - self.scale_offset)
        self.create_variable("scale", WeightHParams((self.dims,), axes=("norm",), init=unit))
        if self.use_bias:
            zero = WeightInit.Constant(0.0)
            self.create_variable("bias", WeightHParams((self.dims,), axes=("norm",), init=zero))

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """`[..., dims]` → `[..., dims]`.

        Raises:
          ValueError: the last axis of the inputs has another size.
        """
        check_last_axis(self, inputs, dims=self.dims)
        x = inputs.astype(jnp.float32)
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        normalized = centred * jax.lax.rsqrt(mean_square(centred) + self.epsilon)
        scale = self.scale_offset + _float32(self.theta.scale)
        bias = _float32(self.theta.bias) if self.use_bias else None
        return scale_and_offset(normalized, scale, bias).astype(self.compute_dtype)


def mean_square(x: jax.Array) -> jax.Array:
    """The mean of x² over the last axis: `[..., dims]` → `[..., 1]`."""
    return jnp.mean(jnp.square(x), axis=-1, keepdims=True)


def scale_and_offset(x: jax.Array, scale: jax.Array, offset: jax.Array | None = None) -> jax.Array:
    """x·scale + offset, with `[dims]` for both: `[..., dims]` → `[..., dims]`."""
    scaled = x * scale
    return scaled if offset is None else scaled + offset


def _float32(weight: jax.Array) -> jax.Array:
    # offset + w is summed in float32: 1 + 0.001 is 1 in bfloat16.
    return weight.astype(jnp.float32)
