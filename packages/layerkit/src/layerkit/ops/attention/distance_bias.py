"""A bias of the logits that depends on the distance of query and key, as one number per distance.

A bias `[heads, length, length]` grows with the square of the length, as the logits do that fused
kernels avoid. Within rows whose positions count their tokens, each of its diagonals holds one
number. `DistanceBias` holds these numbers, and fused kernels read them.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class DistanceBias:
    """A bias of the logits of self-attention in row order.

    Attributes:
      by_distance: float32 `[1, heads, 2·length - 1]`, the bias of the distances, key position -
        query position, from -(length - 1) to length - 1.
      is_learned: True if the bias has a gradient. Kernels compute it by a pass of its own.
    """

    by_distance: jax.Array
    is_learned: bool = struct.field(pytree_node=False, default=True)

    def plus(self, other: DistanceBias) -> DistanceBias:
        """Return the sum of two biases of rows of one length."""
        return DistanceBias(
            self.by_distance + other.by_distance, is_learned=self.is_learned or other.is_learned
        )

    def dense(self) -> jax.Array:
        """Return the bias of each pair of query and key, `[1, heads, length, length]`."""
        return _expand(self.by_distance)


# What layers accept as a bias: an array `[batch or 1, heads or 1, queries, keys]`, or one number
# for each distance.
LogitBias: TypeAlias = jax.Array | DistanceBias


def sum_diagonals(tiles: jax.Array) -> jax.Array:
    """Return the sum of each diagonal of a square matrix that is given by sums of its tiles.

    Tiles on one diagonal of tiles cover the same diagonals of the matrix and are given as their
    sum. A row of the matrix is a query and a column a key.

    Args:
      tiles: `[heads, 2·n - 1, size, size]`, for a matrix of n·n tiles, from the lower left to the
        upper right.

    Returns:
      `[heads, 2·n·size - 1]`, from the lower left diagonal to the upper right one.
    """
    heads, num_tiles, size, _ = tiles.shape
    by_distance = jax.ShapeDtypeStruct((heads, num_tiles, 2 * size - 1), tiles.dtype)
    (sums,) = jax.linear_transpose(_expand, by_distance)(tiles)
    # A tile and the next one share the diagonals of the second half of the first.
    first, second = sums[..., :size], jnp.pad(sums[..., size:], ((0, 0), (0, 0), (0, 1)))
    total = jnp.pad(first, ((0, 0), (0, 1), (0, 0))) + jnp.pad(second, ((0, 0), (1, 0), (0, 0)))
    return total.reshape(heads, -1)[:, :-1]


def align_distances(by_distance: jax.Array) -> jax.Array:
    """Return entry q - k of each query, `[..., queries, keys]`.

    Args:
      by_distance: `[..., queries, queries + keys - 1]`, entries of the distances of a query from a
        key, from queries - 1 down to 1 - keys.
    """
    *leading, num_queries, num_distances = by_distance.shape
    if num_queries == 1:
        return by_distance
    # Row q of the result begins at entry queries - 1 - q, so rows that are an entry shorter align.
    width = num_distances - 1
    flat = by_distance.reshape(*leading, -1)[..., num_queries - 1 :][..., : num_queries * width]
    rows = flat.reshape(*leading, num_queries, width)
    return rows[..., : num_distances - num_queries + 1]


def _expand(by_distance: jax.Array) -> jax.Array:
    """Return the matrix `[…, length, length]` with the diagonals `[…, 2·length - 1]`.

    Row q is a slice that begins at length - 1 - q. A gather of these slices has a scatter as its
    gradient, and `length` slices would take long to compile. Each step makes 16 times as many rows
    by slices: the new ones begin as much earlier as there were rows.
    """
    length = (by_distance.shape[-1] + 1) // 2
    num_rows = 2 ** math.ceil(math.log2(length))
    # Rows after the last one begin before distances begin.
    missing = num_rows - length
    rows = jnp.pad(by_distance, [(0, 0)] * (by_distance.ndim - 1) + [(missing, 0)])[..., None, :]
    while (count := rows.shape[-2]) < num_rows:
        copies = min(16, num_rows // count)
        size = rows.shape[-1] - (copies - 1) * count
        starts = [copy * count for copy in reversed(range(copies))]
        parts = [rows[..., start : start + size] for start in starts]
        # Without the barrier, XLA fuses all steps and their use, which takes long to compile.
        rows = jax.lax.optimization_barrier(jnp.concatenate(parts, axis=-2))
    return rows[..., :length, :]
