"""Pallas kernel of the gradient of a learned bias by distance on GPUs.

Blocks of queries and keys on one diagonal have the same bias. A program visits the blocks of one
diagonal in all rows of the batch and adds their gradients, always in the same order. Atomic
additions to a number per distance would give other roundings in each run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from layerkit.ops.attention.pallas.kernel_blocks import GpuTile
from layerkit.ops.triton.flash_gpu_kernels import (
    BackwardInputs,
    KernelOptions,
    block_logits,
    call_kernel,
    logit_gradients,
)


def bias_tile_gradients(options: KernelOptions, inputs: BackwardInputs) -> jax.Array:
    """Return the gradient of the bias of each diagonal of blocks, summed over the diagonal.

    Args:
      options: Options of the kernel.
      inputs: As many queries as keys, with a bias and a mask in row order.

    Returns:
      float32 `[heads, 2·n - 1, block, block]` for n blocks in a row; see
      `layerkit.ops.attention.distance_bias.sum_diagonals`.
    """
    batch, length, heads, head_dim = inputs.query.shape
    kv_heads, value_dim = inputs.value.shape[2:]
    group, block = heads // kv_heads, min(options.tile.queries, options.tile.keys)
    options = dataclasses.replace(options, tile=GpuTile(block, block))
    num_diagonals = 2 * (length // block) - 1
    per_query = pl.BlockSpec((batch, None, length), lambda h, t: (0, h, 0))
    gradient: jax.Array = call_kernel(
        _bias_gradient_kernel,
        options,
        grid=(heads, num_diagonals),
        inputs=inputs,
        in_specs=(
            _rows(inputs.query, group=1),
            _rows(inputs.key, group=group),
            _rows(inputs.value, group=group),
            _rows(inputs.out_gradient, group=1),
            per_query,
            per_query,
            jax.tree.map(
                lambda array: pl.BlockSpec(array.shape, lambda h, t: (0, 0)), inputs.arrays
            ),
            pl.BlockSpec((None, inputs.bias.shape[1]), lambda h, t: (h, 0)),
        ),
        out_specs=pl.BlockSpec((None, None, block, block), lambda h, t: (h, t, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((heads, num_diagonals, block, block), jnp.float32),
        multiply_adds=batch * heads * length * length * (head_dim + value_dim),
    )
    return gradient


def _bias_gradient_kernel(options: KernelOptions, *references: Any) -> None:
    *read, gradient = references
    inputs = BackwardInputs(*read)
    batch, length, _ = inputs.query.shape
    block = options.tile.queries
    count = length // block
    # Number of blocks from the queries to their keys.
    ahead = pl.program_id(1) - (count - 1)
    first, last = jnp.maximum(0, -ahead), jnp.minimum(count, count - ahead)
    if options.causal:
        last = jnp.where(ahead > 0, first, last)
    if options.window is not None:
        nearest = (jnp.abs(ahead) - 1) * block + 1  # distance from a query to a key
        last = jnp.where(nearest < options.window, last, first)

    def row(b: jax.Array, total: jax.Array) -> jax.Array:
        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            at_queries, at_keys = pl.ds(i * block, block), pl.ds((i + ahead) * block, block)
            q, k = inputs.query[b, at_queries, :], inputs.key[b, at_keys, :]
            logits, allowed = block_logits(
                options, q, k, inputs.arrays, at_queries, at_keys, inputs.bias, row=(b,)
            )
            numbers = inputs.log_sum[b, at_queries], inputs.common[b, at_queries]
            out_grad, v = inputs.out_gradient[b, at_queries, :], inputs.value[b, at_keys, :]
            return total + logit_gradients(options, logits, allowed, numbers, out_grad, v)[1]

        return jax.lax.fori_loop(first, last, step, total)

    zeros = jnp.zeros((block, block), jnp.float32)
    gradient[...] = jax.lax.fori_loop(0, batch, row, zeros)


def _rows(array: jax.Array, *, group: int) -> pl.BlockSpec:
    """Return the spec of one head of all rows of `[batch, length, heads, dims]`."""
    batch, length, _, dims = array.shape
    return pl.BlockSpec((batch, length, None, dims), lambda h, t: (0, 0, jax.lax.div(h, group), 0))
