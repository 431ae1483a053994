"""Tests of activations, compared with NumPy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers.basic import activations

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
]


@pytest.mark.parametrize(("layer", "expected"), EXPECTED)
def test_equals_its_formula_in_each_compute_dtype(layer, expected):
    np.testing.assert_allclose(layer.apply({}, X), expected, rtol=2e-6, atol=2e-6)
    low = layer.clone(fprop_dtype=jnp.bfloat16).apply({}, X)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(low, np.float32), expected, rtol=0.03, atol=0.01)


def test_every_activation_is_tested():
    base = activations.BaseActivation
    classes = {c for c in vars(activations).values() if isinstance(c, type) and issubclass(c, base)}
    assert classes - {base} == {type(layer) for layer, _ in EXPECTED}


def test_sine_of_relu_is_sine_relu_of_praxis(praxis):
    case = praxis("sine_relu")
    found = activations.SineOfReLU().apply({}, case["x"])
    np.testing.assert_allclose(found, case["outputs"], rtol=1e-5, atol=1e-7)


# No zeros, where the slope of some functions is undefined.
SMOOTH = np.array([-4.0, -1.5, -0.3, 0.2, 0.9, 2.5, 6.5], np.float32)

# The formulas of the classes, differentiated by JAX without `save_slopes`.
PLAIN = [
    (activations.Identity(), lambda x: x),
    (activations.ReLU(), jax.nn.relu),
    (activations.SineOfReLU(), lambda x: jnp.sin(jax.nn.relu(x))),
    (activations.SquaredReLU(), lambda x: jnp.square(jax.nn.relu(x))),
    (activations.GELU(), jax.nn.gelu),
    (activations.GELU(approximate=False), lambda x: jax.nn.gelu(x, approximate=False)),
    (activations.SiLU(), jax.nn.silu),
    (activations.SiLU(beta=1.702), lambda x: x * jax.nn.sigmoid(1.702 * x)),
    (activations.Sigmoid(), jax.nn.sigmoid),
    (activations.Tanh(), jnp.tanh),
    (activations.ReLU6(), jax.nn.relu6),
    (activations.CubedReLU(), lambda x: jnp.power(jax.nn.relu(x), 3)),
    (activations.LeakyReLU(), jax.nn.leaky_relu),
    (activations.ELU(alpha=0.5), lambda x: jax.nn.elu(x, 0.5)),
    (activations.Softplus(), jax.nn.softplus),
    (activations.Exp(), jnp.exp),
]


def num_kept(backward):
    """Count the arrays that a backward pass keeps, without constants such as the zeros of ReLU."""
    leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(backward)]
    return sum(leaf.ndim > 0 and bool(np.any(leaf != leaf.flat[0])) for leaf in leaves)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("layer", "plain"), PLAIN)
def test_gradients_equal_those_of_the_formula(layer, plain, dtype):
    x, weights = jnp.asarray(SMOOTH, dtype), jnp.asarray(SMOOTH[::-1], dtype)
    layer = layer.clone(fprop_dtype=dtype)

    def total(function):
        return lambda x: jnp.sum((function(x) * weights).astype(jnp.float32))

    # A slope in bfloat16 has 8 bits, and so has each step of the gradient of the formula.
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype == jnp.float32 else {"rtol": 0.03, "atol": 0.06}
    found, expected = layer.apply({}, x), plain(x)
    np.testing.assert_array_equal(found, expected)
    found = jax.grad(total(lambda x: layer.apply({}, x)))(x)
    expected = jax.grad(total(plain))(x)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), **close)


@pytest.mark.parametrize(("layer", "plain"), PLAIN)
def test_forward_mode_second_order_and_vmap_equal_those_of_the_formula(layer, plain):
    x, tangent = jnp.asarray(SMOOTH), jnp.asarray(SMOOTH[::-1])

    def function(x):
        return layer.apply({}, x)

    def second_order(function):
        return jax.jacfwd(jax.grad(lambda x: jnp.sum(function(x) * tangent)))(x)

    close = {"rtol": 1e-5, "atol": 1e-6}
    for found, expected in zip(
        jax.jvp(function, (x,), (tangent,)), jax.jvp(plain, (x,), (tangent,)), strict=True
    ):
        np.testing.assert_allclose(found, expected, **close)
    np.testing.assert_allclose(second_order(function), second_order(plain), **close)
    slopes = jax.vmap(jax.grad(function))(x)
    np.testing.assert_allclose(slopes, jax.vmap(jax.grad(plain))(x), **close)


@pytest.mark.parametrize(("layer", "plain"), PLAIN)
def test_backward_pass_keeps_one_array(layer, plain):
    _, backward = jax.vjp(lambda x: layer.apply({}, x), jnp.asarray(SMOOTH))
    assert num_kept(backward) == (0 if isinstance(layer, activations.Identity) else 1)


@pytest.mark.parametrize(("limit", "offset"), [(None, 0.0), (2.0, 1.0)])
@pytest.mark.parametrize(("layer", "plain"), PLAIN)
def test_gate_equals_its_formula_and_keeps_two_arrays(layer, plain, limit, offset):
    gate, factor = jnp.asarray(SMOOTH), jnp.asarray(SMOOTH[::-1])

    def formula(gate, factor):
        if limit is not None:
            gate, factor = jnp.minimum(gate, limit), jnp.clip(factor, -limit, limit)
        return plain(gate) * (factor + offset)

    def gated(gate, factor):
        return layer.apply({}, gate, factor, limit=limit, offset=offset, method="gate")

    found, backward = jax.vjp(gated, gate, factor)
    expected, plain_backward = jax.vjp(formula, gate, factor)
    np.testing.assert_array_equal(found, expected)
    assert num_kept(backward) == 2
    for found, expected in zip(backward(factor), plain_backward(factor), strict=True):
        # Saturated elements lose digits, in 1 - tanh² for example; factors are up to 40.
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


def test_gate_of_an_activation_with_fprop_calls_it():
    class Half(activations.GELU):
        def fprop(self, inputs):
            return 0.5 * inputs

    gated = Half().apply({}, jnp.asarray(SMOOTH), jnp.full(7, 3.0), method="gate")
    np.testing.assert_allclose(gated, 1.5 * SMOOTH)


def test_checkpoint_and_scan_keep_the_gradient():
    layer = activations.GELU()

    def steps(x, body):
        return jnp.sum(jax.lax.scan(lambda x, _: (body(x), None), x, None, length=3)[0])

    def apply(x):
        return layer.apply({}, x)

    expected = jax.grad(lambda x: steps(x, jax.nn.gelu))(X)
    policy = jax.checkpoint_policies.nothing_saveable
    for body in (apply, jax.checkpoint(apply), jax.checkpoint(apply, policy=policy)):
        found = jax.grad(lambda x, body=body: steps(x, body))(X)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
