"""Tests of layouts, which permute, split and join the axes of a tensor."""

from __future__ import annotations

import numpy as np
import pytest

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
def test_view_of_a_tensor_is_the_weight(text, shape):
    layout = Layout.parse(text)
    ours = np.arange(np.prod(shape)).reshape(shape)
    theirs = layout.to_theirs(ours)
    view = layout.to_ours(theirs, shape)
    np.testing.assert_array_equal(view, ours)
    assert np.shares_memory(view, theirs)


def test_sides_with_different_axes_raise(raises):
    with raises(ValueError):
        Layout.parse("a b -> a c")
