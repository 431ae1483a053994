"""Products of sorted rows with one weight per group of rows.

`ragged_dot` is JAX's grouped product, a kernel on TPUs. On other platforms XLA multiplies every row
by the weights of every group, and work and memory grow with the number of experts. `blocks` aligns
groups to multiples of a block and multiplies block after block in a loop, so that work grows with
the number of rows only (as in MegaBlocks; Gale et al., 2022, arXiv:2211.15841). `auto` selects
`ragged_dot` on TPUs and `blocks` on other platforms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

IMPLEMENTATIONS = ("auto", "ragged_dot", "blocks")


def select_implementation(name: str, *, platform: str) -> str:
    """Return the implementation for a platform (`cpu`, `gpu`, `tpu`, …) if the name is `auto`."""
    if name != "auto":
        return name
    return "ragged_dot" if platform == "tpu" else "blocks"


def block_sizes(implementation: str) -> Callable[[int, int], int]:
    """Return the function of (rows, groups) that returns the rows of a block."""
    return block_size if implementation == "blocks" else lambda num_rows, num_groups: 1


def block_size(num_rows: int, num_groups: int) -> int:
    """Return the rows of a block: a power of two from 8 to 512, about a quarter of a mean group.

    On average each group wastes half a block, about an eighth of the rows.
    """
    quarter = max(1, num_rows // (4 * num_groups))
    return int(np.clip(2 ** (quarter.bit_length() - 1), 8, 512))


@struct.dataclass
class RowGroups:
    """The sizes of consecutive groups of rows, from row 0.

    Attributes:
      sizes: Number of rows of each group, int32 `[groups]`, multiples of `block`. Rows after the
        last group are unused.
      block: Number of rows of a block, 1 for `ragged_dot`; static.
    """

    sizes: jax.Array
    block: int = struct.field(pytree_node=False)


def grouped_matmul(rows: jax.Array, w: jax.Array, groups: RowGroups) -> jax.Array:
    """Multiply rows `[rows, in]` by the weights of their groups.

    Args:
      rows: Rows sorted by group; their number is a multiple of the block.
      w: Weight of each group `[groups, in, out]`, in the dtype of the rows.
      groups: Sizes of the groups. Blocks of one row select `jax.lax.ragged_dot`.

    Returns:
      `[rows, out]`, with arbitrary values for unused rows.
    """
    if groups.block == 1:
        return jax.lax.ragged_dot(rows, w, groups.sizes)
    return _blocked_matmul(rows, w, groups.sizes, groups.block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocked_matmul(rows: jax.Array, w: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    group_of_block, num_used = _blocks(sizes, block, rows.shape[0] // block)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        weight = jax.lax.dynamic_index_in_dim(w, group_of_block[i], keepdims=False)
        product = _slice_block(rows, i, block) @ weight
        return jax.lax.dynamic_update_slice_in_dim(out, product, i * block, axis=0)

    out = jnp.zeros((rows.shape[0], w.shape[-1]), rows.dtype)
    return jax.lax.fori_loop(0, _batch_maximum(num_used), body, out)


def _blocked_matmul_bwd(
    block: int, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, np.ndarray]:
    rows, w, sizes = residuals
    group_of_block, num_used = _blocks(sizes, block, rows.shape[0] // block)

    def body(i: jax.Array, sums: jax.Array) -> jax.Array:
        product = jnp.matmul(
            _slice_block(rows, i, block).T,
            _slice_block(gradient, i, block),
            preferred_element_type=jnp.float32,
        )
        product = jnp.where(i < num_used, product, 0.0)
        group = group_of_block[i]
        total = jax.lax.dynamic_index_in_dim(sums, group, keepdims=False) + product
        return jax.lax.dynamic_update_index_in_dim(sums, total, group, axis=0)

    start = jnp.zeros(w.shape, jnp.float32)
    w_gradient = jax.lax.fori_loop(0, _batch_maximum(num_used), body, start)
    rows_gradient = _blocked_matmul(gradient, w.swapaxes(1, 2), sizes, block)
    return rows_gradient, w_gradient.astype(w.dtype), np.zeros(sizes.shape, jax.dtypes.float0)


_blocked_matmul.defvjp(
    lambda rows, w, sizes, block: (_blocked_matmul(rows, w, sizes, block), (rows, w, sizes)),
    _blocked_matmul_bwd,
)


def _blocks(sizes: jax.Array, block: int, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Return (group of each block, int32 `[blocks]`; number of blocks with rows of a group)."""
    ends = jnp.cumsum(sizes) // block
    indices = jnp.arange(num_blocks, dtype=ends.dtype)
    return jnp.searchsorted(ends, indices, side="right", method="compare_all"), ends[-1]


@jax.custom_batching.custom_vmap
def _batch_maximum(count: jax.Array) -> jax.Array:
    """Return an int32 scalar; under `jax.vmap`, the maximum over the batch as one number.

    A loop whose length differs within a batch would select between its old and new carry at each
    iteration.
    """
    return count


@_batch_maximum.def_vmap
def _batch_maximum_vmap(
    axis_size: int, in_batched: list[bool], count: jax.Array
) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return _batch_maximum(jnp.max(count)), False


def _slice_block(rows: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(rows, i * block, block, axis=0)
