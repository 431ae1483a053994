"""Pallas kernels of attention with a bias by distance on TPUs: forward and backward.

`layerkit.ops.attention.pallas.flash_tpu_bias` describes the method and calls them. Arrays are
`[batch, heads, length, dims]`. A block of logits is `[keys, queries]`, so that the numbers of each
query, such as the log-sum-exp of its logits, lie along the lanes of a vector.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from layerkit.ops.attention.masks import MASKED_LOGIT
from layerkit.ops.attention.pallas.kernel_math import (
    gradient_before_cap,
    unmasked_cost,
    zero_masked,
)

# Blocks of the gradient of the bias, which is stored for each of their diagonals.
_BIAS_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class BiasedOptions:
    """Static options of the kernels, for which they are compiled.

    Attributes:
      scale: Factor of the products of queries and keys.
      causal: True to hide keys at later positions.
      window: Distance from which keys are hidden; None for no window.
      logit_cap: Bound of the logits; None for no bound.
      block_queries: Queries in a block.
      block_keys: Keys in a block.
      learns_bias: True if the bias has a gradient.
      interpret: True to run in interpret mode.
    """

    scale: float
    causal: bool
    window: int | None
    logit_cap: float | None
    block_queries: int
    block_keys: int
    learns_bias: bool
    interpret: bool

    def is_visible(self, i: Any, j: Any) -> Any:
        """Return whether any query of block i sees any key of block j."""
        visible: Any = True
        if self.causal:
            visible = j * self.block_keys < (i + 1) * self.block_queries
        if self.window is not None:
            oldest = i * self.block_queries - self.window
            visible &= (j + 1) * self.block_keys - 1 > oldest
            if not self.causal:
                visible &= j * self.block_keys < (i + 1) * self.block_queries - 1 + self.window
        return visible


class Arrays(NamedTuple):
    """The arrays that all kernels read besides queries, keys and values.

    Attributes:
      bias: float32 `[heads, 1, 2·length]`, the bias of each distance (key position - query
        position) from length - 1 down to -(length - 1), followed by one unused number.
      query_segments: int32 `[batch, 1, length]`; None for a single segment.
      key_segments: int32 `[batch, length, 1]`; None for a single segment.
    """

    bias: Any
    query_segments: Any = None
    key_segments: Any = None


def forward(
    options: BiasedOptions, query: Any, key: Any, value: Any, sinks: Any, arrays: Arrays
) -> tuple[jax.Array, jax.Array]:
    """Return (outputs, log-sum-exp of each query's logits, float32 `[batch, heads, 1, length]`)."""
    batch, heads, length, head_dim = query.shape
    value_dim, group = value.shape[3], heads // key.shape[1]
    specs = _Specs(options, group, lambda b, h, i, j: (b, h, i, j))
    block = options.block_queries
    return _call(
        _forward_kernel,
        options,
        grid=(batch, heads, length // block, length // options.block_keys),
        inputs=(query, key, value, sinks, arrays),
        in_specs=(
            specs.queries(head_dim),
            specs.keys(head_dim),
            specs.keys(value_dim),
            None if sinks is None else specs.sinks(),
            specs.arrays(arrays),
        ),
        out_specs=[specs.queries(value_dim), specs.per_query()],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, length, value_dim), value.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM(shape, jnp.float32) for shape in ((value_dim, block), (1, block), (1, block))
        ],
        multiply_adds=batch * heads * length * length * (head_dim + value_dim),
    )


def _forward_kernel(
    options: BiasedOptions,
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    arrays: Arrays,
    out: Any,
    log_sum: Any,
    read: Any,
    largest: Any,
    total: Any,
) -> None:
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _start() -> None:
        read[...] = jnp.zeros_like(read)
        first = MASKED_LOGIT if sinks is None else sinks[...].astype(jnp.float32)
        largest[...] = jnp.broadcast_to(first, largest.shape)
        total[...] = jnp.full(total.shape, 0.0 if sinks is None else 1.0, jnp.float32)

    @pl.when(options.is_visible(i, j))
    def _add_block() -> None:
        logits, allowed = _logits(options, query[...], key[...], arrays, i, j)
        before = largest[...]
        now = jnp.maximum(before, logits.max(axis=0, keepdims=True))
        weights = zero_masked(allowed, jnp.exp(logits - now))
        shrink = jnp.exp(before - now)
        v = value[...]
        read[...] = read[...] * shrink + _dot(v, weights.astype(v.dtype), (0, 0))
        total[...] = total[...] * shrink + weights.sum(axis=0, keepdims=True)
        largest[...] = now

    @pl.when(j == pl.num_programs(3) - 1)
    def _end() -> None:
        # 0 for a query without visible keys.
        some = jnp.where(total[...] == 0.0, 1.0, total[...])
        out[...] = (read[...] / some).T.astype(out.dtype)
        log_sum[...] = largest[...] + jnp.log(some)


