from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit.layers.basic.positions import (
    PositionalEmbedding,
    PositionalEmbedding2D,
    RotaryPositionalEmbedding,
    TrainablePositionalEmbedding,
)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_sinusoids_equal_their_formula():
    # Three timescales from 1 to 10000 in geometric steps: 1, 100, 10000.
    layer = PositionalEmbedding(dims=6)
    expected = [
        [np.sin(p), np.sin(p / 100), np.sin(p / 1e4), np.cos(p), np.cos(p / 100), np.cos(p / 1e4)]
        for p in (0, 1, 7, 500)
    ]
    vectors = layer.apply({}, jnp.array([[0, 1, 7, 500]]))
    np.testing.assert_allclose(vectors, [expected], atol=1e-4)


def test_sinusoids_follow_the_timescale_fields():
    layer = PositionalEmbedding(dims=4, min_timescale=2.0, max_timescale=8.0)
    expected = [np.sin(1.5), np.sin(3 / 8), np.cos(1.5), np.cos(3 / 8)]
    np.testing.assert_allclose(layer.apply({}, jnp.array([[3]]))[0, 0], expected, rtol=1e-5)


def test_sinusoids_are_computed_in_float32_and_cast():
    positions = jnp.array([[1001]])
    exact = PositionalEmbedding(dims=8).apply({}, positions)
    rounded = PositionalEmbedding(dims=8, fprop_dtype=jnp.bfloat16).apply({}, positions)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))


def test_trainable_positions_are_rows_of_the_weight():
    layer = TrainablePositionalEmbedding(dims=3, max_length=5)
    variables = layer.init(jax.random.key(0))
    table = variables["params"]["w"]
    assert table.shape == (5, 3)
    positions = jnp.array([[0, 1, 2, 0], [4, 3, 1, 1]])
    np.testing.assert_array_equal(layer.apply(variables, positions), table[positions])
    inside_and_beyond = layer.apply(variables, jnp.array([[4, 5]]))[0]
    assert np.isfinite(inside_and_beyond[0]).all() and np.isnan(inside_and_beyond[1]).all()
    shifted, variables = layer.clone(max_length=3, offset=2), {"params": {"w": table}}
    expected = np.concatenate([np.full((1, 3), np.nan), table[2:], np.full((1, 3), np.nan)])
    positions = jnp.array([[-1, 0, 1], [1, 2, 3]])
    np.testing.assert_array_equal(shifted.apply(variables, positions), expected[positions + 1])


def rotate_by_complex_numbers(x, positions, smallest, largest):
    half = x.shape[-1] // 2
    timescales = smallest * (largest / smallest) ** (2 * np.arange(half) / x.shape[-1])
    turns = np.exp(1j * positions[:, :, None, None] / timescales)
    pairs = (x[..., :half] + 1j * x[..., half:]) * turns
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize(("smallest", "largest"), [(1.0, 10_000.0), (0.5, 500_000.0)])
def test_rotary_rotates_halves_as_complex_numbers(smallest, largest):
    layer = RotaryPositionalEmbedding(dims=6, min_timescale=smallest, max_timescale=largest)
    x, positions = draw(2, 3, 2, 6), np.array([[0, 1, 2], [5, 300, 41]])
    expected = rotate_by_complex_numbers(x, positions, smallest, largest)
    got = layer.apply({}, jnp.array(x), jnp.array(positions))
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_rotary_of_neighbors_is_a_permutation_of_rotary_of_halves():
    x, positions = draw(2, 3, 2, 8), jnp.array([[0, 1, 2], [5, 300, 41]])
    neighbors = RotaryPositionalEmbedding(dims=8, pairing="neighbors").apply({}, x, positions)
    # Neighbors (2i, 2i + 1) in the places of halves (i, i + 4).
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    halves = RotaryPositionalEmbedding(dims=8).apply({}, x[..., order], positions)
    np.testing.assert_array_equal(neighbors[..., order], halves)


@pytest.mark.parametrize("pairing", ["halves", "neighbors"])
def test_rotary_of_a_fraction_rotates_only_the_first_coordinates(pairing):
    x, positions = draw(1, 3, 2, 12), jnp.array([[3, 4, 90]])
    part = RotaryPositionalEmbedding(dims=12, fraction=0.5, pairing=pairing)
    alone = RotaryPositionalEmbedding(dims=6, pairing=pairing)
    turned = part.apply({}, x, positions)
    np.testing.assert_array_equal(turned[..., :6], alone.apply({}, x[..., :6], positions))
    np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])


