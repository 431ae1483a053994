"""Rows of a decoding cache: finding their axes, repeating them and reordering them.

A cache is a tree of arrays. The row axis is the first one in single layers, the second one in
repeated layers and the third one in pipelines. `row_axes` determines it: it traces the caches of
two batch sizes, without computing them, and compares their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config.checks import require

# Row axis of an array that all rows share.
SHARED = -1


class CacheRows(NamedTuple):
    """The cache of the rows of a network.

    Attributes:
      cache: Collection `CACHE` of the network.
      prompts: Collection `PROMPT_CACHE`, with a row for each prompt; empty if each row has all of
        its tokens in `cache`.
      prefix_lengths: Number of leading tokens of rows with bidirectional attention, int32
        `[rows]`; None for a causal network.
    """

    cache: Any
    prompts: Any
    prefix_lengths: jax.Array | None


def row_axes(make_cache: Callable[[Any], Any], inputs: Any) -> Any:
    """Return the row axis of each array in a cache.

    Args:
      make_cache: Function that makes the cache of rows, such as prompts or outputs of an encoder.
      inputs: Argument of `make_cache`, a tree of arrays `[rows, …]`; only their shapes are used.

    Returns:
      A tree of integers with the structure of the cache; `SHARED` for arrays without a row axis.

    Raises:
      ConfigError: An array has two axes that depend on the number of rows, or an axis that depends
        on it but does not equal it.
    """
    num_rows = jax.tree.leaves(inputs)[0].shape[0]

    # JAX stores 64-bit values of the host in 32 bits unless `jax_enable_x64` is set.
    def resized(x: Any, factor: int) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct((factor * x.shape[0], *x.shape[1:]), dtype)

    def shapes(factor: int) -> Any:
        # A multiple of the rows can be split over the same mesh axes.
        return jax.eval_shape(make_cache, jax.tree.map(lambda x: resized(x, factor), inputs))

    def find(path: Any, one: Any, two: Any) -> int:
        differing = [i for i in range(one.ndim) if one.shape[i] != two.shape[i]]
        if not differing:
            return SHARED
        axis = differing[0]
        sizes = one.shape[axis], two.shape[axis]
        fits = len(differing) == 1 and sizes == (num_rows, 2 * num_rows)
        field = f"shape of cache{jax.tree_util.keystr(path)}"
        expected = f"one axis of rows, which grows from {num_rows} to {2 * num_rows} rows"
        require(fits, "decoding cache", field, list(one.shape), expected)
        return axis

    return jax.tree_util.tree_map_with_path(find, shapes(1), shapes(2))


def repeat_rows(cache: Any, axes: Any, times: int) -> Any:
    """Repeat each row `times` times: arrays `[…, rows, …]` → `[…, rows · times, …]`."""

    def repeat(axis: int, x: jax.Array) -> jax.Array:
        if axis == SHARED or times == 1:
            return x
        shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
        return jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape).reshape(
            *x.shape[:axis], -1, *x.shape[axis + 1 :]
        )

    return jax.tree.map(repeat, axes, cache)


def reorder_rows(cache: Any, axes: Any, parents: jax.Array) -> Any:
    """Replace each row by another row of its group.

    Args:
      cache: Tree of arrays `[…, batch · group, …]`.
      axes: Row axis of each array; see `row_axes`.
      parents: Index of each row's replacement within its group, int32 `[batch, group]`.

    Returns:
      A tree like `cache`.
    """
    batch, group = parents.shape

    def reorder(axis: int, x: jax.Array) -> jax.Array:
        if axis == SHARED:
            return x
        grouped = x.reshape(*x.shape[:axis], batch, group, *x.shape[axis + 1 :])
        # Batched over `batch`, so that groups split over a mesh stay on their devices.
        take = jax.vmap(
            lambda x, parents: jnp.take(x, parents, axis=axis), in_axes=(axis, 0), out_axes=axis
        )
        return take(grouped, parents).reshape(x.shape)

    return jax.tree.map(reorder, axes, cache)


def row_parts(model: BaseLayer) -> int:
    """Return the number of devices over which a model's mesh splits a row; 1 without a mesh."""
    sharding = model.inherited("sharding")
    if sharding is None:
        return 1
    return max(map(sharding.num_shards, ("length", "residual_length")))


def round_up(length: int, parts: int) -> int:
    """Return the smallest multiple of `parts` that is not below `length`."""
    return -(-length // parts) * parts


def pad_columns(x: jax.Array, parts: int) -> jax.Array:
    """Pad `x` `[rows, length, …]` with zeros to a length that is a multiple of `parts`."""
    widths = ((0, 0), (0, round_up(x.shape[1], parts) - x.shape[1]), *[(0, 0)] * (x.ndim - 2))
    return jnp.pad(x, widths)
