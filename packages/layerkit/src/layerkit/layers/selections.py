"""Selections whose backward pass keeps, and moves, no more than it must.

They are for loops over weights and activations, where the condition differs from iteration to
iteration. There the gradient that JAX derives would keep every iteration's condition, broadcast to
the size of the arrays, and would add up gradients by way of arrays of zeros. They can be
differentiated in reverse only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import fm32


def where(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """`jnp.where` of two arrays `[...]` with a condition that has only their first axes."""
    x, y = jnp.broadcast_arrays(x, y)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _where(condition, x, y)
    return _differentiable_where(condition, x, y)


def gradient_where(condition: jax.Array, x: jax.Array) -> jax.Array:
    """`x` `[...]`, whose gradient is 0 where the condition does not hold, even if it were NaN.

    Under `jax.vmap`, `x` must be mapped if the condition is: gradients of a shared `x` are added up
    before they come here.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return _differentiable_gradient_where(condition, x)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]`, of `x` `[n, ...]` and an int32 scalar."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _take(x, index)
    return _differentiable_take(x, index)


def as_float(x: jax.Array) -> jax.Array:
    """`x` `[...]`; what adds up by its maximum as the float32 that it holds.

    The functions above take only floats; see `layerkit.layers.quantization.fp8.accumulate_by_max`.
    """
    return _as_float(x) if x.dtype == fm32 else x


def _where(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    missing = tuple(range(condition.ndim, x.ndim))
    return jnp.where(jnp.expand_dims(condition, missing), x, y)


def _zeroed(condition: jax.Array, gradient: jax.Array) -> jax.Array:
    return _where(condition, gradient, jnp.zeros_like(gradient))


_differentiable_where = jax.custom_vjp(_where)
_differentiable_where.defvjp(
    lambda condition, x, y: (_where(condition, x, y), condition),
    lambda condition, g: (None, _zeroed(condition, g), _zeroed(~condition, g)),
)

_differentiable_gradient_where = jax.custom_vjp(lambda condition, x: x)
_differentiable_gradient_where.defvjp(
    lambda condition, x: (x, condition),
    lambda condition, g: (None, _zeroed(condition, g)),
)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _spread(is_taken: jax.Array, gradient: jax.Array) -> jax.Array:
    # A selection is fused with the sum that it goes into, unlike a scatter into zeros.
    return _zeroed(is_taken, jnp.broadcast_to(gradient, (*is_taken.shape, *gradient.shape)))


_differentiable_take = jax.custom_vjp(_take)
_differentiable_take.defvjp(
    lambda x, index: (_take(x, index), jnp.arange(x.shape[0]) == index),
    lambda is_taken, g: (_spread(is_taken, g), None),
)

# JAX knows this conversion, but its own gradient fails (jax 0.10.2).
_as_float = jax.custom_vjp(lambda x: jax.lax.convert_element_type(x, jnp.float32))
_as_float.defvjp(
    lambda x: (jax.lax.convert_element_type(x, jnp.float32), None),
    lambda _, g: (jax.lax.convert_element_type(g, fm32),),
)