def query_gradient(options: BiasedOptions, *inputs: Any) -> jax.Array:
    """Return the gradient of the queries, `[batch, heads, length, head_dim]`.

    Args:
      options: Options of the kernel.
      *inputs: Queries, keys, values, gradient of the outputs, log-sum-exp of each query, product
        of its output and its gradient `[batch, heads, 1, length]`, and `Arrays`.
    """
    query, key, value = inputs[:3]
    batch, heads, length, head_dim = query.shape
    value_dim, group = value.shape[3], heads // key.shape[1]
    specs = _Specs(options, group, lambda b, h, i, j: (b, h, i, j))
    gradient: jax.Array = _call(
        _query_gradient_kernel,
        options,
        grid=(batch, heads, length // options.block_queries, length // options.block_keys),
        inputs=inputs,
        in_specs=specs.backward(inputs),
        out_specs=specs.queries(head_dim),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        scratch_shapes=[pltpu.VMEM((options.block_queries, head_dim), jnp.float32)],
        multiply_adds=batch * heads * length * length * (2 * head_dim + value_dim),
    )
    return gradient


def _query_gradient_kernel(options: BiasedOptions, *references: Any) -> None:
    *inputs, gradient, total = references
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _start() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(options.is_visible(i, j))
    def _add_block() -> None:
        _, change = _logit_gradients(options, inputs, i, j)
        k = inputs[1][...]
        total[...] += _dot((change * options.scale).astype(k.dtype), k, (0, 0))

    @pl.when(j == pl.num_programs(3) - 1)
    def _end() -> None:
        gradient[...] = total[...].astype(gradient.dtype)


def key_gradients(options: BiasedOptions, *inputs: Any) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of keys `[batch, kv_heads, length, head_dim]` and of values.

    See `query_gradient` for the arguments.
    """
    query, key, value = inputs[:3]
    batch, heads, length, head_dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
    group, block = heads // kv_heads, options.block_keys
    specs = _Specs(options, group, lambda b, h, j, member, i: (b, h * group + member, i, j))
    return _call(
        _key_gradients_kernel,
        options,
        grid=(batch, kv_heads, length // block, group, length // options.block_queries),
        inputs=inputs,
        in_specs=specs.backward(inputs),
        out_specs=[specs.keys(head_dim), specs.keys(value_dim)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key, value)],
        scratch_shapes=[pltpu.VMEM((block, dims), jnp.float32) for dims in (head_dim, value_dim)],
        multiply_adds=batch * heads * length * length * 2 * (head_dim + value_dim),
    )


def _key_gradients_kernel(options: BiasedOptions, *references: Any) -> None:
    *inputs, key_gradient, value_gradient, key_total, value_total = references
    j, member, i = (pl.program_id(axis) for axis in (2, 3, 4))

    @pl.when((member == 0) & (i == 0))
    def _start() -> None:
        key_total[...] = jnp.zeros_like(key_total)
        value_total[...] = jnp.zeros_like(value_total)

    @pl.when(options.is_visible(i, j))
    def _add_block() -> None:
        weights, change = _logit_gradients(options, inputs, i, j)
        q, out_grad = inputs[0][...], inputs[3][...]
        key_total[...] += _dot((change * options.scale).astype(q.dtype), q, (1, 0))
        value_total[...] += _dot(weights.astype(out_grad.dtype), out_grad, (1, 0))

    @pl.when((member == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _end() -> None:
        key_gradient[...] = key_total[...].astype(key_gradient.dtype)
        value_gradient[...] = value_total[...].astype(value_gradient.dtype)


def bias_tile_gradients(options: BiasedOptions, *inputs: Any) -> jax.Array:
    """Return the gradient of the bias of each diagonal of blocks, summed over the diagonal.

    Rows of a block, and of the matrix of blocks, are keys, and columns are queries. See
    `query_gradient` for the arguments.

    Returns:
      float32 `[heads, 2·n - 1, block, block]` for n blocks in a row; see
      `layerkit.ops.attention.distance_bias.sum_diagonals`.
    """
    query, key, value = inputs[:3]
    batch, heads, length, head_dim = query.shape
    value_dim = value.shape[3]
    block = math.gcd(length, _BIAS_BLOCK)
    options = dataclasses.replace(options, block_queries=block, block_keys=block)
    count = length // block
    # Step t visits the block of keys that is t before the block of queries, around the row. These
    # are two diagonals, of which the second begins with block t of the queries.
    specs = _Specs(
        options, heads // key.shape[1], lambda h, t, i, b: (b, h, i, _before(i, t, count))
    )

    def diagonal(h: Any, t: Any, i: Any, b: Any) -> Any:
        return h, jnp.where(i < t, t - 1, t + count - 1), 0, 0

    tiles: jax.Array = _call(
        _bias_gradient_kernel,
        options,
        grid=(heads, count, count, batch),
        inputs=inputs,
        in_specs=specs.backward(inputs),
        out_specs=pl.BlockSpec((None, None, block, block), diagonal),
        out_shape=jax.ShapeDtypeStruct((heads, 2 * count - 1, block, block), jnp.float32),
        num_parallel=2,
        multiply_adds=batch * heads * length * length * (head_dim + value_dim),
    )
    return tiles


def _bias_gradient_kernel(options: BiasedOptions, *references: Any) -> None:
    *inputs, gradient = references
    t, i, b = (pl.program_id(axis) for axis in (1, 2, 3))
    j = _before(i, t, pl.num_programs(2))

    @pl.when(((i == 0) | (i == t)) & (b == 0))
    def _start() -> None:
        gradient[...] = jnp.zeros_like(gradient)

    @pl.when(options.is_visible(i, j))
    def _add_block() -> None:
        gradient[...] += _logit_gradients(options, inputs, i, j)[1]


def _before(i: Any, steps: Any, count: Any) -> Any:
    """Return the block that is `steps` before block i, around a row of `count` blocks."""
    return jnp.where(i < steps, i - steps + count, i - steps)


def _logits(
    options: BiasedOptions, q: Any, k: Any, arrays: Arrays, i: Any, j: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Return (float32 logits of a block, mask of its allowed pairs or None for all)."""
    logits = _dot(k, q, (1, 1)) * options.scale
    logits += _bias_of_block(options, arrays.bias, i, j)
    if options.logit_cap is not None:
        logits = options.logit_cap * jnp.tanh(logits / options.logit_cap)
    conditions = []
    if options.causal or options.window is not None:
        iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32, logits.shape)
        first = i * options.block_queries - j * options.block_keys
        behind = first + iota(1) - iota(0)  # query position - key position
        if options.causal:
            conditions.append(behind >= 0)
        if options.window is not None:
            conditions.append(jnp.abs(behind) < options.window)
    if arrays.query_segments is not None:
        conditions.append(arrays.key_segments[...] == arrays.query_segments[...])
    if not conditions:
        return logits, None
    allowed = functools.reduce(jnp.logical_and, conditions)
    return jnp.where(allowed, logits, MASKED_LOGIT), allowed


