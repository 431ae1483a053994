"""Normalization of the last axis of `[..., dims]`: RmsNorm, with and without scale, and LayerNorm.

Statistics are those of one position, so padding has no influence. They are computed in float32,
since bfloat16 sums lose most of their digits. The learned scale is `scale_offset + w`. Epsilon and
offset are fields because published weights depend on them: Llama stores the scale (offset 0) and
Gemma the scale minus 1 (offset 1). Adding 1 during an import would not be exact to the bit.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config.checks import check_last_axis, check_non_negative, check_sizes
from layerkit.config.hparams import Conditions
from layerkit.ops.remat import is_in_remat, save_inputs


class BaseNormalization(BaseLayer):
    """Base of the layers that normalize `[..., dims]`; templates of norms accept its subclasses."""


class IdentityNorm(BaseNormalization):
    """No normalization, for a norm that a layer leaves out (ModernBERT).

    Attributes:
      dims: Size of the last axis.
    """

    dims: int = 0

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Return `[..., dims]` in the compute dtype."""
        check_last_axis(self, inputs, dims=self.dims)
        return self.cast(inputs)


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
        """Normalize `[..., dims]`."""
        check_last_axis(self, inputs, dims=self.dims)
        form = _form(self, subtracts_mean=False)
        return _normalize(form, inputs, self.scale_offset + _float32(self.theta.scale), None)


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
        form = _form(self, subtracts_mean=False)
        return _normalize(form, inputs, None, None)


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
            self.create_variable("scale", self._weight(1.0 - self.scale_offset))
        if self.use_bias:
            self.create_variable("bias", self._weight(0.0))

    def _weight(self, start: float) -> WeightHParams:
        return WeightHParams((self.dims,), axes=("norm",), init=WeightInit.Constant(start))

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Normalize `[..., dims]`."""
        check_last_axis(self, inputs, dims=self.dims)
        form = _form(self, subtracts_mean=True)
        scale = self.scale_offset + _float32(self.theta.scale) if self.use_scale else None
        bias = _float32(self.theta.bias) if self.use_bias else None
        return _normalize(form, inputs, scale, bias)


class LayerNormPerHead(LayerNorm):
    """Layer normalization of `[..., num_heads, dims]` with weights for each head (Command R+).

    The other fields are those of `LayerNorm`.

    Attributes:
      num_heads: Number of heads.
    """

    num_heads: int = 0

    def setup(self) -> None:
        """Create scale and bias, `[num_heads, dims]`."""
        check_sizes(self, num_heads=self.num_heads)
        super().setup()

    def _weight(self, start: float) -> WeightHParams:
        init = WeightInit.Constant(start)
        return WeightHParams((self.num_heads, self.dims), axes=(None, "norm"), init=init)


def mean_square(x: jax.Array) -> jax.Array:
    """Return the mean of x² over the last axis: `[..., dims]` → `[..., 1]`."""
    return jnp.mean(jnp.square(x), axis=-1, keepdims=True)


def _float32(weight: jax.Array) -> jax.Array:
    # float32, because 1 + 0.001 is 1 in bfloat16.
    return weight.astype(jnp.float32)


class _Form(NamedTuple):
    """What a normalization computes, apart from its arrays.

    Attributes:
      epsilon: ε.
      dtype: Dtype of the result.
      subtracts_mean: True for LayerNorm, False for RmsNorm.
      is_in_remat: True if a rematerialization policy decides what the backward pass keeps.
    """

    epsilon: float
    dtype: jnp.dtype
    subtracts_mean: bool
    is_in_remat: bool


def _form(layer: RmsNorm | RmsNormNoScale | LayerNorm, *, subtracts_mean: bool) -> _Form:
    return _Form(layer.epsilon, layer.compute_dtype, subtracts_mean, is_in_remat())


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _normalize(
    form: _Form, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    """Normalize `[..., dims]`; the backward pass keeps `x` and the statistics of each position."""
    return _outputs(form, x, scale, bias)[0]


@_normalize.defjvp
def _normalize_jvp(form: _Form, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, scale, bias = primals
    outputs, statistics = _outputs(form, x, scale, bias)
    # Otherwise JAX would keep the float32 factors of the tangents.
    tangent = save_inputs(functools.partial(_tangent, form), has_policy=form.is_in_remat)
    return outputs, tangent(x, scale, statistics, tangents)


def _outputs(
    form: _Form, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array]]:
    """Return outputs and statistics: mean (None for RmsNorm) and 1 / √(mean square + ε)."""
    centered, mean = x.astype(jnp.float32), None
    if form.subtracts_mean:
        mean = jnp.mean(centered, axis=-1, keepdims=True)
        centered = centered - mean
    factor = jax.lax.rsqrt(mean_square(centered) + form.epsilon)
    outputs = centered * factor
    if scale is not None:
        outputs = outputs * scale
    if bias is not None:
        outputs = outputs + bias
    return outputs.astype(form.dtype), (mean, factor)


def _tangent(
    form: _Form, x: jax.Array, scale: jax.Array | None, statistics: Any, tangents: Any
) -> jax.Array:
    """Return the tangent of the outputs; it is linear in those of x, scale and bias."""
    x_tangent, scale_tangent, bias_tangent = tangents
    mean, factor = statistics
    centered, change = x.astype(jnp.float32), x_tangent.astype(jnp.float32)
    if mean is not None:
        centered = centered - mean
    normalized = centered * factor
    common = normalized * jnp.mean(normalized * change, axis=-1, keepdims=True)
    if mean is not None:
        common = common + jnp.mean(change, axis=-1, keepdims=True)
    total = (change - common) * factor
    if scale is not None:
        total = total * scale + normalized * scale_tangent
    if bias_tangent is not None:
        total = total + bias_tangent
    return total.astype(form.dtype)
