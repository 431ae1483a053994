"""Products of sorted rows with one weight per group of rows.

- `pallas` is a kernel on TPUs and GPUs: JAX's megablox (the method of Gale et al., 2022,
  MegaBlocks, arXiv:2211.15841) and `layerkit.ops.triton.grouped_matmul_gpu`.
- `ragged_dot` is JAX's grouped product. XLA multiplies every row by the weights of every group on
  CPUs and GPUs, and on TPUs in the gradient of the weights.
- `blocks` aligns groups to multiples of a block and multiplies block after block in a loop, so that
  work grows with the number of rows only. It runs everywhere; each block is a separate step.

`GROUPED_MATMULS` is their table; see `layerkit.ops.implementations`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from layerkit.ops.implementations import (
    GPU_PLATFORMS,
    Implementation,
    ampere_or_later,
    find_row,
    select,
)

# Largest tiles of (rows, contracted dimension, outputs) of megablox, in bfloat16; those of
# MaxText. They fill most of the vector memory that XLA gives a kernel.
_TPU_TILES = (512, 1024, 1024)


@dataclasses.dataclass(frozen=True)
class GroupedMatmul:
    """A selected implementation of the grouped product; `select_grouped_matmul` returns it.

    Attributes:
      name: `pallas`, `ragged_dot` or `blocks`.
      platform: JAX's name of the platform that runs it.
      interpret: True to run the kernels in interpret mode on any device, for tests.
    """

    name: str
    platform: str
    interpret: bool = False

    def block_size(self, num_rows: int, num_groups: int) -> int:
        """Return the block to which groups are aligned, about a quarter of a mean group or 1.

        Args:
          num_rows: Number of rows that are in use if routing is balanced.
          num_groups: Number of groups.
        """
        if self.name == "blocks":
            return block_size(num_rows, num_groups)
        if self.name == "pallas" and self.platform != "tpu":
            return int(np.clip(block_size(num_rows, num_groups), 16, 128))
        return 1

    def __call__(self, rows: jax.Array, w: jax.Array, groups: RowGroups) -> jax.Array:
        """Multiply rows `[rows, in]` by the weights of their groups.

        Args:
          rows: Rows sorted by group; their number is a multiple of the block.
          w: Weight of each group `[groups, in, out]`, in the dtype of the rows.
          groups: Sizes of the groups.

        Returns:
          `[rows, out]`, with arbitrary values for unused rows.
        """
        # Programs show the rows of the whole buffer, or of one round of the loop. The count of
        # FLOPs reads from this name how many rows are in use.
        shown = groups.block if self.name == "blocks" else rows.shape[0]
        multiply = find_row(GROUPED_MATMULS, self.name, platform=self.platform).load()
        with jax.named_scope(f"rows_{groups.num_balanced}_of_{shown}"):
            product: jax.Array = multiply(rows, w, groups, interpret=self.interpret)
        return product


def select_grouped_matmul(
    name: str, *, platform: str, dtype: Any, owner: str, compute_capability: str = ""
) -> GroupedMatmul:
    """Return the named implementation of the products of experts, or that of `auto`; log why.

    Args:
      name: `auto` or the name of a row of `GROUPED_MATMULS`.
      platform: JAX's name of the platform that runs it: `cpu`, `gpu`, `cuda` or `tpu`.
      dtype: Dtype of rows and weights.
      owner: Name of the layer for error messages.
      compute_capability: That of a CUDA device, such as `9.0`; "" if unknown.

    Raises:
      UnsupportedBackendError: The named implementation does not support the product.
    """
    row = select(
        GROUPED_MATMULS,
        name,
        _GroupedCall(jnp.dtype(dtype), compute_capability),
        platform=platform,
        operation="grouped matmul",
        field="grouped_matmul",
        owner=owner,
    )
    return GroupedMatmul(row.name, platform)


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
      block: Number of rows of a block; static.
      num_balanced: Number of rows in use if routing is balanced; static.
    """

    sizes: jax.Array
    block: int = struct.field(pytree_node=False)
    num_balanced: int = struct.field(pytree_node=False)


