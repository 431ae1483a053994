"""Differentiation of element-wise functions by their slope alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

ElementWise = Callable[..., jax.Array]
"""A function of arrays `[...]` of one shape that computes each element separately."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def save_slopes(function: ElementWise, *arrays: jax.Array) -> jax.Array:
    """Return `function(*arrays)`, whose backward pass keeps one array per argument.

    It keeps the partial derivatives, in the dtype of the result.

    Args:
      function: Differentiable element-wise function that closes over no arrays.
      *arrays: Arrays `[...]` of one shape.
    """
    return function(*arrays)


@save_slopes.defjvp
def _save_slopes_jvp(
    function: ElementWise, arrays: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    terms = []
    for index, (x, tangent) in enumerate(zip(arrays, tangents, strict=True)):

        def of_one(x: jax.Array, index: int = index) -> jax.Array:
            return function(*arrays[:index], x, *arrays[index + 1 :])

        outputs, slope = jax.jvp(of_one, (x,), (jnp.ones_like(x),))
        terms.append((slope * tangent).astype(outputs.dtype))
    return outputs, functools.reduce(jnp.add, terms)
