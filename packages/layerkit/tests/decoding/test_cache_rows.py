"""Row axes of caches, and repeating and reordering rows on any axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.decoding.cache_rows import SHARED, reorder_rows, repeat_rows, row_axes
from layerkit.errors import ConfigError

LAYERS, ROWS, SLOTS = 3, 4, 5


def make_cache(ids):
    rows = ids.shape[0]
    return {
        "alone": {"key": jnp.zeros((rows, SLOTS, 2))},
        # As many layers, or slots, as rows must not deceive.
        "repeated": jnp.zeros((ROWS, rows, SLOTS)),
        "pipeline": jnp.zeros((2, LAYERS, rows, ROWS)),
        "step": jnp.zeros((ROWS,), jnp.int32),
    }


IDS = np.zeros((ROWS, 7), np.int32)
AXES = {"alone": {"key": 0}, "repeated": 1, "pipeline": 2, "step": SHARED}


def drawn_cache(rows=ROWS):
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(make_cache, jax.ShapeDtypeStruct((rows, 7), jnp.int32))
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes)


def rows_first(cache):
    """Every array with its rows in front, by the axes written down above."""
    return jax.tree.map(
        lambda axis, x: x if axis == SHARED else np.moveaxis(np.asarray(x), axis, 0), AXES, cache
    )


def test_row_axes_are_found():
    assert row_axes(make_cache, IDS) == AXES


def test_inputs_may_be_a_tree():
    def make(inputs):
        return {"memory": inputs["memory"].transpose(1, 0, 2)}

    inputs = {"memory": np.zeros((ROWS, 6, 2)), "lengths": np.zeros((ROWS,), np.int32)}
    assert row_axes(make, inputs) == {"memory": 1}


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda ids: {"k": jnp.zeros((len(ids), len(ids)))}, [4, 4]),
        (lambda ids: {"k": jnp.zeros((2 * len(ids), 3))}, [8, 3]),
    ],
    ids=["two_row_axes", "multiple_of_rows"],
)
def test_cache_without_one_row_axis_raises(raises, make, shape):
    with raises(ConfigError, field="shape of cache['k']", value=shape):
        row_axes(make, IDS)


def test_repeated_rows_are_adjacent():
    cache = drawn_cache()
    result = rows_first(repeat_rows(cache, AXES, 3))
    expected = rows_first(cache)
    np.testing.assert_array_equal(result.pop("step"), expected.pop("step"))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, np.repeat(b, 3, 0)), result, expected
    )


def test_reorder_takes_rows_within_their_group():
    parents = np.array([[1, 1], [0, 1], [1, 0], [0, 0]])
    cache = drawn_cache(rows=8)
    result = rows_first(jax.jit(lambda c, p: reorder_rows(c, AXES, p))(cache, parents))
    expected = rows_first(cache)
    np.testing.assert_array_equal(result.pop("step"), expected.pop("step"))
    places = [1, 1, 2, 3, 5, 4, 6, 6]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[places]), result, expected)
