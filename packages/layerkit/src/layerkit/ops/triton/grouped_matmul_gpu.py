"""Grouped products on GPUs: kernels in Pallas for the Triton backend.

Each group begins at a block of rows and ends at one (`RowGroups.block`), so that a block is
multiplied by the weights of one group and needs no masks. One kernel multiplies rows by weights; a
second one computes the gradients of weights and sums over the blocks of each group. Blocks without
a group are skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

# Largest tile of the outputs, and of the contracted dimension of a step. Three stages of two
# tiles in bfloat16 take 96 KiB of shared memory, which all GPUs since Ampere have.
_MAX_TILE = 128
_MAX_STEP = 64


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """Static options of the kernels.

    Attributes:
      block: Rows of a block, a power of two of at least 16.
      interpret: True to run in interpret mode on any device, for tests.
    """

    block: int
    interpret: bool = False


class BlocksOfRows(NamedTuple):
    """The groups of blocks of rows.

    Attributes:
      groups: Group of each block, int32 `[blocks]`, in ascending order.
      num_used: Number of blocks with a group, an int32 scalar.
    """

    groups: jax.Array
    num_used: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul_gpu(
    rows: jax.Array, w: jax.Array, blocks: BlocksOfRows, options: KernelOptions
) -> jax.Array:
    """Multiply rows by the weights of their groups.

    Args:
      rows: `[rows, in]`, sorted by group.
      w: `[groups, in, out]` in the dtype of the rows; in and out are multiples of 16.
      blocks: Groups of the blocks of rows.
      options: Static options.

    Returns:
      `[rows, out]`, with arbitrary values in blocks without a group.
    """
    return _products(rows, w, blocks, options, is_transposed=False)


def _forward(
    rows: jax.Array, w: jax.Array, blocks: BlocksOfRows, options: KernelOptions
) -> tuple[jax.Array, Any]:
    return grouped_matmul_gpu(rows, w, blocks, options), (rows, w, blocks)


def _backward(options: KernelOptions, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    rows, w, blocks = residuals
    of_rows = _products(gradient, w, blocks, options, is_transposed=True)
    of_w = _weight_gradients(rows, gradient, blocks, options, like=w)
    no_gradient = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), blocks)
    return of_rows, of_w, no_gradient


grouped_matmul_gpu.defvjp(_forward, _backward)


def _products(
    rows: jax.Array,
    w: jax.Array,
    blocks: BlocksOfRows,
    options: KernelOptions,
    *,
    is_transposed: bool,
) -> jax.Array:
    """Multiply `[rows, in]` by `[groups, in, out]`, or if it is transposed `[groups, out, in]`."""
    num_rows, dims = rows.shape
    num_groups, block = w.shape[0], options.block
    out_dims = w.shape[1] if is_transposed else w.shape[2]
    tile, step = math.gcd(out_dims, _MAX_TILE), math.gcd(dims, _MAX_STEP)

    def kernel(group: Any, used: Any, rows: Any, w: Any, out: Any) -> None:
        block_index = pl.program_id(0)

        @pl.when(block_index < used[0])
        def _() -> None:
            expert = group[0]

            def add(i: jax.Array, total: jax.Array) -> jax.Array:
                at = pl.ds(i * step, step)
                weights = w[expert, :, at].T if is_transposed else w[expert, at, :]
                return total + triton.dot(rows[:, at], weights)

            total = jnp.zeros(out.shape, jnp.float32)
            out[...] = jax.lax.fori_loop(0, dims // step, add, total).astype(out.dtype)

    of_weights = (num_groups, tile, dims) if is_transposed else (num_groups, dims, tile)
    return pl.pallas_call(
        kernel,
        # Blocks of rows come first, so that programs that run together share weights.
        grid=(num_rows // block, out_dims // tile),
        in_specs=[
            pl.BlockSpec((1,), lambda i, j: (i,)),
            pl.BlockSpec((1,), lambda i, j: (0,)),
            pl.BlockSpec((block, dims), lambda i, j: (i, 0)),
            pl.BlockSpec(of_weights, lambda i, j: (0, j, 0) if is_transposed else (0, 0, j)),
        ],
        out_specs=pl.BlockSpec((block, tile), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((num_rows, out_dims), rows.dtype),
        compiler_params=_compiler_params(block * tile),
        interpret=options.interpret,
        cost_estimate=_cost(num_rows, dims, out_dims, rows, w),
        name="grouped_matmul",
    )(blocks.groups, blocks.num_used[None], rows, w)


def _weight_gradients(
    rows: jax.Array,
    gradient: jax.Array,
    blocks: BlocksOfRows,
    options: KernelOptions,
    *,
    like: jax.Array,
) -> jax.Array:
    """Return the sums rowsᵀ · gradient of each group, `[groups, in, out]`, summed in float32."""
    num_rows, dims = rows.shape
    out_dims, num_groups = gradient.shape[1], like.shape[0]
    in_tile, out_tile = math.gcd(dims, _MAX_TILE), math.gcd(out_dims, _MAX_TILE)
    step = min(options.block, _MAX_STEP)
    is_used = jnp.arange(blocks.groups.size) < blocks.num_used
    counts = (
        jnp.zeros((num_groups,), jnp.int32)
        .at[blocks.groups]
        .add(is_used.astype(jnp.int32), mode="drop")
    )
    ends = jnp.cumsum(counts) * (options.block // step)
    starts = ends - counts * (options.block // step)

    def kernel(start: Any, end: Any, rows: Any, gradient: Any, out: Any) -> None:
        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            at = pl.ds(i * step, step)
            return total + triton.dot(rows[at, :].T, gradient[at, :])

        total = jnp.zeros(out.shape, jnp.float32)
        out[...] = jax.lax.fori_loop(start[0], end[0], add, total).astype(out.dtype)

    return pl.pallas_call(
        kernel,
        grid=(dims // in_tile, out_dims // out_tile, num_groups),
        in_specs=[
            pl.BlockSpec((1,), lambda i, j, g: (g,)),
            pl.BlockSpec((1,), lambda i, j, g: (g,)),
            pl.BlockSpec((num_rows, in_tile), lambda i, j, g: (0, i)),
            pl.BlockSpec((num_rows, out_tile), lambda i, j, g: (0, j)),
        ],
        out_specs=pl.BlockSpec((None, in_tile, out_tile), lambda i, j, g: (g, i, j)),
        out_shape=jax.ShapeDtypeStruct(like.shape, like.dtype),
        compiler_params=_compiler_params(in_tile * out_tile),
        interpret=options.interpret,
        cost_estimate=_cost(num_rows, dims, out_dims, rows, gradient),
        name="grouped_weight_gradients",
    )(starts, ends, rows, gradient)


def _compiler_params(size: int) -> triton.CompilerParams:
    """Return the options of a kernel whose programs sum `size` numbers in registers."""
    return triton.CompilerParams(num_warps=8 if size >= _MAX_TILE**2 else 4, num_stages=3)


def _cost(num_rows: int, dims: int, out_dims: int, *inputs: jax.Array) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=2 * num_rows * dims * out_dims,
        transcendentals=0,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in inputs),
    )
