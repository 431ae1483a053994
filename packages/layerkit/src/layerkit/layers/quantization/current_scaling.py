"""Products of 8-bit numbers whose scales come from the factors themselves, so they have no state.

`Fp8CurrentDot` rounds factors as `Fp8Dot` does (Micikevicius et al., "FP8 Formats for Deep
Learning", 2022), but divides by the largest value of the tensor of this step, which NVIDIA's
Transformer Engine calls current scaling. `Int8Dot` gives each token and each output its own scale
and sums in int32, as in AQT (Lew et al., "Accurate Quantized Training", 2022). The gradient of
rounding is that of the identity.

A factor is scaled by s = max|x| / largest value of the format, rounded, multiplied, and the
product is multiplied by both scales in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from layerkit.layers.basic.dots import Dot, GroupedProduct
from layerkit.ops.remat import name_product

Axes = tuple[int, ...]
# Contracted axes of both factors, and their batch axes, as in `lax.dot_general`.
Dims = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]

_E4M3, _E5M2, _INT8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The formats of a product and of its gradients.

    Attributes:
      factor: Dtype of inputs and weights.
      gradient: Dtype of the output's gradient.
      is_per_row: True for a scale of each index that is not contracted; False for one scale per
        tensor, or per member of a group of weights.
      rounds_weight_gradient: True if the gradient of the weight is a product of 8-bit numbers.
    """

    factor: Any
    gradient: Any
    is_per_row: bool
    rounds_weight_gradient: bool


FP8_CURRENT = Scheme(_E4M3, _E5M2, is_per_row=False, rounds_weight_gradient=True)
# Sums over tokens of gradients that are rounded to nearest would be biased towards 0.
INT8 = Scheme(_INT8, _INT8, is_per_row=True, rounds_weight_gradient=False)


