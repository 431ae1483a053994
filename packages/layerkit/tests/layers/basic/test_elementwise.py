"""Tests of activations, compared with NumPy, of dropout and of droppath."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import BaseLayer
from layerkit.config import sub_config_field
from layerkit.layers.basic import elementwise as activations
from layerkit.layers.basic.elementwise import Dropout, StochasticResidual
from layerkit.ops.remat import save_slopes

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
    result = activations.SineOfReLU().apply({}, case["x"])
    np.testing.assert_allclose(result, case["outputs"], rtol=1e-5, atol=1e-7)


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
    result, expected = layer.apply({}, x), plain(x)
    np.testing.assert_array_equal(result, expected)
    result = jax.grad(total(lambda x: layer.apply({}, x)))(x)
    expected = jax.grad(total(plain))(x)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.astype(jnp.float32), expected.astype(jnp.float32), **close)


# One activation in the ordinary tests.
@pytest.mark.parametrize(
    ("layer", "plain"),
    [
        pytest.param(layer, plain, marks=() if plain is jax.nn.silu else pytest.mark.slow)
        for layer, plain in PLAIN
    ],
)
def test_forward_mode_second_order_and_vmap_equal_those_of_the_formula(layer, plain):
    x, tangent = jnp.asarray(SMOOTH), jnp.asarray(SMOOTH[::-1])

    def function(x):
        return layer.apply({}, x)

    def second_order(function):
        return jax.jacfwd(jax.grad(lambda x: jnp.sum(function(x) * tangent)))(x)

    close = {"rtol": 1e-5, "atol": 1e-6}
    for result, expected in zip(
        jax.jvp(function, (x,), (tangent,)), jax.jvp(plain, (x,), (tangent,)), strict=True
    ):
        np.testing.assert_allclose(result, expected, **close)
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

    result, backward = jax.vjp(gated, gate, factor)
    expected, plain_backward = jax.vjp(formula, gate, factor)
    np.testing.assert_array_equal(result, expected)
    assert num_kept(backward) == 2
    for result, expected in zip(backward(factor), plain_backward(factor), strict=True):
        # Saturated elements lose digits, in 1 - tanh² for example; factors are up to 40.
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-5)


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
        result = jax.grad(lambda x, body=body: steps(x, body))(X)
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


ONES = np.ones((16, 8, 32), np.float32)


def dropped(layer, x=ONES, *, seed=0):
    return np.asarray(layer.apply({}, x, rngs={"random": jax.random.key(seed)}))


def test_evaluation_and_rate_zero_are_the_identity_without_a_key():
    np.testing.assert_array_equal(Dropout(rate=0.9).apply({}, ONES), ONES)
    np.testing.assert_array_equal(Dropout(rate=0.9, train=False).apply({}, ONES), ONES)
    np.testing.assert_array_equal(Dropout(rate=0.0, train=True).apply({}, ONES), ONES)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_the_rate_and_scales_the_rest(rate):
    outputs = dropped(Dropout(rate=rate, train=True))
    kept = outputs != 0.0
    np.testing.assert_allclose(outputs[kept], 1.0 / (1.0 - rate), rtol=1e-6)
    # 4096 draws: four standard deviations of their mean.
    assert abs(kept.mean() - (1.0 - rate)) < 4.0 * np.sqrt(rate * (1.0 - rate) / ONES.size)


def test_mask_depends_on_the_key():
    layer = Dropout(rate=0.5, train=True)
    np.testing.assert_array_equal(dropped(layer), dropped(layer))
    assert np.any(dropped(layer) != dropped(layer, seed=1))


def test_dropped_nan_does_not_reach_the_outputs():
    layer = Dropout(rate=0.5, train=True)
    dead = dropped(layer) == 0.0
    outputs = dropped(layer, np.where(dead, np.nan, 1.0).astype(np.float32))
    assert np.all(np.isfinite(outputs))


@pytest.mark.parametrize("dims", [(1,), (-2,)])
def test_broadcast_dims_share_one_mask(dims):
    outputs = dropped(Dropout(rate=0.5, broadcast_dims=dims, train=True))
    assert outputs.shape == ONES.shape
    np.testing.assert_array_equal(outputs, np.repeat(outputs[:, :1], 8, axis=1))
    assert 0.0 < np.mean(outputs[:, 0] == 0.0) < 1.0
    assert np.any(dropped(Dropout(rate=0.5, train=True)) != outputs)


def test_dropout_keeps_the_compute_dtype():
    layer = Dropout(rate=0.5, train=True, fprop_dtype=jnp.bfloat16)
    outputs = layer.apply({}, ONES, rngs={"random": jax.random.key(0)})
    assert outputs.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(outputs == 0), dropped(layer) == 0)


class TwoDropouts(BaseLayer):
    first_tpl: Any = sub_config_field(Dropout.HParams, rate=0.5)
    second_tpl: Any = sub_config_field(Dropout.HParams, rate=0.5)

    def setup(self):
        self.create_child("first", self.first_tpl)
        self.create_child("second", self.second_tpl)

    def fprop(self, x):
        return self.first(x), self.first(x), self.second(x)


def test_layers_and_calls_have_different_masks():
    masks = TwoDropouts(train=True).apply({}, ONES, rngs={"random": jax.random.key(0)})
    assert not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[0], masks[2])
    assert not np.array_equal(masks[1], masks[2])


# StochasticResidual.


def add(layer, x, branch, seed=0, **fields):
    return layer.apply({}, x, branch, rngs={"random": jax.random.key(seed)}, **fields)


@pytest.mark.parametrize("by_argument", [False, True])
def test_droppath_drops_the_whole_branch_of_an_example(by_argument):
    layer = StochasticResidual(rate=0.0 if by_argument else 0.25, train=True)
    fields = {"rate": jnp.float32(0.25)} if by_argument else {}
    x = np.arange(4096, dtype=np.float32)[:, None, None] * np.ones((1, 2, 3), np.float32)
    result = np.asarray(add(layer, x, np.full_like(x, 3.0), **fields)) - x
    assert set(np.unique(result)) == {0.0, 4.0}  # 3 / (1 - 1/4)
    assert np.all(result == result[:, :1, :1])
    # The deviation of the share that is kept is √(3/16 / 4096) < 0.007.
    assert abs(np.mean(result == 4.0) - 0.75) < 0.03
    assert np.any(result != np.asarray(add(layer, x, np.full_like(x, 3.0), seed=1, **fields)) - x)


def test_droppath_is_a_sum_in_evaluation_or_at_rate_zero():
    x, branch = jnp.ones((4, 2)), jnp.full((4, 2), 3.0)
    for layer in (StochasticResidual(rate=0.5), StochasticResidual(rate=0.0, train=True)):
        np.testing.assert_array_equal(layer.apply({}, x, branch), x + branch)
    evaluated = StochasticResidual(rate=0.0).apply({}, x, branch, rate=jnp.float32(0.5))
    np.testing.assert_array_equal(evaluated, x + branch)


@pytest.mark.parametrize("has_policy", [False, True])
def test_slope_is_kept_unless_a_policy_computes_it_again(*, has_policy):
    x = jnp.linspace(-2.0, 2.0, 9)
    gradient = jax.grad(lambda x: jnp.sum(save_slopes(jnp.tanh, x, has_policy=has_policy)))
    assert ("optimization_barrier" in str(jax.make_jaxpr(gradient)(x))) is not has_policy
    np.testing.assert_allclose(gradient(x), 1 - np.tanh(x) ** 2, rtol=1e-5)