@struct.dataclass
class RowsProduct:
    """The grouped product of the rows of one array; a `layerkit.layers.basic.dots.GroupedProduct`.

    Attributes:
      groups: Groups of the rows.
      matmul: Implementation of the product; static.
      num_rows: Number of rows of the array; static.
      split_axes: Mesh axes over which the rows of a group or their features are split; static.
    """

    groups: RowGroups
    matmul: GroupedMatmul = struct.field(pytree_node=False)
    num_rows: int = struct.field(pytree_node=False)
    split_axes: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.groups.sizes.shape[0]

    @property
    def group_of_row(self) -> jax.Array:
        """Group of each row, int32 `[rows]`; num_groups for unused rows."""
        ends = jnp.cumsum(self.groups.sizes)
        return jnp.searchsorted(ends, jnp.arange(self.num_rows), side="right").astype(jnp.int32)

    def maximum(self, values: jax.Array) -> jax.Array:
        """Return the maximum of `[...]` over the devices that hold other parts of the groups."""
        return jax.lax.pmax(values, self.split_axes) if self.split_axes else values

    def __call__(self, rows: jax.Array, w: jax.Array) -> jax.Array:
        """Multiply `[rows, in]` by `[groups, in, out]`: `[rows, out]`."""
        return self.matmul(rows, w, self.groups)


def _triton(rows: jax.Array, w: jax.Array, groups: RowGroups, *, interpret: bool) -> jax.Array:
    """Multiply rows by the kernel for GPUs, with dimensions padded to multiples of its tiles."""
    # Pallas takes long to import.
    from layerkit.ops.triton.grouped_matmul_gpu import (
        BlocksOfRows,
        KernelOptions,
        grouped_matmul_gpu,
    )

    num_groups, dims, out_dims = w.shape
    group_of_block, num_used = _blocks(groups.sizes, groups.block, rows.shape[0] // groups.block)
    out = grouped_matmul_gpu(
        jnp.pad(rows, ((0, 0), (0, -dims % 16))),
        jnp.pad(w, ((0, 0), (0, -dims % 16), (0, -out_dims % 16))),
        BlocksOfRows(jnp.minimum(group_of_block, num_groups - 1), num_used),
        KernelOptions(groups.block, interpret),
    )
    return out[:, :out_dims]


def _megablox(rows: jax.Array, w: jax.Array, groups: RowGroups, *, interpret: bool) -> jax.Array:
    """Multiply rows by JAX's kernel for TPUs, which requires whole tiles of rows."""
    from jax.experimental.pallas.ops.tpu import megablox  # Pallas takes long to import.

    num_rows = rows.shape[0]
    tile = int(np.clip(block_size(num_rows, w.shape[0]), 128, _TPU_TILES[0]))
    scale = max(1, rows.dtype.itemsize // 2)
    # The gradient exchanges the last two. The kernel masks what exceeds a dimension.
    most = [size // scale for size in _TPU_TILES[1:]]
    tiles = (tile, *(min(m, -(-d // 128) * 128) for m, d in zip(most, w.shape[1:], strict=True)))
    padded = jnp.pad(rows, ((0, -num_rows % tile), (0, 0)))
    out: jax.Array = megablox.gmm(padded, w, groups.sizes, rows.dtype, tiles, interpret=interpret)
    return out[:num_rows]


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


class _GroupedCall(NamedTuple):
    """Dtype of rows and weights, and compute capability of a CUDA device or ""."""

    dtype: jnp.dtype
    compute_capability: str


def _requirements(*dtypes: Any) -> Callable[[_GroupedCall], dict[str, bool]]:
    names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
    return lambda call: {
        f"{names} instead of {call.dtype.name}": call.dtype not in dtypes,
        **ampere_or_later(call.compute_capability),
    }


GROUPED_MATMULS: tuple[Implementation[_GroupedCall], ...] = (
    Implementation(
        name="pallas",
        function=_megablox,
        requires=_requirements(jnp.bfloat16, jnp.float32),
        platforms=("tpu",),
    ),
    Implementation(
        name="pallas",
        function=_triton,
        requires=_requirements(jnp.bfloat16, jnp.float16),
        platforms=GPU_PLATFORMS,
        probe="layerkit.ops.triton.find_missing_triton",
    ),
    Implementation(
        name="blocks",
        function=lambda rows, w, groups, **_: _blocked_matmul(rows, w, groups.sizes, groups.block),
    ),
    Implementation(
        name="ragged_dot",
        function=lambda rows, w, groups, **_: jax.lax.ragged_dot(rows, w, groups.sizes),
    ),
)
