from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit.ops.attention.masks import AttentionMask, first_tokens, segments_from_paddings

SELF_ATTENTION = [AttentionMask.causal_mask, AttentionMask.bidirectional_mask]


@st.composite
def masks(draw):
    # Few shapes, since each is compiled for.
    batch, queries, keys = draw(st.sampled_from([(1, 1, 1), (1, 4, 4), (2, 3, 4), (3, 4, 2)]))

    def array(length, values):
        flat = draw(st.lists(values, min_size=batch * length, max_size=batch * length))
        return np.array(flat, np.int32).reshape(batch, length)

    has_segments = draw(st.booleans())
    return AttentionMask(
        query_positions=array(queries, st.integers(0, 5)),
        key_positions=array(keys, st.integers(0, 5)),
        query_segments=array(queries, st.integers(0, 3)) if has_segments else None,
        key_segments=array(keys, st.integers(0, 3)) if has_segments else None,
        key_in_prefix=draw(st.none() | st.just(array(keys, st.integers(0, 1)) != 0)),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 4)),
    )


def by_loops(mask):
    batch, queries = mask.query_positions.shape
    keys = mask.key_positions.shape[1]
    allowed = np.zeros((batch, 1, queries, keys), bool)
    for b, q, k in np.ndindex(batch, queries, keys):
        segments = mask.query_segments, mask.key_segments
        same_segment = segments[0] is None or segments[0][b, q] == segments[1][b, k]
        distance = int(mask.query_positions[b, q]) - int(mask.key_positions[b, k])
        in_prefix = mask.key_in_prefix is not None and mask.key_in_prefix[b, k]
        is_seen = distance >= 0 or in_prefix or not mask.causal
        is_near = mask.window is None or abs(distance) < mask.window
        allowed[b, 0, q, k] = same_segment and is_seen and is_near
    return allowed


@given(masks())
def test_dense_equals_loops(mask):
    dense = mask.dense()
    assert dense.dtype == bool
    np.testing.assert_array_equal(dense, by_loops(mask))


def test_prefix_is_visible_to_the_whole_row():
    in_prefix = first_tokens(jnp.array([3, 0]), 4)
    dense = AttentionMask.causal_mask(2, 4, in_prefix=in_prefix).dense()[:, 0]
    expected = np.tri(4, dtype=bool)
    np.testing.assert_array_equal(dense[1], expected)
    expected[:, :3] = True
    np.testing.assert_array_equal(dense[0], expected)


def test_ends_and_chunks_of_look_ahead_add_up():
    mask = AttentionMask.causal_mask(1, 6, query_ends=np.array([[0, 4, 4, 4, 4, 0]]))
    last = mask.look_ahead(2).dense()[0, 0].sum(axis=1) - 1
    assert list(last) == [1, 4, 4, 4, 5, 5]


def test_chunks_of_look_ahead_depend_on_the_document_alone(raises):
    def seen(length, segments=None, positions=None):
        mask = AttentionMask.causal_mask(1, length, segment_ids=segments).within(4)
        return mask.look_ahead(4, positions).dense()[0, 0]

    alone = seen(5)
    assert list(alone.sum(axis=1)) == [4, 4, 4, 4, 1]
    padded = seen(8, np.array([[1, 1, 1, 1, 1, 0, 0, 0]], np.int32))
    np.testing.assert_array_equal(padded[:5], np.pad(alone, [(0, 0), (0, 3)]))
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 2]], np.int32)
    packed = seen(8, segments, np.array([[0, 1, 2, 0, 1, 2, 3, 4]], np.int32))
    np.testing.assert_array_equal(packed[3:, 3:], alone)
    with raises(ConfigError, field="look_ahead", value=2):
        AttentionMask.bidirectional_mask(1, 4).look_ahead(2)


def test_within_narrows_the_window(raises):
    mask = AttentionMask.causal_mask(1, 6)
    assert mask.within(None) is mask
    assert mask.within(3).within(5).window == mask.within(5).within(3).window == 3
    banded = np.tri(6, dtype=bool) & ~np.tri(6, k=-3, dtype=bool)
    np.testing.assert_array_equal(mask.within(3).dense()[0, 0], banded)
    with raises(ConfigError, field="window", value=0):
        mask.within(0)


