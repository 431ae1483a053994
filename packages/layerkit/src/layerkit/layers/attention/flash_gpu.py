"""Attention as one fused kernel on GPUs, written in Pallas for Triton.

FlashAttention-2 (Dao, 2023, arXiv:2307.08691): a program holds one block of queries, walks over the
blocks of keys with a running maximum and sum, and never writes logits to memory. The backward pass
computes them anew from the log-sum-exp of each query: one kernel for queries, one for keys and
values, where a program adds up all query heads of its key head, so that grouped keys are never
repeated.

Positions and segments are read as arrays, so it does not matter where a row or a cache begins.
Where positions are known to be the order of the row, blocks that lie outside the causal triangle or
the window are not visited. A query that sees no key reads 0.

JAX 0.12 deprecates the Triton backend of Pallas in favor of Mosaic GPU; a later version removes it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from layerkit.layers.attention.xla import MASKED_LOGIT
from layerkit.layers.masks import AttentionMask


class _Marks(NamedTuple):
    """int32 `[batch, queries]` and `[batch, keys]` of a mask; None for what it does not need."""

    query_positions: Any = None
    key_positions: Any = None
    query_segments: Any = None
    key_segments: Any = None


@dataclasses.dataclass(frozen=True)
class _Form:
    """What the kernels are compiled for."""

    scale: float
    causal: bool
    window: int | None
    in_row_order: bool
    logit_cap: float | None
    block_queries: int
    block_keys: int
    interpret: bool


def flash_attention_gpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: AttentionMask | None,
    scale: float,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `layerkit.layers.attention.dot_product.dot_product_attention`.

    Args:
      query: `[batch, queries, heads, head_dim]`, queries a multiple of 16.
      key: `[batch, keys, kv_heads, head_dim]`, keys a multiple of 16.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: Which query may attend which key; None for all. Not one with a prefix.
      scale: Multiplies the products of queries and keys.
      sinks: `[heads]`, a logit per head that takes probability and gives nothing.
      logit_cap: Squeezes the logits into ±logit_cap.
      interpret: Runs the kernel step by step on any device, for tests.

    Returns:
      `[batch, queries, heads, value_dim]` in the dtype of `value`; 0 for a query that sees no key.
    """
    value_dim = value.shape[-1]
    # Larger blocks would not fit the registers of a program; exact products of float32 blocks are
    # unrolled, and take minutes to compile.
    is_small = max(query.shape[-1], value_dim) <= 128 and query.dtype != jnp.float32
    limit = 64 if is_small else 32
    form = _Form(
        scale=scale,
        causal=mask is not None and mask.causal,
        window=None if mask is None else mask.window,
        in_row_order=mask is not None and mask.in_row_order,
        logit_cap=logit_cap,
        block_queries=_block_size(query.shape[1], limit),
        block_keys=_block_size(key.shape[1], limit),
        interpret=interpret,
    )
    marks = _Marks()
    if mask is not None:
        if form.causal or form.window is not None:
            marks = marks._replace(
                query_positions=mask.query_positions, key_positions=mask.key_positions
            )
        marks = marks._replace(query_segments=mask.query_segments, key_segments=mask.key_segments)
        batch = query.shape[0]
        marks = _Marks(*(None if m is None else _with_rows(m, batch) for m in marks))
    query, key, value = (_pad_heads(x) for x in (query, key, value))
    return _flash(form, query, key, value, sinks, marks)[..., :value_dim]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(form: _Form, query: Any, key: Any, value: Any, sinks: Any, marks: _Marks) -> jax.Array:
    return _forward(form, query, key, value, sinks, marks)[0]


def _flash_forward(
    form: _Form, query: Any, key: Any, value: Any, sinks: Any, marks: _Marks
) -> tuple[jax.Array, Any]:
    out, log_sum = _forward(form, query, key, value, sinks, marks)
    return out, (query, key, value, sinks, marks, out, log_sum)