@pytest.mark.parametrize(
    ("order", "axes"),
    [("blocks", [0, 0, 1, 2]), ("interleaved", [0, 1, 2, 0]), ("axial", [0, 0, 1, 2])],
)
def test_each_pair_is_rotated_by_the_axis_of_its_section(order, axes):
    x, positions = draw(1, 3, 2, 8), jnp.array([[[3, 4, 90], [1, 2, 5], [0, 7, 6]]])
    layer = RotaryPositionalEmbedding(dims=8, sections=(2, 1, 1), section_order=order)
    turned = layer.apply({}, x, positions)
    for pair, axis in enumerate(axes):
        alone = layer.apply({}, x, positions[..., axis])
        np.testing.assert_array_equal(turned[..., [pair, pair + 4]], alone[..., [pair, pair + 4]])
    # The second section of one pair starts at the smallest timescale, unless timescales go on.
    angle = 4 * (1.0 if order == "axial" else 10_000.0 ** -(axes.index(1) / 4))
    first, second = x[0, 0, 0, [axes.index(1), axes.index(1) + 4]]
    expected = first * np.cos(angle) - second * np.sin(angle)
    np.testing.assert_allclose(turned[0, 0, 0, axes.index(1)], expected, atol=1e-5)


@pytest.mark.parametrize("sections", [None, (4,), (2, 1), (5, -1, 0)])
def test_sections_that_do_not_fit_raise(raises, sections):
    layer = RotaryPositionalEmbedding(dims=8, sections=sections)
    with raises(ConfigError, field="sections", value=sections):
        layer.apply({}, draw(1, 1, 2, 8), jnp.zeros((1, 1, 3), jnp.int32))


def test_two_dimensional_sinusoids_concatenate_row_and_column():
    rows, columns = jnp.divmod(jnp.arange(6)[None], 3)
    both = PositionalEmbedding2D(dims=8, max_timescale=50.0).apply({}, rows, columns)
    one = PositionalEmbedding(dims=4, max_timescale=50.0)
    np.testing.assert_array_equal(both[..., :4], one.apply({}, np.array([[0, 0, 0, 1, 1, 1]])))
    np.testing.assert_array_equal(both[..., 4:], one.apply({}, np.array([[0, 1, 2, 0, 1, 2]])))


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_rotary_products_depend_only_on_the_distance(query, key, shift):
    layer = RotaryPositionalEmbedding(dims=8)
    q, k = draw(1, 1, 1, 8, seed=1), draw(1, 1, 1, 8, seed=2)

    def product(query_position, key_position):
        turned_q = layer.apply({}, q, np.array([[query_position]]))
        turned_k = layer.apply({}, k, np.array([[key_position]]))
        return float(jnp.sum(turned_q * turned_k))

    expected = product(query, key)
    assert product(query + shift, key + shift) == pytest.approx(expected, abs=5e-3)


def test_rotary_keeps_the_dtype_and_computes_in_float32():
    x, positions = jnp.array(draw(1, 2, 1, 4), jnp.bfloat16), jnp.array([[999, 1001]])
    layer = RotaryPositionalEmbedding(dims=4)
    turned = layer.apply({}, x, positions)
    assert turned.dtype == jnp.bfloat16
    exact = layer.apply({}, x.astype(jnp.float32), positions)
    np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))


def test_min_timescale_of_praxis_is_its_inverse_here(praxis):
    # Praxis multiplies the frequencies by min_timescale=2 of 1000: periods of 0.5 to 250.
    case = praxis("min_timescale")
    layer = PositionalEmbedding(dims=6, min_timescale=1 / 2, max_timescale=1000 / 2**2)
    result = layer.apply({}, case["positions"])
    np.testing.assert_allclose(result, case["outputs"], rtol=1e-4, atol=1e-5)


def test_positions_of_patches_of_praxis_are_centred(praxis):
    # Of a grid of 3 by 2 patches, with exponents i/n instead of i/(n - 1).
    rows, columns = np.divmod(np.arange(6)[None], 2)
    layer = PositionalEmbedding2D(dims=8, max_timescale=10_000 ** (1 - 4 / 8))
    result = layer.apply({}, rows - 3 / 2, columns - 2 / 2)
    np.testing.assert_allclose(result, praxis("positions_2d")["outputs"], rtol=1e-5, atol=1e-6)
