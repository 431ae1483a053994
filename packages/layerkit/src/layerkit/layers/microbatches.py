"""Microbatches: a batch cut into pieces, the queues they wait in, and arguments cut like the batch.

A queue is an array `[holders, slots, rows, ...]` of holders·slots microbatches in order, the oldest
with the first holder. At every tick one microbatch leaves the queue and another joins it at the
end, so that each waits for holders·slots ticks. Each holder hands one microbatch to the one before
it and leaves the others where they are; where a holder is a device, they send nothing else.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.layers.selections import where


def cut(x: jax.Array, num_microbatches: int) -> jax.Array:
    """`[batch, ...]` → `[microbatches, rows, ...]`; row r goes to microbatch r % microbatches.

    So where the batch is split over devices, each of them has a share of every microbatch, and
    nothing moves.
    """
    rows = x.shape[0] // num_microbatches
    return jnp.swapaxes(x.reshape(rows, num_microbatches, *x.shape[1:]), 0, 1)


def join(microbatches: jax.Array) -> jax.Array:
    """`[microbatches, rows, ...]` → `[batch, ...]`, undoing `cut`."""
    num_microbatches, rows = microbatches.shape[:2]
    x = jnp.swapaxes(microbatches, 0, 1)
    return x.reshape(num_microbatches * rows, *microbatches.shape[2:])


def enqueue(microbatches: jax.Array, num_holders: int) -> jax.Array:
    """`[microbatches, rows, ...]` → a queue `[holders, slots, rows, ...]` before tick 0."""
    slots = microbatches.shape[0] // num_holders
    return microbatches.reshape(num_holders, slots, *microbatches.shape[1:])


def dequeue(queue: jax.Array, tick: int) -> jax.Array:
    """A queue `[holders, slots, rows, ...]` before `tick` → `[microbatches, rows, ...]`."""
    in_order = jnp.roll(queue, -(tick % queue.shape[1]), axis=1)
    return in_order.reshape(-1, *queue.shape[2:])


def pass_on(queue: jax.Array, joining: jax.Array, tick: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One tick of a queue.

    Args:
      queue: `[holders, slots, rows, ...]`.
      joining: `[stages, rows, ...]`; the last one joins the queue. There are as many stages as
        holders, or there is only one holder.
      tick: int32 scalar.

    Returns:
      `[holders, rows, ...]`, of which the first leaves the queue, and the queue.
    """
    num_holders, num_slots = queue.shape[:2]
    slot = tick % num_slots
    leaving = jax.lax.dynamic_index_in_dim(queue, slot, axis=1, keepdims=False)
    is_last = jnp.arange(num_holders) == num_holders - 1
    moved = where(is_last, joining[-num_holders:], jnp.roll(leaving, -1, axis=0))
    return leaving, jax.lax.dynamic_update_index_in_dim(queue, moved, slot, axis=1)


class Arguments:
    """The arguments of a call, told apart by how they go with the rows of a batch.

    Attributes:
      by_row: Arrays `[batch, ...]`, of which each microbatch gets its rows.
      shared: Arrays `[1, ...]` or scalars, which are the same for all rows.

    Raises:
      ValueError: an array that is neither; names it.
    """

    def __init__(self, args: Any, kwargs: Any, *, batch: int, owner: str):
        flat, self._structure = jax.tree_util.tree_flatten_with_path((args, kwargs))
        self._leaves = [leaf for _, leaf in flat]
        self._by_row, self._shared = [], []
        for index, (path, leaf) in enumerate(flat):
            if not isinstance(leaf, (jax.Array, np.ndarray)):
                continue
            if leaf.ndim and leaf.shape[0] == batch:
                self._by_row.append(index)
            elif leaf.ndim == 0 or leaf.shape[0] == 1:
                self._shared.append(index)
            else:
                raise ValueError(
                    f"{owner}: the argument {_name(path)} has the shape {leaf.shape}; its first"
                    f" axis must be the batch of {batch} rows, to be cut into microbatches, or of"
                    " size 1, to be shared by them"
                )
        self.by_row = [self._leaves[index] for index in self._by_row]
        self.shared = [self._leaves[index] for index in self._shared]

    def replaced(self, by_row: list[jax.Array], shared: list[jax.Array]) -> tuple[Any, Any]:
        """(args, kwargs) with other arrays `[rows, ...]` and `[1, ...]` in place of its own."""
        leaves = list(self._leaves)
        for index, leaf in zip((*self._by_row, *self._shared), (*by_row, *shared), strict=True):
            leaves[index] = leaf
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        return args, kwargs


def _name(path: Any) -> str:
    """`(1, 'mask', 'key_positions')` → `mask.key_positions`; the first entry is args or kwargs."""
    names = [
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    ]
    return ".".join(names[1:])
