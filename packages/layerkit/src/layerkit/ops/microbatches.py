"""Microbatches of a batch, queues of microbatches, and arguments that are split like the batch.

A queue is an array `[holders, slots, rows, ...]` of holders·slots microbatches in order; the first
holder has the oldest. At every tick one microbatch leaves the queue and another one is appended, so
that each waits for holders·slots ticks. Each holder sends one microbatch to the previous holder and
keeps the others in place; if holders are devices, nothing else is sent.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.config.checks import require
from layerkit.ops.indexing import where


def split_microbatches(x: jax.Array, num_microbatches: int) -> jax.Array:
    """Split `[batch, ...]` into `[microbatches, rows, ...]`.

    Row r goes to microbatch r % microbatches, so every device of a sharded batch has a part of
    every microbatch, and nothing is sent.
    """
    rows = x.shape[0] // num_microbatches
    return jnp.swapaxes(x.reshape(rows, num_microbatches, *x.shape[1:]), 0, 1)


def merge_microbatches(microbatches: jax.Array) -> jax.Array:
    """Merge `[microbatches, rows, ...]` into `[batch, ...]`, the inverse of the split."""
    num_microbatches, rows = microbatches.shape[:2]
    x = jnp.swapaxes(microbatches, 0, 1)
    return x.reshape(num_microbatches * rows, *microbatches.shape[2:])


def make_queue(microbatches: jax.Array, num_holders: int) -> jax.Array:
    """Return `[microbatches, rows, ...]` as a queue `[holders, slots, rows, ...]` at tick 0."""
    slots = microbatches.shape[0] // num_holders
    return microbatches.reshape(num_holders, slots, *microbatches.shape[1:])


def read_queue(queue: jax.Array, tick: int) -> jax.Array:
    """Return a queue `[holders, slots, rows, ...]` before `tick` as `[microbatches, rows, ...]`."""
    in_order = jnp.roll(queue, -(tick % queue.shape[1]), axis=1)
    return in_order.reshape(-1, *queue.shape[2:])


def advance_queue(
    queue: jax.Array, joining: jax.Array, tick: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Advance a queue by one tick.

    Args:
      queue: `[holders, slots, rows, ...]`.
      joining: `[stages, rows, ...]`, of which the last microbatch is appended. There are as many
        stages as holders, or there is only one holder.
      tick: int32 scalar.

    Returns:
      (`[holders, rows, ...]`, of which the first microbatch leaves the queue; the queue).
    """
    num_holders, num_slots = queue.shape[:2]
    slot = tick % num_slots
    leaving = jax.lax.dynamic_index_in_dim(queue, slot, axis=1, keepdims=False)
    is_last = jnp.arange(num_holders) == num_holders - 1
    moved = where(is_last, joining[-num_holders:], jnp.roll(leaving, -1, axis=0))
    return leaving, jax.lax.dynamic_update_index_in_dim(queue, moved, slot, axis=1)


class Arguments:
    """The arguments of a call, divided into those with one entry per row and shared ones.

    Attributes:
      by_row: Arrays `[batch, ...]`, of which each microbatch gets its rows.
      shared: Arrays `[1, ...]` or scalars, which are the same for all rows.
    """

    def __init__(self, args: Any, kwargs: Any, *, batch: int, owner: str):
        """Divide arguments.

        Args:
          args: Positional arguments.
          kwargs: Keyword arguments.
          batch: Number of rows.
          owner: Name of the layer for errors.

        Raises:
          ConfigError: The first axis of an array has a size other than `batch` and 1.
        """
        flat, self._structure = jax.tree_util.tree_flatten_with_path((args, kwargs))
        self._leaves = [leaf for _, leaf in flat]
        self._by_row: list[int] = []
        self._shared: list[int] = []
        for index, (path, leaf) in enumerate(flat):
            if not isinstance(leaf, (jax.Array, np.ndarray)):
                continue
            is_shared = leaf.ndim == 0 or (leaf.shape[0] == 1 and batch != 1)
            fits = is_shared or leaf.shape[0] == batch
            expected = f"a first axis of size {batch} (the batch) or 1 (shared by all rows)"
            # Without the number that tells positional arguments from those by keyword.
            name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
            require(fits, owner, f"shape of {name}", list(leaf.shape), expected)
            (self._shared if is_shared else self._by_row).append(index)
        self.by_row = [self._leaves[index] for index in self._by_row]
        self.shared = [self._leaves[index] for index in self._shared]

    def replace(self, by_row: list[jax.Array], shared: list[jax.Array]) -> tuple[Any, Any]:
        """Return (args, kwargs) with other arrays `[rows, ...]` and `[1, ...]`."""
        leaves = list(self._leaves)
        for index, leaf in zip((*self._by_row, *self._shared), (*by_row, *shared), strict=True):
            leaves[index] = leaf
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        return args, kwargs