def _flash_backward(form: _Form, kept: Any, out_gradient: jax.Array) -> Any:
    query, key, value, sinks, marks, out, log_sum = kept
    products = out.astype(jnp.float32) * out_gradient.astype(jnp.float32)
    # What the softmax takes from each of a query's gradients, [batch, heads, queries].
    common = jnp.swapaxes(products.sum(axis=-1), 1, 2)
    inputs = (query, key, value, out_gradient, log_sum, common, marks)
    query_gradient = _query_gradient(form, *inputs)
    key_gradient, value_gradient = _key_gradients(form, *inputs)
    sinks_gradient = None
    if sinks is not None:
        weight = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - log_sum)
        sinks_gradient = -(weight * common).sum(axis=(0, 2)).astype(sinks.dtype)
    return query_gradient, key_gradient, value_gradient, sinks_gradient, _Marks()


_flash.defvjp(_flash_forward, _flash_backward)


def _forward(
    form: _Form, query: Any, key: Any, value: Any, sinks: Any, marks: _Marks
) -> tuple[jax.Array, jax.Array]:
    """Outputs and the log-sum-exp of each query's logits, float32 `[batch, heads, queries]`."""
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads, value_dim = value.shape[1:]
    group, block = heads // kv_heads, form.block_queries
    return _call(
        _forward_kernel,
        form,
        grid=(batch, heads, queries // block),
        inputs=(query, key, value, sinks, marks),
        in_specs=(
            _block(block, head_dim),
            _row(keys, head_dim, group=group),
            _row(keys, value_dim, group=group),
            None if sinks is None else pl.BlockSpec((1,), lambda b, h, i: (h,)),
            _mark_rows(marks),
        ),
        out_specs=[_block(block, value_dim), _number_block(block)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, queries, heads, value_dim), value.dtype),
            jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
        ],
        multiply_adds=batch * heads * queries * keys * (head_dim + value_dim),
    )


def _forward_kernel(
    form: _Form, query: Any, key: Any, value: Any, sinks: Any, marks: _Marks, out: Any, log_sum: Any
) -> None:
    block, index = form.block_queries, pl.program_id(2)
    q, at_queries = query[...], pl.ds(index * block, block)

    def step(j: jax.Array, carry: Any) -> Any:
        read, largest, total = carry
        at_keys = pl.ds(j * form.block_keys, form.block_keys)
        logits, allowed = _logits(form, q, key[at_keys, :], marks, at_queries, at_keys)
        new_largest = jnp.maximum(largest, logits.max(axis=1))
        weights = _keep(allowed, jnp.exp(logits - new_largest[:, None]))
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
    first, last = _blocks_of_keys(form, index, key.shape[0])
    read, largest, total = jax.lax.fori_loop(first, last, step, (read, largest, total))
    total = jnp.where(total == 0.0, 1.0, total)  # sees no key, and has read nothing
    out[...] = (read / total[:, None]).astype(out.dtype)
    log_sum[...] = largest + jnp.log(total)