def _bias_of_block(options: BiasedOptions, bias: Any, i: Any, j: Any) -> jax.Array:
    """Return the bias of each pair of a block, `[keys, queries]`."""
    queries, keys = options.block_queries, options.block_keys
    start = i * queries - j * keys + bias.shape[1] // 2 - keys
    # Number n of this vector is the bias of query r and key c with r - c + keys - 1 = n.
    by_distance = bias[:, pl.ds(pl.multiple_of(start, 128), queries + keys)]
    repeated = jnp.broadcast_to(by_distance, (keys, queries + keys))
    # Row c is turned to the left by keys - 1 - c, or to the right by the rest of its length.
    return pltpu.roll(repeated, queries + 1, 1, stride=1, stride_axis=0)[:, :queries]


def _logit_gradients(
    options: BiasedOptions, inputs: Any, i: Any, j: Any
) -> tuple[jax.Array, jax.Array]:
    """Return (probabilities of a block, gradients of its scaled products with the bias)."""
    query, key, value, out_gradient, log_sum, common, arrays = inputs
    logits, allowed = _logits(options, query[...], key[...], arrays, i, j)
    weights = zero_masked(allowed, jnp.exp(logits - log_sum[...]))
    change = weights * (_dot(value[...], out_gradient[...], (1, 1)) - common[...])
    return weights, gradient_before_cap(change, logits, allowed, logit_cap=options.logit_cap)


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Return the float32 product of two blocks over an axis of each."""
    axes = ((contracted[:1], contracted[1:]), ((), ()))
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Specs:
    """Block specs of the arrays that the kernels read and write.

    Attributes:
      options: Options of the kernel.
      group: Number of query heads of a key head.
      at: Function from the indices of a step of the grid to (row, query head, block of queries,
        block of keys).
    """

    options: BiasedOptions
    group: int
    at: Callable[..., tuple[Any, Any, Any, Any]]

    def queries(self, dims: int) -> pl.BlockSpec:
        """Return the spec of `[batch, heads, length, dims]`."""
        return self._spec((None, None, self.options.block_queries, dims), "b h i 0")

    def keys(self, dims: int) -> pl.BlockSpec:
        """Return the spec of `[batch, kv_heads, length, dims]`."""
        return self._spec((None, None, self.options.block_keys, dims), "b k j 0")

    def per_query(self) -> pl.BlockSpec:
        """Return the spec of `[batch, heads, 1, length]`."""
        return self._spec((None, None, 1, self.options.block_queries), "b h 0 i")

    def sinks(self) -> pl.BlockSpec:
        """Return the spec of `[heads, 1, 1]`."""
        return self._spec((None, 1, 1), "h 0 0")

    def arrays(self, arrays: Arrays) -> Arrays:
        """Return the specs of the other arrays."""
        bias = self._spec((None, 1, arrays.bias.shape[2]), "h 0 0")
        if arrays.query_segments is None:
            return Arrays(bias)
        query_segments = self._spec((None, 1, self.options.block_queries), "b 0 i")
        return Arrays(bias, query_segments, self._spec((None, self.options.block_keys, 1), "b j 0"))

    def backward(self, inputs: Any) -> tuple[Any, ...]:
        """Return the specs of the inputs of a backward kernel."""
        query, _, value, *_, arrays = inputs
        head_dim, value_dim = query.shape[3], value.shape[3]
        per_query = self.per_query()
        return (
            self.queries(head_dim),
            self.keys(head_dim),
            self.keys(value_dim),
            self.queries(value_dim),
            per_query,
            per_query,
            self.arrays(arrays),
        )

    def _spec(self, block: tuple[int | None, ...], axes: str) -> pl.BlockSpec:
        def index(*step: Any) -> tuple[Any, ...]:
            b, h, i, j = self.at(*step)
            by_name = {"b": b, "h": h, "k": jax.lax.div(h, self.group), "i": i, "j": j, "0": 0}
            return tuple(by_name[axis] for axis in axes.split())

        return pl.BlockSpec(block, index)


def _call(
    kernel: Any,
    options: BiasedOptions,
    *,
    grid: tuple[int, ...],
    inputs: Any,
    multiply_adds: int,
    num_parallel: int = 3,
    **call: Any,
) -> Any:
    """Call a kernel whose first `num_parallel` axes of the grid may run in any order."""
    semantics = (pltpu.PARALLEL,) * num_parallel + (pltpu.ARBITRARY,) * (len(grid) - num_parallel)
    return pl.pallas_call(
        functools.partial(kernel, options),
        grid=grid,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=options.interpret,
        cost_estimate=unmasked_cost(inputs, multiply_adds=multiply_adds),
        name=kernel.__name__.strip("_"),
        **call,
    )(*inputs)
