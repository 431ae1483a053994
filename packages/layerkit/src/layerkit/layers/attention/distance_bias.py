"""A bias of the logits that depends on the distance of query and key, as one number per distance.

A bias `[heads, length, length]` grows with the square of the length, as the logits do that fused
kernels avoid. Within rows whose positions count their tokens, each of its diagonals holds one
number. `DistanceBias` holds these numbers, and fused kernels read them.
"""

from __future__ import annotations

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

    @property
    def length(self) -> int:
        """Number of tokens of a row."""
        return (self.by_distance.shape[-1] + 1) // 2

    def plus(self, other: DistanceBias) -> DistanceBias:
        """Return the sum of two biases of rows of one length."""
        return DistanceBias(
            self.by_distance + other.by_distance, is_learned=self.is_learned or other.is_learned
        )

    def dense(self) -> jax.Array:
        """Return the bias of each pair of query and key, `[1, heads, length, length]`.

        It is made by copies alone: a gather would have a scatter as its gradient.
        """
        rows, heads, num_distances = self.by_distance.shape
        length = self.length
        padded = jnp.pad(self.by_distance, ((0, 0), (0, 0), (0, 1)))
        repeated = jnp.broadcast_to(padded[:, :, None], (rows, heads, length, num_distances + 1))
        # Rows that are one shorter than the repeated ones begin one distance earlier each.
        flat = repeated.reshape(rows, heads, -1)[:, :, : length * num_distances]
        return flat.reshape(rows, heads, length, num_distances)[..., length - 1 :]


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
    # Rows from the last to the first, one longer than the diagonals of a tile: reading them as one
    # shorter moves each to the right by one more.
    padded = jnp.pad(tiles[:, :, ::-1], ((0, 0), (0, 0), (0, 0), (0, size)))
    flat = padded.reshape(heads, num_tiles, -1)[..., : size * (2 * size - 1)]
    sums = flat.reshape(heads, num_tiles, size, 2 * size - 1).sum(axis=2)
    # A tile and the next one share the diagonals of the second half of the first.
    first, second = sums[..., :size], jnp.pad(sums[..., size:], ((0, 0), (0, 0), (0, 1)))
    total = jnp.pad(first, ((0, 0), (0, 1), (0, 0))) + jnp.pad(second, ((0, 0), (1, 0), (0, 0)))
    return total.reshape(heads, -1)[:, :-1]
