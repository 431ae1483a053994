"""Pallas kernels of attention on GPUs, for the Triton backend: forward and backward.

`layerkit.ops.triton.flash_gpu` describes the method and calls them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from layerkit.ops.attention.masks import MASKED_LOGIT
from layerkit.ops.attention.pallas.kernel_blocks import GpuTile
from layerkit.ops.attention.pallas.kernel_math import (
    gradient_before_cap,
    overlapping_blocks,
    unmasked_cost,
    zero_masked,
)


class MaskArrays(NamedTuple):
    """The arrays of a mask, int32 `[batch, queries]` and `[batch, keys]`; None if not needed."""

    query_positions: Any = None
    key_positions: Any = None
    query_segments: Any = None
    key_segments: Any = None


class BackwardInputs(NamedTuple):
    """The arrays that the kernels of the backward pass read, or references to them.

    Attributes:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      out_gradient: `[batch, queries, heads, value_dim]`.
      log_sum: Log-sum-exp of each query's logits, float32 `[batch, heads, queries]`.
      common: Product of the output and its gradient of each query, float32 `[batch, heads,
        queries]`.
      arrays: Arrays of the mask.
      bias: float32 `[heads, 2·length - 1]`, the bias by distance; None for no bias.
    """

    query: Any
    key: Any
    value: Any
    out_gradient: Any
    log_sum: Any
    common: Any
    arrays: MaskArrays
    bias: Any = None


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """Static options of the kernels, for which they are compiled.

    Attributes:
      scale: Factor of the products of queries and keys.
      causal: True to hide keys at later positions.
      window: Distance from which keys are hidden; None for no window.
      in_row_order: True if hidden blocks can be skipped.
      logit_cap: Bound of the logits; None for no bound.
      tile: Block of queries and keys.
      interpret: True to run in interpret mode.
      result_dtype: Dtype of outputs and gradients; None for the dtypes of the inputs.
      learns_bias: True if the bias has a gradient.
    """

    scale: float
    causal: bool
    window: int | None
    in_row_order: bool
    logit_cap: float | None
    tile: GpuTile
    interpret: bool
    result_dtype: Any = None
    learns_bias: bool = False

    def result(self, shape: tuple[int, ...], like: Any) -> jax.ShapeDtypeStruct:
        """Return the type of a result that has the dtype of `like` unless `result_dtype` is set."""
        return jax.ShapeDtypeStruct(shape, self.result_dtype or like.dtype)


def forward(
    options: KernelOptions,
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    arrays: MaskArrays,
    bias: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (outputs, log-sum-exp of each query's logits, float32 `[batch, heads, queries]`)."""
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads, value_dim = value.shape[1:]
    group, block = heads // kv_heads, options.tile.queries
    visible = _visible_blocks(arrays.query_segments, arrays.key_segments, blocks=options.tile[:2])
    return call_kernel(
        _forward_kernel,
        options,
        grid=(batch, heads, queries // block),
        inputs=(query, key, value, sinks, arrays, bias, visible),
        in_specs=(
            _block(block, head_dim),
            _row(keys, head_dim, group=group),
            _row(keys, value_dim, group=group),
            None if sinks is None else pl.BlockSpec((1,), lambda b, h, i: (h,)),
            _mask_specs(arrays),
            _bias_spec(bias),
            _visible_spec(visible),
        ),
        out_specs=[_block(block, value_dim), _per_query_block(block)],
        out_shape=[
            options.result((batch, queries, heads, value_dim), value),
            jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
        ],
        multiply_adds=batch * heads * queries * keys * (head_dim + value_dim),
    )


def _forward_kernel(
    options: KernelOptions,
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    arrays: MaskArrays,
    bias: Any,
    visible: Any,
    out: Any,
    log_sum: Any,
) -> None:
    block, index = options.tile.queries, pl.program_id(2)
    q, at_queries = query[...], pl.ds(index * block, block)

    def step(j: jax.Array, carry: Any) -> Any:
        read, largest, total = carry
        at_keys = pl.ds(j * options.tile.keys, options.tile.keys)
        logits, allowed = block_logits(
            options, q, key[at_keys, :], arrays, at_queries, at_keys, bias
        )
        new_largest = jnp.maximum(largest, logits.max(axis=1))
        weights = zero_masked(allowed, jnp.exp(logits - new_largest[:, None]))
        shrink = jnp.exp(largest - new_largest)
        v = value[at_keys, :]
        read = read * shrink[:, None] + _dot(weights.astype(v.dtype), v)
        return read, new_largest, total * shrink + weights.sum(axis=1)

    if sinks is None:
        largest = jnp.full((block,), MASKED_LOGIT, jnp.float32)
        total = jnp.zeros((block,), jnp.float32)
    else:
        largest = jnp.broadcast_to(sinks[...].astype(jnp.float32), (block,))
        total = jnp.ones((block,), jnp.float32)
    read = jnp.zeros((block, value.shape[-1]), jnp.float32)
    first, last = _visited_blocks(options, index, key.shape[0], visible, of_keys=True)
    read, largest, total = jax.lax.fori_loop(first, last, step, (read, largest, total))
    total = jnp.where(total == 0.0, 1.0, total)  # The query sees no key, and `read` is 0.
    out[...] = (read / total[:, None]).astype(out.dtype)
    log_sum[...] = largest + jnp.log(total)


def query_gradient(options: KernelOptions, inputs: BackwardInputs) -> jax.Array:
    """Return the gradient of the queries, `[batch, queries, heads, head_dim]`."""
    batch, queries, heads, head_dim = inputs.query.shape
    keys, kv_heads, value_dim = inputs.value.shape[1:]
    group, block = heads // kv_heads, options.tile.queries
    arrays = inputs.arrays
    visible = _visible_blocks(arrays.query_segments, arrays.key_segments, blocks=options.tile[:2])
    gradient: jax.Array = call_kernel(
        _query_gradient_kernel,
        options,
        grid=(batch, heads, queries // block),
        inputs=(*inputs, visible),
        in_specs=(
            _block(block, head_dim),
            _row(keys, head_dim, group=group),
            _row(keys, value_dim, group=group),
            _block(block, value_dim),
            _per_query_block(block),
            _per_query_block(block),
            _mask_specs(inputs.arrays),
            _bias_spec(inputs.bias),
            _visible_spec(visible),
        ),
        out_specs=_block(block, head_dim),
        out_shape=options.result(inputs.query.shape, inputs.query),
        multiply_adds=batch * heads * queries * keys * (2 * head_dim + value_dim),
    )
    return gradient


def _query_gradient_kernel(options: KernelOptions, *references: Any) -> None:
    *read, visible, gradient = references
    inputs = BackwardInputs(*read)
    block, index = options.tile.queries, pl.program_id(2)
    q, out_grad, at_queries = (
        inputs.query[...],
        inputs.out_gradient[...],
        pl.ds(index * block, block),
    )
    numbers = inputs.log_sum[...], inputs.common[...]

    def step(j: jax.Array, total: jax.Array) -> jax.Array:
        at_keys = pl.ds(j * options.tile.keys, options.tile.keys)
        k, v = inputs.key[at_keys, :], inputs.value[at_keys, :]
        logits, allowed = block_logits(
            options, q, k, inputs.arrays, at_queries, at_keys, inputs.bias
        )
        _, change = logit_gradients(options, logits, allowed, numbers, out_grad, v)
        return total + _dot((change * options.scale).astype(k.dtype), k)

    first, last = _visited_blocks(options, index, inputs.key.shape[0], visible, of_keys=True)
    total = jax.lax.fori_loop(first, last, step, jnp.zeros(q.shape, jnp.float32))
    gradient[...] = total.astype(gradient.dtype)


def key_gradients(options: KernelOptions, inputs: BackwardInputs) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of keys `[batch, keys, kv_heads, head_dim]` and of values."""
    batch, queries, heads, head_dim = inputs.query.shape
    keys, kv_heads, value_dim = inputs.value.shape[1:]
    bias = inputs.bias
    group, block = heads // kv_heads, options.tile.keys
    # The query heads of a key head are adjacent, so that one block holds them all.
    numbers = pl.BlockSpec((None, group, queries), lambda b, h, j: (b, h, 0))
    arrays, blocks = inputs.arrays, (block, options.tile.queries)
    visible = _visible_blocks(arrays.key_segments, arrays.query_segments, blocks=blocks)
    return call_kernel(
        _key_gradients_kernel,
        options,
        grid=(batch, kv_heads, keys // block),
        inputs=(*inputs, visible),
        in_specs=(
            pl.BlockSpec((None, queries, group, head_dim), lambda b, h, j: (b, 0, h, 0)),
            _block(block, head_dim),
            _block(block, value_dim),
            pl.BlockSpec((None, queries, group, value_dim), lambda b, h, j: (b, 0, h, 0)),
            numbers,
            numbers,
            _mask_specs(inputs.arrays),
            None if bias is None else pl.BlockSpec((group, bias.shape[1]), lambda b, h, j: (h, 0)),
            _visible_spec(visible),
        ),
        out_specs=[_block(block, head_dim), _block(block, value_dim)],
        out_shape=[
            options.result(inputs.key.shape, inputs.key),
            options.result(inputs.value.shape, inputs.value),
        ],
        multiply_adds=batch * heads * queries * keys * 2 * (head_dim + value_dim),
    )


def _key_gradients_kernel(options: KernelOptions, *references: Any) -> None:
    *read, visible, key_gradient, value_gradient = references
    inputs = BackwardInputs(*read)
    block, index = options.tile.keys, pl.program_id(2)
    k, v, at_keys = inputs.key[...], inputs.value[...], pl.ds(index * block, block)
    first, last = _visited_blocks(options, index, inputs.query.shape[0], visible, of_keys=False)

    def head(g: jax.Array, totals: Any) -> Any:
        def step(i: jax.Array, totals: Any) -> Any:
            key_total, value_total = totals
            at_queries = pl.ds(i * options.tile.queries, options.tile.queries)
            q, out_grad = inputs.query[at_queries, g, :], inputs.out_gradient[at_queries, g, :]
            logits, allowed = block_logits(
                options, q, k, inputs.arrays, at_queries, at_keys, inputs.bias, head=(g,)
            )
            numbers = inputs.log_sum[g, at_queries], inputs.common[g, at_queries]
            weights, change = logit_gradients(options, logits, allowed, numbers, out_grad, v)
            key_total += _dot((change * options.scale).astype(q.dtype).T, q)
            return key_total, value_total + _dot(weights.astype(out_grad.dtype).T, out_grad)

        return jax.lax.fori_loop(first, last, step, totals)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    key_total, value_total = jax.lax.fori_loop(0, inputs.query.shape[1], head, zeros)
    key_gradient[...] = key_total.astype(key_gradient.dtype)
    value_gradient[...] = value_total.astype(value_gradient.dtype)


def block_logits(
    options: KernelOptions,
    q: Any,
    k: Any,
    arrays: MaskArrays,
    at_queries: Any,
    at_keys: Any,
    bias: Any,
    *,
    row: tuple[Any, ...] = (),
    head: tuple[Any, ...] = (),
) -> tuple[jax.Array, jax.Array | None]:
    """Return (float32 logits of a block, mask of its allowed pairs or None for all).

    Args:
      options: Options of the kernel.
      q: Block of queries, `[block_queries, head_dim]`.
      k: Block of keys, `[block_keys, head_dim]`.
      arrays: References to the mask.
      at_queries: `pl.ds` of the block of queries in the row.
      at_keys: `pl.ds` of the block of keys in the row.
      bias: Reference to the bias by distance; None for no bias.
      row: Index of the row in the mask; () if `arrays` has one row.
      head: Index of the head in the bias; () if `bias` has one head.
    """
    logits = _dot(q, k.T) * options.scale
    if bias is not None:
        first = at_keys.start - at_queries.start + bias.shape[-1] // 2  # that of distance 0
        queries, keys = jnp.arange(options.tile.queries), jnp.arange(options.tile.keys)
        logits += bias[(*head, first + keys[None, :] - queries[:, None])]
    if options.logit_cap is not None:
        logits = options.logit_cap * jnp.tanh(logits / options.logit_cap)
    conditions = []
    if arrays.query_positions is not None:
        queries = arrays.query_positions[(*row, at_queries)][:, None]
        keys = arrays.key_positions[(*row, at_keys)][None, :]
        if options.causal:
            conditions.append(keys <= queries)
        if options.window is not None:
            conditions.append(queries - keys < options.window)
            conditions.append(keys - queries < options.window)
    if arrays.query_segments is not None:
        segments = arrays.query_segments[(*row, at_queries)][:, None]
        conditions.append(segments == arrays.key_segments[(*row, at_keys)][None, :])
    if not conditions:
        return logits, None
    allowed = functools.reduce(jnp.logical_and, conditions)
    return jnp.where(allowed, logits, MASKED_LOGIT), allowed


def logit_gradients(
    options: KernelOptions,
    logits: Any,
    allowed: Any,
    numbers: tuple[Any, Any],
    out_grad: Any,
    v: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return (probabilities of a block, gradients of its scaled products of queries and keys).

    Args:
      options: Options of the kernel.
      logits: Capped and masked logits, `[block_queries, block_keys]`.
      allowed: Mask of the allowed pairs; None for all.
      numbers: Log-sum-exp and product of output and gradient of each query.
      out_grad: Gradient of the output of the queries, `[block_queries, value_dim]`.
      v: Block of values, `[block_keys, value_dim]`.
    """
    log_sum, common = numbers
    weights = zero_masked(allowed, jnp.exp(logits - log_sum[:, None]))
    change = weights * (_dot(out_grad, v.T) - common[:, None])
    return weights, gradient_before_cap(change, logits, allowed, logit_cap=options.logit_cap)


def _visible_blocks(segments: Any, others: Any, *, blocks: tuple[int, int]) -> jax.Array | None:
    """Return `overlapping_blocks`; None, for all blocks, without segments."""
    return None if segments is None else overlapping_blocks(segments, others, blocks=blocks)


def _visited_blocks(
    options: KernelOptions, index: Any, length: int, visible: Any, *, of_keys: bool
) -> tuple[Any, Any]:
    """Return the first and last (exclusive) block of a row that another block visits.

    Args:
      options: Options of the kernel.
      index: Index of the visiting block.
      length: Length of the visited row.
      visible: Reference to the first and last block by segments; None for all.
      of_keys: A block of queries visits the keys that it may see; or one of keys, the queries that
        may see it.
    """
    tile, size = options.tile.queries, options.tile.keys
    behind = None if options.window is None else options.window - 1
    ahead = 0 if options.causal else behind
    if not of_keys:
        tile, size, behind, ahead = size, tile, ahead, behind
    first, last = (0, length // size) if visible is None else (visible[0], visible[1])
    if not options.in_row_order:
        return first, last
    if behind is not None:
        first = jnp.maximum(first, jax.lax.div(jnp.maximum(index * tile - behind, 0), size))
    if ahead is not None:
        last = jnp.minimum(last, jax.lax.div((index + 1) * tile + ahead + size - 1, size))
    return first, last


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the float32 product of two blocks, without TensorFloat-32 for float32 blocks."""
    return triton.dot(a, b, precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def call_kernel(
    kernel: Any, options: KernelOptions, *, inputs: Any, multiply_adds: int, **call: Any
) -> Any:
    """Call a kernel of `options` and references.

    Args:
      kernel: Function of the options, of references to `inputs` and of references to the outputs.
      options: Options of the kernel.
      inputs: Arrays, the queries first.
      multiply_adds: Number of multiplications of the products without a mask.
      **call: Grid, specs and type of the outputs; see `pl.pallas_call`.
    """
    return pl.pallas_call(
        functools.partial(kernel, options),
        compiler_params=triton.CompilerParams(
            num_warps=options.tile.warps, num_stages=options.tile.stages
        ),
        interpret=options.interpret,
        cost_estimate=unmasked_cost(inputs, multiply_adds=multiply_adds),
        name=kernel.__name__.strip("_"),
        **call,
    )(*inputs)


def _block(length: int, dims: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, length, None, dims), lambda b, h, i: (b, i, h, 0))


def _row(length: int, dims: int, *, group: int) -> pl.BlockSpec:
    return pl.BlockSpec(
        (None, length, None, dims), lambda b, h, i: (b, 0, jax.lax.div(h, group), 0)
    )


def _per_query_block(length: int) -> pl.BlockSpec:
    """Return the spec of an array with one number per query, `[batch, heads, queries]`."""
    return pl.BlockSpec((None, None, length), lambda b, h, i: (b, h, i))


def _bias_spec(bias: Any) -> pl.BlockSpec | None:
    """Return the spec of the bias of a query head, of `[heads, 2·length - 1]`."""
    return None if bias is None else pl.BlockSpec((None, bias.shape[1]), lambda b, h, i: (h, 0))


def _mask_specs(arrays: MaskArrays) -> MaskArrays:
    return jax.tree.map(
        lambda array: pl.BlockSpec((None, array.shape[1]), lambda b, h, i: (b, 0)), arrays
    )


def _visible_spec(visible: Any) -> pl.BlockSpec | None:
    """Return the spec of (first, last) blocks that a program visits, `[batch, blocks, 2]`."""
    return None if visible is None else pl.BlockSpec((None, None, 2), lambda b, h, i: (b, i, 0))
