"""Tests of selections: values, gradients, and gradients beside NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.ops.indexing import gradient_where, take, where


def test_where_has_the_values_and_gradients_of_numpy():
    condition = np.array([True, False, True])
    x, y = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    np.testing.assert_array_equal(where(condition, x, y), np.where(condition[:, None], x, y))
    gradients = jax.grad(lambda x, y: jnp.sum(where(condition, x, y) ** 2), argnums=(0, 1))(x, y)
    np.testing.assert_allclose(gradients[0], 2 * x * condition[:, None])
    np.testing.assert_allclose(gradients[1], 2 * y * ~condition[:, None])
    np.testing.assert_array_equal(where(condition, np.arange(3), np.zeros(3, int)), [0, 0, 2])
    # One row for all: its gradient is the sum of theirs.
    gradient = jax.grad(lambda row: jnp.sum(where(condition, row, y)))(x[:1])
    np.testing.assert_allclose(gradient, [[2.0] * 4])


@pytest.mark.parametrize("holds", [True, False])
def test_gradient_where_stops_even_nan(holds):
    condition = jnp.array(holds)

    def wild(x):
        x = gradient_where(condition, x)
        return x / jnp.sqrt(jnp.sum(x * x))

    value, gradient = jax.value_and_grad(lambda x: jnp.sum(wild(x)))(jnp.zeros(2))
    assert np.isnan(value)
    np.testing.assert_array_equal(gradient, [np.nan, np.nan] if holds else [0.0, 0.0])


def test_gradient_of_take_is_nonzero_at_taken_rows_only():
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    indices = np.array([2, 0])
    run = jax.vmap(take)
    np.testing.assert_array_equal(run(x, indices), x[[0, 1], indices])
    gradient = jax.grad(lambda x: jnp.sum(run(x, indices) ** 2))(x)
    expected = np.zeros_like(x)
    expected[[0, 1], indices] = 2 * x[[0, 1], indices]
    np.testing.assert_allclose(gradient, expected)
    assert take(np.array([5, 6]), 1) == 6