class CurrentScalingDot(Dot):
    """The base class of products in the formats of a scheme.

    Attributes:
      scheme: Formats and scales.
    """

    scheme: ClassVar[Scheme]

    def fprop(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiply `[..., in]` by `[in, out]`; the result has the dtype of `x`.

        A group of weights `[group, in, out]` multiplies inputs `[group, tokens, in]`.
        """
        return name_product(scaled_matmul(x, w, self.scheme), is_batched=w.ndim > 2)

    def grouped(
        self,
        rows: jax.Array,
        w: jax.Array,
        product: GroupedProduct,
        shards: Mapping[str, jax.Array],
    ) -> jax.Array:
        """Multiply sorted rows `[rows, in]` by weights of groups; see `grouped_scaled_matmul`."""
        del shards
        return name_product(grouped_scaled_matmul(rows, w, product, self.scheme), is_batched=True)


class Fp8CurrentDot(CurrentScalingDot):
    """A product in fp8 whose scales come from the tensors of the same step.

    Factors are rounded to e4m3, and output gradients to e5m2.
    Every tensor is read twice, once for its largest value. In exchange, the scale is exact, where
    delayed scaling predicts it from past steps, and the layer has no state.
    """

    scheme = FP8_CURRENT


class Int8Dot(CurrentScalingDot):
    """A product of factors rounded to int8, with a scale for each token and each output.

    The gradient of the input is a product of int8 numbers as well; that of the weight is computed
    in the dtype of the factors. TPUs from v5e on multiply int8 at twice the rate of bfloat16.
    """

    scheme = INT8


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def scaled_matmul(x: jax.Array, w: jax.Array, scheme: Scheme) -> jax.Array:
    """Multiply `[..., in]` by `[in, out]`, or groups of both, in the formats of a scheme.

    Args:
      x: `[..., in]`, or `[group, tokens, in]` for a group of weights.
      w: `[in, out]` or `[group, in, out]`.
      scheme: Formats and scales.

    Returns:
      `[..., out]` or `[group, tokens, out]` in the dtype of `x`.
    """
    group = tuple(range(w.ndim - 2))
    dims = (((x.ndim - 1,), (w.ndim - 2,)), (group, group))
    return _product(x, w, dims, scheme.factor, scheme.factor, is_per_row=scheme.is_per_row)


def _forward(x: jax.Array, w: jax.Array, scheme: Scheme) -> tuple[jax.Array, Any]:
    return scaled_matmul(x, w, scheme), (x, w)


def _backward(scheme: Scheme, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    group = tuple(range(w.ndim - 2))
    dims: Dims = (((g.ndim - 1,), (w.ndim - 1,)), (group, group))
    of_x = _product(g, w, dims, scheme.gradient, scheme.factor, is_per_row=scheme.is_per_row)
    tokens = tuple(range(len(group), x.ndim - 1))
    dims = ((tokens, tokens), (group, group))
    if scheme.rounds_weight_gradient:
        of_w = _product(x, g, dims, scheme.factor, scheme.gradient, is_per_row=scheme.is_per_row)
    else:
        of_w = lax.dot_general(x, g, dims)
    return of_x.astype(x.dtype), of_w.astype(w.dtype)


scaled_matmul.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_scaled_matmul(
    rows: jax.Array, w: jax.Array, product: GroupedProduct, scheme: Scheme
) -> jax.Array:
    """Multiply sorted rows by the weights of their groups, rounded to the formats of a scheme.

    The rounded factors are multiplied in their dtype before rounding: kernels of grouped products
    do not multiply 8-bit numbers.

    Args:
      rows: `[rows, in]`; unused rows are finite.
      w: `[group, in, out]`.
      product: Plain product of these rows.
      scheme: Formats and scales. A tensor with one scale has one for each group. A scale for each
        row or output is that of the features on one device.

    Returns:
      `[rows, out]` in the dtype of `rows`.
    """
    return product(
        _round_rows(rows, product, scheme.factor, scheme),
        _round_weights(w, product, scheme, contracted=1),
    )


def _grouped_forward(
    rows: jax.Array, w: jax.Array, product: GroupedProduct, scheme: Scheme
) -> tuple[jax.Array, Any]:
    return grouped_scaled_matmul(rows, w, product, scheme), (rows, w, product)


def _grouped_backward(scheme: Scheme, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    rows, w, product = saved
    rounded_g = _round_rows(g, product, scheme.gradient, scheme)
    rounded_w = _round_weights(w, product, scheme, contracted=2)
    (of_rows,) = jax.vjp(lambda rows: product(rows, rounded_w), rows)[1](rounded_g)
    if scheme.rounds_weight_gradient:
        rows, g = _round_rows(rows, product, scheme.factor, scheme), rounded_g
    (of_w,) = jax.vjp(lambda w: product(rows, w), w)[1](g)
    return of_rows, of_w, jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), product)


grouped_scaled_matmul.defvjp(_grouped_forward, _grouped_backward)


def _round_rows(rows: jax.Array, product: GroupedProduct, dtype: Any, scheme: Scheme) -> jax.Array:
    """Round `[rows, dims]` with a scale for each row or for the rows of each group."""
    wide = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)
    if not scheme.is_per_row:
        largest = largest_of_group(largest, product)
    values, scale = _scaled(wide, largest[:, None], dtype)
    return (values.astype(jnp.float32) * scale).astype(rows.dtype)


def largest_of_group(largest: jax.Array, product: GroupedProduct) -> jax.Array:
    """Return the maximum over the rows of each row's group, of a number for each row: `[rows]`."""
    group = product.group_of_row
    of_group = jax.ops.segment_max(largest, group, num_segments=product.num_groups + 1)
    return product.maximum(of_group)[group]


def _round_weights(
    w: jax.Array, product: GroupedProduct, scheme: Scheme, *, contracted: int
) -> jax.Array:
    """Round `[group, in, out]` with a scale for each output or for each group."""
    wide = w.astype(jnp.float32)
    axes = (contracted,) if scheme.is_per_row else (1, 2)
    largest = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
    largest = largest if scheme.is_per_row else product.maximum(largest)
    values, scale = _scaled(wide, largest, scheme.factor)
    return (values.astype(jnp.float32) * scale).astype(w.dtype)


def _product(
    lhs: jax.Array, rhs: jax.Array, dims: Dims, lhs_dtype: Any, rhs_dtype: Any, *, is_per_row: bool
) -> jax.Array:
    """Return the product of rounded factors in the dtype of `lhs`."""
    contracted, batch = dims
    left, left_scale = _rounded(lhs, lhs_dtype, contracted[0], batch[0], is_per_row=is_per_row)
    right, right_scale = _rounded(rhs, rhs_dtype, contracted[1], batch[1], is_per_row=is_per_row)
    sums = jnp.int32 if lhs_dtype == _INT8 else jnp.float32
    # Hopper sums in fewer bits than float32 unless the precision is the highest. As in Flax and
    # Transformer Engine, gradients need all bits.
    precision = lax.Precision.HIGHEST if _E5M2 in (lhs_dtype, rhs_dtype) else None
    product = lax.dot_general(left, right, dims, precision, preferred_element_type=sums)
    # The product has the batch axes, those of the left factor and those of the right one.
    left_scale = jnp.squeeze(left_scale, contracted[0])
    right_scale = jnp.squeeze(right_scale, contracted[1])
    num_batch = len(batch[0])
    of_left = (*left_scale.shape, *[1] * (right_scale.ndim - num_batch))
    ones = [1] * (left_scale.ndim - num_batch)
    of_right = (*right_scale.shape[:num_batch], *ones, *right_scale.shape[num_batch:])
    scaled = product.astype(jnp.float32) * left_scale.reshape(of_left)
    return (scaled * right_scale.reshape(of_right)).astype(lhs.dtype)


def _rounded(
    x: jax.Array, dtype: Any, contracted: Axes, batch: Axes, *, is_per_row: bool
) -> tuple[jax.Array, jax.Array]:
    """Return `x` in an 8-bit dtype and its float32 scale, of size 1 on the axes that share it."""
    shared = contracted if is_per_row else tuple(a for a in range(x.ndim) if a not in batch)
    wide = x.astype(jnp.float32)
    return _scaled(wide, jnp.max(jnp.abs(wide), axis=shared, keepdims=True), dtype)


def _scaled(wide: jax.Array, largest: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return float32 `[...]` in an 8-bit dtype and the scale of the largest values."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    scale = scale_of(largest, most)
    values = jnp.clip(wide / scale, -most, most)
    return (jnp.round(values) if is_integer else values).astype(dtype), scale


def scale_of(largest: jax.Array, most: float) -> jax.Array:
    """Return the float32 scales that map the largest values `[...]` of tensors to `most`.

    Values whose scale would underflow become 0. Values that are not finite have such a scale.
    """
    least = most * float(jnp.finfo(jnp.float32).tiny)
    return jnp.where(largest < least, 1.0, largest / most)
