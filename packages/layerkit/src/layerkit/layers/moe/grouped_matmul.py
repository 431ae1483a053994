"""Products of sorted rows, each group of rows with a weight of its own.

`ragged_dot` is JAX's grouped product; on TPUs it is a kernel. Elsewhere XLA multiplies every row by
the weights of every group, in memory for all of them at once, and keeps one product of each: work
and memory grow with the number of experts. `blocks` is our own: groups begin at multiples of a
block, and a loop multiplies block after block, so that work grows with the rows alone (the idea of
MegaBlocks; Gale et al., 2022, arXiv:2211.15841). `auto` takes the kernel where there is one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from layerkit.near_names import near_names

IMPLEMENTATIONS = ("auto", "ragged_dot", "blocks")


def check_implementation(name: str, *, owner: str) -> None:
    """Raises ValueError for a name that is not in `IMPLEMENTATIONS`; says whose it is."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"{owner}: grouped_matmul={name!r}{near_names(str(name), IMPLEMENTATIONS)}"
            f" Implementations: {', '.join(IMPLEMENTATIONS)}."
        )


def select_implementation(name: str, *, platform: str) -> str:
    """Turns `auto` into the implementation that suits the platform (`cpu`, `gpu`, `tpu`, …)."""
    if name != "auto":
        return name
    return "ragged_dot" if platform == "tpu" else "blocks"


def block_size(num_rows: int, num_groups: int) -> int:
    """Rows of a block: a power of two from 8 to 512, about a quarter of a mean group.

    On average each group wastes half a block, so about an eighth of the rows.
    """
    quarter = max(1, num_rows // (4 * num_groups))
    return int(np.clip(2 ** (quarter.bit_length() - 1), 8, 512))


@struct.dataclass
class RowGroups:
    """Where each group of rows begins and ends.

    Attributes:
      sizes: int32 `[groups]`, rows of each; multiples of `block`, one group after the other from
        row 0. Rows after the last belong to nobody.
      block: Rows of a block, 1 for `ragged_dot`; static.
    """

    sizes: jax.Array
    block: int = struct.field(pytree_node=False)


def grouped_matmul(rows: jax.Array, w: jax.Array, groups: RowGroups) -> jax.Array:
    """`[rows, in]` · `[groups, in, out]` → `[rows, out]`; rows of nobody come out arbitrary.

    Args:
      rows: Sorted by group; a multiple of the block.
      w: The weight of each group, in the dtype of the rows.
      groups: Which rows are whose; with blocks of more than one row, block by block.
    """
    if groups.block == 1:
        return jax.lax.ragged_dot(rows, w, groups.sizes)
    return _by_blocks(rows, w, groups.sizes, groups.block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_blocks(rows: jax.Array, w: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    group_of_block, num_used = _blocks(sizes, block, rows.shape[0] // block)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        weight = jax.lax.dynamic_index_in_dim(w, group_of_block[i], keepdims=False)
        product = _block_of(rows, i, block) @ weight
        return jax.lax.dynamic_update_slice_in_dim(out, product, i * block, axis=0)

    out = jnp.zeros((rows.shape[0], w.shape[-1]), rows.dtype)
    return jax.lax.fori_loop(0, _largest(num_used), body, out)


def _by_blocks_fwd(
    rows: jax.Array, w: jax.Array, sizes: jax.Array, block: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _by_blocks(rows, w, sizes, block), (rows, w, sizes)


def _by_blocks_bwd(
    block: int, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, np.ndarray]:
    rows, w, sizes = residuals
    group_of_block, num_used = _blocks(sizes, block, rows.shape[0] // block)

    def body(i: jax.Array, sums: jax.Array) -> jax.Array:
        product = jnp.matmul(
            _block_of(rows, i, block).T,
            _block_of(gradient, i, block),
            preferred_element_type=jnp.float32,
        )
        product = jnp.where(i < num_used, product, 0.0)
        group = group_of_block[i]
        total = jax.lax.dynamic_index_in_dim(sums, group, keepdims=False) + product
        return jax.lax.dynamic_update_index_in_dim(sums, total, group, axis=0)

    start = jnp.zeros(w.shape, jnp.float32)
    w_gradient = jax.lax.fori_loop(0, _largest(num_used), body, start)
    rows_gradient = _by_blocks(gradient, w.swapaxes(1, 2), sizes, block)
    return rows_gradient, w_gradient.astype(w.dtype), np.zeros(sizes.shape, jax.dtypes.float0)


_by_blocks.defvjp(_by_blocks_fwd, _by_blocks_bwd)


def _blocks(sizes: jax.Array, block: int, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """(int32 `[blocks]`: the group of each, how many of them hold rows of a group)."""
    ends = jnp.cumsum(sizes) // block
    indices = jnp.arange(num_blocks, dtype=ends.dtype)
    return jnp.searchsorted(ends, indices, side="right", method="compare_all"), ends[-1]


@jax.custom_batching.custom_vmap
def _largest(count: jax.Array) -> jax.Array:
    """int32 scalar → the same; under `jax.vmap` the largest of all, as one number.

    A loop whose length differs within a batch would select, at each iteration, between all that it
    carries before and after.
    """
    return count


@_largest.def_vmap
def _largest_of_batch(
    axis_size: int, in_batched: list[bool], count: jax.Array
) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return _largest(jnp.max(count)), False


def _block_of(rows: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(rows, i * block, block, axis=0)