def _query_gradient(
    form: _Form,
    query: Any,
    key: Any,
    value: Any,
    out_gradient: Any,
    log_sum: Any,
    common: Any,
    marks: _Marks,
) -> jax.Array:
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads, value_dim = value.shape[1:]
    group, block = heads // kv_heads, form.block_queries
    gradient: jax.Array = _call(
        _query_gradient_kernel,
        form,
        grid=(batch, heads, queries // block),
        inputs=(query, key, value, out_gradient, log_sum, common, marks),
        in_specs=(
            _block(block, head_dim),
            _row(keys, head_dim, group=group),
            _row(keys, value_dim, group=group),
            _block(block, value_dim),
            _number_block(block),
            _number_block(block),
            _mark_rows(marks),
        ),
        out_specs=_block(block, head_dim),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        multiply_adds=batch * heads * queries * keys * (2 * head_dim + value_dim),
    )
    return gradient


def _query_gradient_kernel(
    form: _Form,
    query: Any,
    key: Any,
    value: Any,
    out_gradient: Any,
    log_sum: Any,
    common: Any,
    marks: _Marks,
    gradient: Any,
) -> None:
    block, index = form.block_queries, pl.program_id(2)
    q, given, at_queries = query[...], out_gradient[...], pl.ds(index * block, block)
    numbers = log_sum[...], common[...]

    def step(j: jax.Array, total: jax.Array) -> jax.Array:
        at_keys = pl.ds(j * form.block_keys, form.block_keys)
        k = key[at_keys, :]
        logits, allowed = _logits(form, q, k, marks, at_queries, at_keys)
        _, change = _changes(form, logits, allowed, numbers, given, value[at_keys, :])
        return total + _dot(change.astype(k.dtype), k)

    first, last = _blocks_of_keys(form, index, key.shape[0])
    total = jax.lax.fori_loop(first, last, step, jnp.zeros(q.shape, jnp.float32))
    gradient[...] = total.astype(gradient.dtype)


def _key_gradients(
    form: _Form,
    query: Any,
    key: Any,
    value: Any,
    out_gradient: Any,
    log_sum: Any,
    common: Any,
    marks: _Marks,
) -> tuple[jax.Array, jax.Array]:
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads, value_dim = value.shape[1:]
    group, block = heads // kv_heads, form.block_keys
    # The query heads of a key head lie side by side: one block holds them all.
    numbers = pl.BlockSpec((None, group, queries), lambda b, h, j: (b, h, 0))
    return _call(
        _key_gradients_kernel,
        form,
        grid=(batch, kv_heads, keys // block),
        inputs=(query, key, value, out_gradient, log_sum, common, marks),
        in_specs=(
            pl.BlockSpec((None, queries, group, head_dim), lambda b, h, j: (b, 0, h, 0)),
            _block(block, head_dim),
            _block(block, value_dim),
            pl.BlockSpec((None, queries, group, value_dim), lambda b, h, j: (b, 0, h, 0)),
            numbers,
            numbers,
            _mark_rows(marks),
        ),
        out_specs=[_block(block, head_dim), _block(block, value_dim)],
        out_shape=[
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
        ],
        multiply_adds=batch * heads * queries * keys * 2 * (head_dim + value_dim),
    )


def _key_gradients_kernel(
    form: _Form,
    query: Any,
    key: Any,
    value: Any,
    out_gradient: Any,
    log_sum: Any,
    common: Any,
    marks: _Marks,
    key_gradient: Any,
    value_gradient: Any,
) -> None:
    block, index = form.block_keys, pl.program_id(2)
    k, v, at_keys = key[...], value[...], pl.ds(index * block, block)
    first, last = _blocks_of_queries(form, index, query.shape[0])

    def head(g: jax.Array, totals: Any) -> Any:
        def step(i: jax.Array, totals: Any) -> Any:
            key_total, value_total = totals
            at_queries = pl.ds(i * form.block_queries, form.block_queries)
            q, given = query[at_queries, g, :], out_gradient[at_queries, g, :]
            logits, allowed = _logits(form, q, k, marks, at_queries, at_keys)
            numbers = log_sum[g, at_queries], common[g, at_queries]
            weights, change = _changes(form, logits, allowed, numbers, given, v)
            key_total += _dot(change.astype(q.dtype).T, q)
            return key_total, value_total + _dot(weights.astype(given.dtype).T, given)

        return jax.lax.fori_loop(first, last, step, totals)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    key_total, value_total = jax.lax.fori_loop(0, query.shape[1], head, zeros)
    key_gradient[...] = key_total.astype(key_gradient.dtype)
    value_gradient[...] = value_total.astype(value_gradient.dtype)


def _logits(
    form: _Form, q: Any, k: Any, marks: _Marks, at_queries: Any, at_keys: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Float32 logits of a block, and which of its pairs the mask allows (None for all)."""
    logits = _dot(q, k.T) * form.scale
    if form.logit_cap is not None:
        logits = form.logit_cap * jnp.tanh(logits / form.logit_cap)
    conditions = []
    if marks.query_positions is not None:
        queries = marks.query_positions[at_queries][:, None]
        keys = marks.key_positions[at_keys][None, :]
        if form.causal:
            conditions.append(keys <= queries)
        if form.window is not None:
            conditions.append(queries - keys < form.window)
            conditions.append(keys - queries < form.window)
    if marks.query_segments is not None:
        segments = marks.query_segments[at_queries][:, None]
        conditions.append(segments == marks.key_segments[at_keys][None, :])
    if not conditions:
        return logits, None
    allowed = functools.reduce(jnp.logical_and, conditions)
    return jnp.where(allowed, logits, MASKED_LOGIT), allowed


def _changes(
    form: _Form, logits: Any, allowed: Any, numbers: tuple[Any, Any], given: Any, v: Any
) -> tuple[jax.Array, jax.Array]:
    """Probabilities of a block, and the gradients of its products of queries and keys."""
    log_sum, common = numbers
    weights = _keep(allowed, jnp.exp(logits - log_sum[:, None]))
    change = weights * (_dot(given, v.T) - common[:, None]) * form.scale
    if form.logit_cap is not None:
        # A masked logit is far outside the cap, and its weight is 0.
        slope = 1.0 - jnp.square(logits / form.logit_cap)
        change = _keep(allowed, change * slope)
    return weights, change


def _keep(allowed: jax.Array | None, x: jax.Array) -> jax.Array:
    # A row whose keys are all hidden has exp(0), not 0, in every place.
    return x if allowed is None else jnp.where(allowed, x, 0.0)


def _blocks_of_keys(form: _Form, index: Any, num_keys: int) -> tuple[Any, Any]:
    """First and last (exclusive) block of keys that a block of queries may see."""
    first: Any = 0
    last: Any = num_keys // form.block_keys
    if not form.in_row_order:
        return first, last
    start, end = index * form.block_queries, (index + 1) * form.block_queries
    ahead = 0 if form.causal else None if form.window is None else form.window - 1
    if ahead is not None:
        last = jnp.minimum(last, _divide_up(end + ahead, form.block_keys))
    if form.window is not None:
        first = jax.lax.div(jnp.maximum(start - form.window + 1, 0), form.block_keys)
    return first, last


def _blocks_of_queries(form: _Form, index: Any, num_queries: int) -> tuple[Any, Any]:
    """First and last (exclusive) block of queries that may see a block of keys."""
    first: Any = 0
    last: Any = num_queries // form.block_queries
    if not form.in_row_order:
        return first, last
    start, end = index * form.block_keys, (index + 1) * form.block_keys
    behind = 0 if form.causal else None if form.window is None else form.window - 1
    if behind is not None:
        first = jax.lax.div(jnp.maximum(start - behind, 0), form.block_queries)
    if form.window is not None:
        last = jnp.minimum(last, _divide_up(end + form.window - 1, form.block_queries))
    return first, last


def _divide_up(a: Any, b: int) -> Any:
    return jax.lax.div(a + b - 1, b)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product of two blocks in float32; float32 blocks are not cut down to TensorFloat-32."""
    return triton.dot(a, b, precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def _call(kernel: Any, form: _Form, *, inputs: Any, multiply_adds: int, **options: Any) -> Any:
    # Of attention without a mask, as for array code: what is masked is left to who counts.
    cost = pl.CostEstimate(
        flops=2 * multiply_adds,
        transcendentals=multiply_adds // inputs[0].shape[-1],
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(inputs)),
    )
    return pl.pallas_call(
        functools.partial(kernel, form),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=form.interpret,
        cost_estimate=cost,
        name=kernel.__name__.strip("_"),
        **options,
    )(*inputs)


def _block(length: int, dims: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, length, None, dims), lambda b, h, i: (b, i, h, 0))


def _row(length: int, dims: int, *, group: int) -> pl.BlockSpec:
    return pl.BlockSpec(
        (None, length, None, dims), lambda b, h, i: (b, 0, jax.lax.div(h, group), 0)
    )


def _number_block(length: int) -> pl.BlockSpec:
    """Of what is one number per query, `[batch, heads, queries]`."""
    return pl.BlockSpec((None, None, length), lambda b, h, i: (b, h, i))


def _mark_rows(marks: _Marks) -> _Marks:
    return jax.tree.map(
        lambda mark: pl.BlockSpec((None, mark.shape[1]), lambda b, h, i: (b, 0)), marks
    )


def _block_size(length: int, limit: int) -> int:
    return next(size for size in (64, 32, 16) if size <= limit and length % size == 0)


def _pad_heads(x: jax.Array) -> jax.Array:
    """Heads of a power of two and at least 16, as Triton's blocks must be; zeros change nothing."""
    size = x.shape[-1]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, max(16, pl.next_power_of_2(size)) - size)])


def _with_rows(mark: jax.Array, batch: int) -> jax.Array:
    return jnp.broadcast_to(mark.astype(jnp.int32), (batch, mark.shape[1]))
