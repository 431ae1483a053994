"""Normalization of the last axis of `[..., dims]`: RmsNorm, with and without scale, and LayerNorm.

Statistics are those of one position, so padding has no influence. They are computed in float32,
since bfloat16 sums lose most of their digits. The learned scale is `scale_offset + w`. Epsilon and
offset are fields because published weights depend on them: Llama stores the scale (offset 0) and
Gemma the scale minus 1 (offset 1). Adding 1 during an import would not be exact to the bit.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_last_axis, check_non_negative, check_sizes
from layerkit.field_checks import Conditions
from layerkit.weights import WeightHParams, WeightInit


class BaseNormalization(BaseLayer):
    """Base of the layers that normalize `[..., dims]`; templates of norms accept its subclasses."""


class RmsNorm(BaseNormalization):
    """RMS normalization y = x / √(mean(x²) + ε) · (offset + w) (Zhang and Sennrich, 2019).

    Maps `[..., dims]` to `[..., dims]` in the compute dtype; the mean is over the last axis.

    >>> norm = RmsNorm(dims=8)
    >>> jax.tree.map(jnp.shape, norm.init(jax.random.key(0)))
    {'params': {'scale': (8,)}}

    Attributes:
      dims: Size of the last axis.
      epsilon: ε, which keeps the output for zeros finite. 1e-6 is that of T5 and Gemma.
      scale_offset: Offset of the scale from the stored weight, which starts at 1 - scale_offset.
        0 stores the scale, as most model families do.
    """

    dims: int = 0
    epsilon: float = 1e-6
    scale_offset: float = 0.0

    def setup(self) -> None:
        """Create the scale."""
        check_sizes(self, dims=self.dims)
        check_non_negative(self, epsilon=self.epsilon)
        unit = WeightInit.Constant(1.0 - self.scale_offset)
        self.create_variable("scale", WeightHParams((self.dims,), axes=("norm",), init=unit))

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Normalize `[..., dims]`.

        Raises:
          ConfigError: The size of the last axis of the inputs is not `dims`.
        """
        check_last_axis(self, inputs, dims=self.dims)
        x = inputs.astype(jnp.float32)
        normalized = x * jax.lax.rsqrt(mean_square(x) + self.epsilon)
        scaled = normalized * (self.scale_offset + _float32(self.theta.scale))
        return scaled.astype(self.compute_dtype)


class RmsNormNoScale(BaseNormalization):
    """RMS normalization y = x / √(mean(x²) + ε) without weights, for any size of the last axis.

    Maps `[..., dims]` to `[..., dims]` in the compute dtype.

    Attributes:
      epsilon: ε, which keeps the output for zeros finite.
    """

    epsilon: float = 1e-6

    def setup(self) -> None:
        """Check the fields."""
        check_non_negative(self, epsilon=self.epsilon)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Normalize `[..., dims]`."""
        x = inputs.astype(jnp.float32)
        normalized = x * jax.lax.rsqrt(mean_square(x) + self.epsilon)
        return normalized.astype(self.compute_dtype)


class LayerNorm(BaseNormalization):
    """Layer normalization y = (x - mean) / √(variance + ε) · (offset + w) + b (Ba et al., 2016).

    Maps `[..., dims]` to `[..., dims]` in the compute dtype; statistics are over the last axis.

    >>> norm = LayerNorm(dims=8)
    >>> jax.tree.map(jnp.shape, norm.init(jax.random.key(0)))
    {'params': {'bias': (8,), 'scale': (8,)}}

    Attributes:
      dims: Size of the last axis.
      epsilon: ε, which keeps the output for constant inputs finite.
      scale_offset: Offset of the scale from the stored weight, which starts at 1 - scale_offset.
        With 1, as in Pax, weight decay pulls the scale towards 1 instead of 0.
      use_scale: True to multiply by offset + w.
      use_bias: True to add b, which starts at 0.
    """

    used_only_if: ClassVar[Conditions] = {"scale_offset": "use_scale"}

    dims: int = 0
    epsilon: float = 1e-6
    scale_offset: float = 1.0
    use_scale: bool = True
    use_bias: bool = True

    def setup(self) -> None:
        """Create scale and bias."""
        check_sizes(self, dims=self.dims)
        check_non_negative(self, epsilon=self.epsilon)
        if self.use_scale:
            unit = WeightInit.Constant(1.0 - self.scale_offset)
            self.create_variable("scale", WeightHParams((self.dims,), axes=("norm",), init=unit))
        if self.use_bias:
            zero = WeightInit.Constant(0.0)
            self.create_variable("bias", WeightHParams((self.dims,), axes=("norm",), init=zero))

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Normalize `[..., dims]`.

        Raises:
          ConfigError: The size of the last axis of the inputs is not `dims`.
        """
        check_last_axis(self, inputs, dims=self.dims)
        x = inputs.astype(jnp.float32)
        centered = x - jnp.mean(x, axis=-1, keepdims=True)
        normalized = centered * jax.lax.rsqrt(mean_square(centered) + self.epsilon)
        if self.use_scale:
            normalized = normalized * (self.scale_offset + _float32(self.theta.scale))
        if self.use_bias:
            normalized = normalized + _float32(self.theta.bias)
        return normalized.astype(self.compute_dtype)


def mean_square(x: jax.Array) -> jax.Array:
    """Return the mean of x² over the last axis: `[..., dims]` → `[..., 1]`."""
    return jnp.mean(jnp.square(x), axis=-1, keepdims=True)


def _float32(weight: jax.Array) -> jax.Array:
    # float32, because 1 + 0.001 is 1 in bfloat16.
    return weight.astype(jnp.float32)