def test_chunks_are_those_of_each_segment(raises):
    mask = AttentionMask.causal_mask(1, 9, segment_ids=jnp.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]]))
    assert mask.split_chunks(None) is mask
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    chunks = np.array([0, 0, 1, 1, 2, 2, 3, 4, 4])
    expected = np.tri(9, dtype=bool) & (chunks[:, None] == chunks)
    np.testing.assert_array_equal(mask.split_chunks(2, positions).dense()[0, 0], expected)
    step = AttentionMask.decoding_mask(1, 2, 6, time_step=3).split_chunks(2)
    np.testing.assert_array_equal(step.dense()[0, 0] * 1, [[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]])
    with raises(ConfigError, field="chunk", value=0):
        mask.split_chunks(0)


def test_cross_mask_hides_padding_and_other_documents():
    everything = AttentionMask.cross_mask(2, 3, 4)
    np.testing.assert_array_equal(everything.dense(), np.ones((2, 1, 3, 4), bool))
    padded = AttentionMask.cross_mask(1, 2, 3, key_segments=jnp.array([[1, 1, 0]]))
    np.testing.assert_array_equal(padded.dense()[0, 0], [[1, 1, 0]] * 2)
    packed = AttentionMask.cross_mask(
        1, 3, 4, query_segments=jnp.array([[1, 2, 2]]), key_segments=jnp.array([[1, 1, 2, 0]])
    )
    np.testing.assert_array_equal(packed.dense()[0, 0], [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]])


def test_masks_raise_for_arrays_of_another_shape(raises):
    ones = jnp.ones((1, 3), jnp.int32)
    with raises(ConfigError, field="shape of key_segments", value=[1, 3]):
        AttentionMask.cross_mask(1, 3, 4, key_segments=ones)
    with raises(ConfigError, field="shape of in_prefix", value=[1, 3]):
        AttentionMask.causal_mask(2, 3, in_prefix=ones.astype(bool))
    with raises(ConfigError, field="shape of segment_ids", value=[1, 3]):
        AttentionMask.causal_mask(2, 3, segment_ids=ones)


@st.composite
def packed_lengths(draw):
    # Rows of one length, since each is compiled for.
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return lengths, 9 - sum(lengths)


@pytest.mark.parametrize("make", SELF_ATTENTION)
@given(packed_lengths())
def test_mask_of_a_packed_row_is_block_diagonal(make, packing):
    lengths, padding = packing
    segments = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding])[None]
    packed = make(1, segments.shape[1], segment_ids=jnp.array(segments)).dense()[0, 0]
    expected = np.zeros_like(packed)
    start = 0
    for length in [*lengths, padding]:
        block = slice(start, start + length)
        one = np.ones((length, length), bool)
        expected[block, block] = np.tril(one) if make == AttentionMask.causal_mask else one
        start += length
    np.testing.assert_array_equal(packed, expected)


def test_segment_ids_from_paddings_are_zero_for_padding():
    segments = segments_from_paddings(jnp.array([[0.0, 1.0], [0.0, 0.0]]))
    assert segments.dtype == jnp.int32
    np.testing.assert_array_equal(segments, [[1, 0], [1, 1]])


@pytest.mark.parametrize("time_step", [0, 2, np.int32(3)])
def test_decoding_mask_equals_rows_of_the_causal_mask(time_step):
    whole = AttentionMask.causal_mask(2, 6).dense()
    newest = AttentionMask.decoding_mask(2, 3, 6, time_step=time_step)
    np.testing.assert_array_equal(newest.dense(), whole[:, :, time_step : time_step + 3])


def test_decoding_mask_accepts_steps_per_row_and_traced_steps():
    whole = AttentionMask.causal_mask(2, 4).dense()
    mask = jax.jit(lambda t: AttentionMask.decoding_mask(2, 1, 4, time_step=t))(jnp.array([0, 3]))
    np.testing.assert_array_equal(mask.dense()[0], whole[0, :, 0:1])
    np.testing.assert_array_equal(mask.dense()[1], whole[1, :, 3:4])


def test_mask_is_a_pytree_with_static_causal_flag():
    mask = AttentionMask.causal_mask(1, 3, segment_ids=jnp.ones((1, 3), jnp.int32))
    assert len(jax.tree.leaves(mask)) == 4
    traced = []

    @jax.jit
    def dense(mask):
        traced.append(bool(mask.causal))
        return mask.dense()

    np.testing.assert_array_equal(dense(mask), mask.dense())
    dense(mask.replace(causal=False))
    assert traced == [True, False]


def test_dense_raises_with_segments_of_keys_alone(raises):
    half = AttentionMask.causal_mask(2, 3).replace(key_segments=jnp.ones((2, 3), jnp.int32))
    with raises(ConfigError, field="segments of one side"):
        half.dense()
