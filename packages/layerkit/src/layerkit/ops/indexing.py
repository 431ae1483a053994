"""Selections with efficient gradients for loops over weights and activations.

The condition differs between iterations of such loops. The gradients that JAX derives would save
the condition of every iteration, broadcast to the size of the arrays, and would sum gradients
through arrays of zeros. These functions support reverse-mode differentiation only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import fm32


def where(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute `jnp.where` of arrays `[...]` with a condition that has only their first axes."""
    x, y = jnp.broadcast_arrays(x, y)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _where(condition, x, y)
    return _differentiable_where(condition, x, y)


def gradient_where(condition: jax.Array, x: jax.Array) -> jax.Array:
    """Return `x` `[...]` with a gradient of 0 where the condition is False, even if it were NaN.

    Under `jax.vmap`, `x` must be mapped if the condition is, since the gradients of a shared `x`
    are summed before the selection.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return _differentiable_gradient_where(condition, x)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return `x[index]` for `x` `[n, ...]` and an int32 scalar."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _take(x, index)
    return _differentiable_take(x, index)


def as_float(x: jax.Array) -> jax.Array:
    """Return `x` `[...]`, converted to float32 if its dtype is `fm32`, whose sum is a maximum.

    The functions above support only JAX's floating dtypes; see
    `layerkit.layers.quantization.fp8.accumulate_by_max`.
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


_differentiable_take = jax.custom_vjp(_take)
_differentiable_take.defvjp(
    lambda x, index: (_take(x, index), jnp.arange(x.shape[0]) == index),
    # XLA fuses a selection with the following sum, unlike a scatter into zeros.
    lambda is_taken, g: (_zeroed(is_taken, jnp.broadcast_to(g, (*is_taken.shape, *g.shape))), None),
)

# JAX supports this conversion, but its gradient fails (jax 0.10.2).
_as_float = jax.custom_vjp(lambda x: jax.lax.convert_element_type(x, jnp.float32))
_as_float.defvjp(
    lambda x: (jax.lax.convert_element_type(x, jnp.float32), None),
    lambda _, g: (jax.lax.convert_element_type(g, fm32),),
)
