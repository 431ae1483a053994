"""The GPU kernel in interpret mode on the CPU, compared with array code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core

from layerkit.ops.attention.backends import select_backend
from layerkit.ops.attention.dot_product import AttentionOptions, describe_call, xla_attention
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.attention.pallas.kernel_math import overlapping_blocks
from layerkit.ops.implementations import UnsupportedBackendError
from layerkit.ops.triton.flash_gpu import FlashAttention

BATCH, LENGTH, HEADS, KV_HEADS = 2, 48, 4, 2  # three blocks of 16
SEGMENTS = jnp.asarray(np.repeat([[1, 1, 2, 3, 3, 0], [1, 2, 2, 2, 2, 2]], 8, axis=1), jnp.int32)


def draw():
    streams = jax.random.split(jax.random.key(0), 3)
    shapes = (HEADS, 20), (KV_HEADS, 20), (KV_HEADS, 24)
    return tuple(
        jax.random.normal(stream, (BATCH, LENGTH, *shape))
        for stream, shape in zip(streams, shapes, strict=True)
    )


def values_and_gradients(attention, inputs, sinks, **options):
    def total(inputs, sinks):
        read = attention(*inputs, sinks=sinks, scale=0.4, **options)
        weights = jnp.cos(jnp.arange(read.size, dtype=jnp.float32)).reshape(read.shape)
        return jnp.sum(read * weights), read

    program = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    gradients, read = program(inputs, sinks)
    return read, gradients


def interpreted(*args, mask=None, sinks=None, **options):
    return FlashAttention(interpret=True, **options)(*args, mask=mask, sinks=sinks)


def by_array_code(*inputs, **options):
    return xla_attention(*inputs, AttentionOptions(**options))


def check_equal(ours, expected):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


SINKS = jnp.array([1.0, -1.0, 0.0, 2.0])
PACKED_WINDOW = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS).within(21)
TWO_SIDED_WINDOW = AttentionMask.bidirectional_mask(BATCH, LENGTH).within(18)


# All options together: packed, windowed, grouped, capped, with sinks, with heads of no power of
# two; blocks of unequal sizes; every block within a two-sided window.
@pytest.mark.parametrize(
    ("sinks", "options", "blocks"),
    [
        (SINKS, {"mask": PACKED_WINDOW, "logit_cap": 1.5}, {}),
        pytest.param(None, {"mask": PACKED_WINDOW}, {"blocks": (16, 8)}, marks=pytest.mark.slow),
        pytest.param(None, {"mask": TWO_SIDED_WINDOW}, {}, marks=pytest.mark.slow),
    ],
    ids=["everything", "unequal blocks", "two-sided window"],
)
def test_values_and_gradients_equal_xla(sinks, options, blocks):
    ours = values_and_gradients(interpreted, draw(), sinks, **options, **blocks)
    check_equal(ours, values_and_gradients(by_array_code, draw(), sinks, **options))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_padded_memory_as_long_as_the_queries_is_unsupported(platform):
    """A query without a key reads a mean from xla and 0 from kernels."""
    length = 128
    padded = jnp.ones((BATCH, length), jnp.int32).at[0].set(0)
    mask = AttentionMask.cross_mask(BATCH, length, length, key_segments=padded)
    x = jax.ShapeDtypeStruct((BATCH, length, HEADS, 16), jnp.float32)
    call = describe_call(x, x, x, AttentionOptions(mask=mask, platform=platform))
    assert call.may_have_empty_rows
    with pytest.raises(UnsupportedBackendError):
        select_backend("pallas", call)


def test_largest_blocks_determine_the_number_of_programs():
    """The blocks of 48 queries have at most 16, the largest power of two that divides 48."""
    for largest, count in ((8, 6), (16, 3), (64, 3)):
        program = jax.make_jaxpr(
            lambda *x, most=largest: interpreted(*x, scale=1.0, blocks=(most, 16))
        )(*draw())
        assert f"grid=({BATCH}, {HEADS}, {count})" in str(program)


def test_masked_blocks_are_skipped():
    """In row order, values outside the causal triangle may be NaN."""
    query, key, value = draw()
    mask = AttentionMask.causal_mask(BATCH, LENGTH)
    poisoned = [x.at[:, 32:].set(jnp.nan) for x in (key, value)]
    attend = jax.jit(lambda *x: interpreted(*x, mask=mask, scale=1.0))
    clean, read = attend(query, key, value), attend(query, *poisoned)
    np.testing.assert_array_equal(read[:, :32], clean[:, :32])
    assert np.isnan(read[:, 32:]).all()


def test_blocks_of_other_documents_are_skipped():
    """What other documents hold may be NaN, in values and gradients."""
    mask = AttentionMask.bidirectional_mask(
        BATCH, LENGTH, segment_ids=jnp.repeat(jnp.array([[1, 2, 2], [1, 1, 2]]), 16, axis=1)
    )
    blocks = {"mask": mask, "scale": 1.0, "blocks": (16, 16)}

    def first_block(*inputs):
        return jnp.sum(jnp.sin(interpreted(*inputs, **blocks)[0, :16]))

    inputs = draw()
    poisoned = [x.at[0, 16:].set(jnp.nan) for x in inputs]
    gradients = jax.jit(jax.value_and_grad(first_block, (0, 1, 2)))
    (clean, expected), (result, ours) = gradients(*inputs), gradients(*poisoned)
    assert result == clean
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(a[0, :16], b[0, :16])


@settings(max_examples=25)
@given(st.data())
def test_overlapping_blocks_include_every_equal_segment(data):
    """Segment ids in any order, of rows of unequal lengths."""
    rows = [
        np.array(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)), np.int32)
        for size in (12, 8)
    ]
    result = overlapping_blocks(*(jnp.asarray(row[None]) for row in rows), blocks=(4, 2))
    for block, (first, last) in zip(rows[0].reshape(3, 4), np.asarray(result[0]), strict=True):
        equal = [i for i, other in enumerate(rows[1].reshape(4, 2)) if set(block) & set(other)]
        assert all(first <= i < last for i in equal)


def test_ascending_segments_overlap_in_their_own_blocks_alone():
    row = jnp.array([[1, 1, 1, 1, 2, 2, 3, 3]])
    result = overlapping_blocks(row, row, blocks=(2, 2))
    np.testing.assert_array_equal(result, [[[0, 2], [0, 2], [2, 3], [3, 4]]])


def test_no_array_grows_with_the_square_of_the_length():
    length = 512
    query = jnp.zeros((1, length, 1, 16))

    def total(x):
        mask = AttentionMask.causal_mask(1, length)
        return jnp.sum(interpreted(x, x, x, mask=mask, scale=1.0))

    program = jax.make_jaxpr(jax.grad(total))(query)
    assert max(var.aval.size for eqn in walk(program.jaxpr) for var in eqn.outvars) < length**2 / 8


def walk(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from walk(inner)
