"""The rows of a decoding cache: where they are, copying them, and putting them into another order.

A cache is a tree of arrays. Layers that stand alone put the rows first, repeated ones behind their
`layers` axis, pipelines behind two. So the axis of the rows is found out rather than agreed on:
`row_axes` asks, without computing anything, for the caches of two batch sizes and sees which axis
of each array follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Marks an array that all rows share.
SHARED = -1


def row_axes(make_cache: Callable[[Any], Any], inputs: Any) -> Any:
    """The axis of the rows of each array in a cache.

    Args:
      make_cache: Makes the cache of some rows, such as that of prompts or of an encoder's outputs.
      inputs: What it takes: a tree of arrays `[rows, …]`; only their shapes are used.

    Returns:
      A tree of integers with the structure of the cache; `SHARED` where no axis belongs to rows.

    Raises:
      ValueError: an array with two axes that follow the number of rows, or one that follows it in
        another way than being it.
    """
    num_rows = jax.tree.leaves(inputs)[0].shape[0]

    # JAX stores 64-bit values of the host in 32 bits, unless `jax_enable_x64` is set.
    def resized(x: Any, factor: int) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct((factor * x.shape[0], *x.shape[1:]), dtype)

    def shapes(factor: int) -> Any:
        # A multiple can be split over a mesh as the rows themselves are.
        return jax.eval_shape(make_cache, jax.tree.map(lambda x: resized(x, factor), inputs))

    def find(path: Any, one: Any, two: Any) -> int:
        differing = [i for i in range(one.ndim) if one.shape[i] != two.shape[i]]
        if not differing:
            return SHARED
        axis = differing[0]
        if len(differing) > 1 or one.shape[axis] != num_rows or two.shape[axis] != 2 * num_rows:
            raise ValueError(
                f"cache{jax.tree_util.keystr(path)}: its shape is {one.shape} for {num_rows} rows"
                f" and {two.shape} for {2 * num_rows}; one axis must be that of the rows"
            )
        return axis

    return jax.tree_util.tree_map_with_path(find, shapes(1), shapes(2))


def repeat_rows(cache: Any, axes: Any, times: int) -> Any:
    """Each row `times` times in a row: arrays `[…, rows, …]` → `[…, rows · times, …]`."""

    def repeat(axis: int, x: jax.Array) -> jax.Array:
        if axis == SHARED or times == 1:
            return x
        shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
        return jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape).reshape(
            *x.shape[:axis], -1, *x.shape[axis + 1 :]
        )

    return jax.tree.map(repeat, axes, cache)


def reorder_rows(cache: Any, axes: Any, parents: jax.Array) -> Any:
    """Puts into each place the row of another one of the same group.

    Args:
      cache: Arrays `[…, batch · group, …]`.
      axes: Where their rows are; see `row_axes`.
      parents: int32 `[batch, group]`, numbers within the group.

    Returns:
      A tree like `cache`.
    """
    batch, group = parents.shape

    def reorder(axis: int, x: jax.Array) -> jax.Array:
        if axis == SHARED:
            return x
        grouped = x.reshape(*x.shape[:axis], batch, group, *x.shape[axis + 1 :])
        # Batched over `batch`, so that groups split over a mesh stay where they are.
        take = jax.vmap(
            lambda x, parents: jnp.take(x, parents, axis=axis), in_axes=(axis, 0), out_axes=axis
        )
        return take(grouped, parents).reshape(x.shape)

    return jax.tree.map(reorder, axes, cache)
