"""Tests of Linear, Bias and FeedForward, compared with NumPy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers.basic.linears import Bias, FeedForward, Linear

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_linear_multiplies_the_last_axis(shape):
    layer = Linear(input_dims=4, output_dims=5)
    variables = layer.init(KEY)
    x = X.reshape(-1)[: math.prod(shape)].reshape(shape)
    np.testing.assert_allclose(
        layer.apply(variables, x), x @ np.asarray(variables["params"]["w"]), rtol=1e-5, atol=1e-6
    )


def test_linear_computes_in_the_compute_dtype_and_keeps_weights_in_theirs():
    layer = Linear(input_dims=4, output_dims=5, fprop_dtype=jnp.bfloat16)
    variables = layer.init(KEY)
    assert variables["params"]["w"].dtype == jnp.float32
    assert layer.apply(variables, X).dtype == jnp.bfloat16


def test_bias_starts_at_zero_and_is_added():
    layer = Bias(dims=4)
    variables = layer.init(KEY)
    np.testing.assert_array_equal(variables["params"]["b"], np.zeros(4))
    b = np.arange(4.0, dtype=np.float32)
    np.testing.assert_array_equal(layer.apply({"params": {"b": b}}, X), X + b)


@pytest.mark.parametrize("has_bias", [True, False])
def test_feed_forward_is_linear_then_bias_then_activation(has_bias):
    layer = FeedForward(input_dims=4, output_dims=5, has_bias=has_bias)
    w = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    b = np.linspace(-1.0, 1.0, 5, dtype=np.float32) if has_bias else np.float32(0.0)
    variables = {"params": {"linear": {"w": w}, **({"bias": {"b": b}} if has_bias else {})}}
    assert jax.tree.map(jnp.shape, layer.init(KEY)) == jax.tree.map(jnp.shape, variables)
    outputs = layer.apply(variables, X)
    np.testing.assert_allclose(outputs, np.maximum(X @ w + b, 0.0), rtol=1e-5, atol=1e-6)
