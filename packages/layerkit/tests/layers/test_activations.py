"""Tests of activations, compared with NumPy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers import activations

X = np.array([[-3.0, -0.5, 0.0], [0.25, 1.0, 7.0]], np.float32)
NORMAL_CDF = np.vectorize(lambda x: 0.5 * (1.0 + math.erf(x / math.sqrt(2.0))))


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


EXPECTED = [
    (activations.Identity(), X),
    (activations.ReLU(), np.maximum(X, 0.0)),
    (activations.SineOfReLU(), np.sin(np.maximum(X, 0.0))),
    (activations.SquaredReLU(), np.maximum(X, 0.0) ** 2),
    (activations.GELU(), gelu_tanh(X)),
    (activations.GELU(approximate=False), X * NORMAL_CDF(X)),
    (activations.SiLU(), X * sigmoid(X)),
    (activations.SiLU(beta=1.702), X * sigmoid(1.702 * X)),
    (activations.Swish(), X * sigmoid(X)),
    (activations.Sigmoid(), sigmoid(X)),
    (activations.Tanh(), np.tanh(X)),
    (activations.ReLU6(), np.clip(X, 0.0, 6.0)),
    (activations.CubedReLU(), np.maximum(X, 0.0) ** 3),
    (activations.LeakyReLU(), np.where(X > 0, X, 0.01 * X)),
    (activations.LeakyReLU(negative_slope=0.3), np.where(X > 0, X, 0.3 * X)),
    (activations.ELU(), np.where(X > 0, X, np.expm1(X))),
    (activations.ELU(alpha=0.5), np.where(X > 0, X, 0.5 * np.expm1(X))),
    (activations.Softplus(), np.log1p(np.exp(X))),
    (activations.Exp(), np.exp(X)),
    (activations.SineReLU(), np.where(X > 0, X, 0.0025 * (np.sin(X) - np.cos(X)))),
    (activations.SineReLU(epsilon=0.5), np.where(X > 0, X, 0.5 * (np.sin(X) - np.cos(X)))),
]


@pytest.mark.parametrize(("layer", "expected"), EXPECTED)
def test_equals_its_formula(layer, expected):
    np.testing.assert_allclose(layer.apply({}, X), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("layer", "expected"), EXPECTED)
def test_result_has_the_compute_dtype(layer, expected):
    result = layer.clone(fprop_dtype=jnp.bfloat16).apply({}, X)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(result, np.float32), expected, rtol=0.03, atol=0.01)


def test_every_activation_is_tested():
    named = {value for value in vars(activations).values() if isinstance(value, type)}
    concrete = {
        cls
        for cls in named
        if issubclass(cls, activations.BaseActivation) and cls is not activations.BaseActivation
    }
    assert concrete == {type(layer) for layer, _ in EXPECTED}


def test_activation_has_no_weights():
    assert activations.GELU().init(jax.random.key(0)) == {"params": {}}


def test_approximate_gelu_is_within_its_documented_bound():
    x = np.linspace(-6.0, 6.0, 4001)
    error = np.max(np.abs(gelu_tanh(x) - x * NORMAL_CDF(x)))
    assert 4e-4 < error < 5e-4


def test_activation_without_fprop_raises():
    class Cube(activations.BaseActivation):
        pass

    with pytest.raises(NotImplementedError, match="Cube does not define fprop"):
        Cube().apply({}, X)


def test_sine_of_relu_is_sine_relu_of_praxis(praxis):
    case = praxis("sine_relu")
    found = activations.SineOfReLU().apply({}, case["x"])
    np.testing.assert_allclose(found, case["outputs"], rtol=1e-5, atol=1e-7)
