"""Tests of layouts, which permute, split and join the axes of a tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.interop.hugging_face.layouts import Layout

LAYOUTS = {
    "dims -> dims": (5,),
    "out in -> in out": (4, 6),
    "(heads head_dim) embed -> embed heads head_dim": (6, 3, 4),
    "embed (heads head_dim) -> heads head_dim embed": (3, 4, 6),
    "(heads head_dim) -> heads head_dim": (3, 4),
}


def test_projection_to_heads_is_transposed_and_split():
    layout = Layout.parse("(heads head_dim) embed -> embed heads head_dim")
    theirs = np.arange(12 * 5).reshape(12, 5)  # as torch.nn.Linear(5, 12) stores it
    ours = theirs.T.reshape(5, 3, 4)
    assert layout.their_shape((5, 3, 4)) == (12, 5)
    np.testing.assert_array_equal(layout.to_theirs(ours), theirs)


@pytest.mark.parametrize(("text", "shape"), LAYOUTS.items())
@given(data=st.data())
def test_block_equals_slice_of_the_whole_tensor(text, shape, data):
    layout = Layout.parse(text)
    ours = np.arange(np.prod(shape)).reshape(shape)
    theirs = layout.to_theirs(ours)
    ranges = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        ranges.append((start, data.draw(st.integers(start + 1, size))))
    block = layout.read(lambda r: theirs[tuple(slice(*b) for b in r)], shape, tuple(ranges))
    np.testing.assert_array_equal(block, ours[tuple(slice(*bounds) for bounds in ranges)])


def test_read_requests_only_the_rows_of_its_heads():
    layout = Layout.parse("(heads head_dim) embed -> embed heads head_dim")
    asked = []

    def read(ranges):
        asked.append(ranges)
        return np.zeros([stop - start for start, stop in ranges])

    block = layout.read(read, (6, 8, 4), ((0, 3), (2, 4), (0, 4)))
    assert asked == [((8, 16), (0, 3))]
    assert block.shape == (3, 2, 4)


def test_sides_with_different_axes_raise(raises):
    with raises(ValueError):
        Layout.parse("a b -> a c")
