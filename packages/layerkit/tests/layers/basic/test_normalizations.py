"""Tests of normalizations, compared with NumPy in float64, and their invariances."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.layers.basic.normalizations import (
    LayerNorm,
    LayerNormPerHead,
    RmsNorm,
    RmsNormNoScale,
)

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(1.0, 2.0, size=(2, 3, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=8).astype(np.float32)
B = np.random.default_rng(2).normal(size=8).astype(np.float32)


def rms_norm(x, scale, epsilon):
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale


def layer_norm(x, scale, bias, epsilon):
    x = np.asarray(x, np.float64)
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * scale + bias


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_equal_their_formulas(offset, epsilon):
    fields = {"dims": 8, "scale_offset": offset, "epsilon": epsilon}
    outputs = RmsNorm(**fields).apply({"params": {"scale": W}}, X)
    np.testing.assert_allclose(outputs, rms_norm(X, offset + W, epsilon), rtol=1e-5, atol=1e-5)
    outputs = LayerNorm(**fields).apply({"params": {"scale": W, "bias": B}}, X)
    expected = layer_norm(X, offset + W, B, epsilon)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0, 0.25])
@pytest.mark.parametrize("norm", [RmsNorm, LayerNorm])
def test_effective_scale_starts_at_one(norm, offset):
    weights = norm(dims=8, scale_offset=offset).init(KEY)["params"]
    np.testing.assert_array_equal(weights["scale"], np.full(8, 1.0 - offset))
    np.testing.assert_array_equal(weights.get("bias", np.zeros(8)), np.zeros(8))


@given(factor=st.floats(0.01, 100.0), shift=st.floats(-10.0, 10.0), seed=st.integers(0, 2**16))
def test_norms_are_invariant_to_scale_and_shift(factor, shift, seed):
    """Scaling a row changes neither norm, shifting it does not change LayerNorm (ε aside)."""
    x = np.random.default_rng(seed).normal(size=(2, 8)).astype(np.float32)
    rms, layer = RmsNorm(dims=8, epsilon=0.0), LayerNorm(dims=8, epsilon=0.0)
    rms_weights, layer_weights = rms.init(KEY), layer.init(KEY)
    close = {"rtol": 1e-3, "atol": 1e-3}
    np.testing.assert_allclose(
        rms.apply(rms_weights, x * np.float32(factor)), rms.apply(rms_weights, x), **close
    )
    np.testing.assert_allclose(
        layer.apply(layer_weights, x * np.float32(factor) + np.float32(shift * factor)),
        layer.apply(layer_weights, x),
        **close,
    )


@pytest.mark.parametrize("norm", [RmsNorm, LayerNorm])
def test_padding_has_no_effect(norm):
    layer = norm(dims=8)
    variables = layer.init(KEY)
    padded = X.copy()
    padded[:, 2] = np.nan
    np.testing.assert_array_equal(
        layer.apply(variables, padded)[:, :2], layer.apply(variables, X)[:, :2]
    )


@pytest.mark.parametrize("norm", [RmsNorm, LayerNorm])
def test_constant_and_zero_rows_are_finite_with_finite_gradients(norm):
    layer = norm(dims=8)
    variables = layer.init(KEY)
    rows = np.stack([np.zeros(8), np.full(8, 3.0)]).astype(np.float32)
    outputs, gradient = jax.value_and_grad(lambda x: jnp.sum(layer.apply(variables, x) * W))(rows)
    assert np.isfinite(outputs) and np.all(np.isfinite(gradient))


@pytest.mark.parametrize("norm", [RmsNorm, LayerNorm])
def test_statistics_are_float32_for_bfloat16_inputs(norm):
    """4096 ones and a 64: a bfloat16 sum of squares would stop growing at 256."""
    x = np.ones((1, 4097), np.float32)
    x[0, 0] = 64.0
    layer = norm(dims=4097, fprop_dtype=jnp.bfloat16)
    outputs = layer.apply(layer.init(KEY), x.astype(jnp.bfloat16))
    assert outputs.dtype == jnp.bfloat16
    exact = norm(dims=4097)
    expected = exact.apply(exact.init(KEY), x)
    # Half a unit in the last of bfloat16's 8 bits: only the result is rounded.
    np.testing.assert_allclose(np.asarray(outputs, np.float32), expected, rtol=2**-8, atol=1e-6)


def test_offset_is_added_in_float32():
    layer = RmsNorm(dims=2, scale_offset=1.0, epsilon=0.0, fprop_dtype=jnp.bfloat16)
    # 1 + 0.0039 rounds to 1 in bfloat16; times 1.5 it would give 1.5 instead of 1.5078125 (the
    # bfloat16 next to 1.50585).
    scale = jnp.array([0.0039, 0.0039])
    row = np.array([[np.sqrt(2.0 - 0.25), 0.5]], np.float32)
    outputs = layer.apply({"params": {"scale": scale}}, row)
    expected = jnp.asarray(rms_norm(row, 1.0039, 0.0), jnp.bfloat16)
    np.testing.assert_array_equal(outputs, expected)


@pytest.mark.parametrize("use_bias", [True, False])
def test_layer_norm_without_scale_equals_praxis(praxis, use_bias):
    case = praxis("layer_norm_without_scale_" + ("bias" if use_bias else "plain"))
    layer = LayerNorm(dims=4, use_scale=False, use_bias=use_bias)
    assert layer.init(KEY)["params"].keys() == case["weights"].keys()
    result = layer.apply({"params": case["weights"]}, case["x"])
    np.testing.assert_allclose(result, case["outputs"], rtol=1e-5, atol=1e-6)


def plain_norm(layer, weights, x):
    """Return what a norm computes, as a formula that JAX differentiates."""
    x = x.astype(jnp.float32)
    if isinstance(layer, LayerNorm):
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    y = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + layer.epsilon)
    if "scale" in weights:
        y = y * (layer.scale_offset + weights["scale"])
    return (y + weights.get("bias", 0.0)).astype(layer.fprop_dtype)


NORMS = [
    (LayerNorm, {"dims": 8}, {"scale": W, "bias": B}),
    (LayerNorm, {"dims": 8, "scale_offset": 0.0, "use_bias": False}, {"scale": W}),
    (LayerNorm, {"dims": 8, "use_scale": False}, {"bias": B}),
    (LayerNorm, {"dims": 8, "use_scale": False, "use_bias": False}, {}),
    (RmsNorm, {"dims": 8, "epsilon": 0.1}, {"scale": W}),
    (RmsNorm, {"dims": 8, "scale_offset": 1.0}, {"scale": W}),
    (RmsNormNoScale, {}, {}),
    (LayerNormPerHead, {"dims": 8, "num_heads": 3}, {"scale": X[0], "bias": X[1]}),
]
# One norm of each class in the ordinary tests.
FIRST_OF_CLASS = [
    case
    if case[0] not in [other[0] for other in NORMS[:index]]
    else pytest.param(*case, marks=pytest.mark.slow)
    for index, case in enumerate(NORMS)
]
FACTORS = jnp.asarray(np.random.default_rng(3).normal(size=X.shape), jnp.float32)


def made(norm, fields, weights, dtype=jnp.float32):
    """Return (function of weights and inputs, its formula, weights, inputs)."""
    layer = norm(**fields, fprop_dtype=dtype)

    def function(weights, x):
        return layer.apply({"params": weights}, x)

    def formula(weights, x):
        return plain_norm(layer, weights, x)

    return function, formula, jax.tree.map(jnp.asarray, weights), jnp.asarray(X, dtype)


def assert_trees_close(result, expected, **close):
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), **close)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("norm", "fields", "weights"), NORMS)
def test_gradients_equal_those_of_the_formula(norm, fields, weights, dtype):
    *functions, weights, x = made(norm, fields, weights, dtype)

    def total(function):
        return lambda *args: jnp.sum(function(*args).astype(jnp.float32) * FACTORS)

    result, expected = (jax.jit(jax.grad(total(f), argnums=(0, 1)))(weights, x) for f in functions)
    # Gradients of bfloat16 inputs are rounded once to 8 bits.
    tolerance = 1e-5 if dtype == jnp.float32 else 0.01
    assert_trees_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("norm", "fields", "weights"), FIRST_OF_CLASS)
def test_forward_mode_and_second_order_equal_those_of_the_formula(norm, fields, weights):
    *functions, weights, x = made(norm, fields, weights)
    tangents = (jax.tree.map(jnp.cos, weights), jnp.sin(x))

    def orders(function):
        def total(*args):
            return jnp.sum(function(*args) ** 2 * FACTORS)

        gradient = jax.grad(total, argnums=(0, 1))

        def along(*args):
            return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient(*args), tangents)))

        return lambda weights, x: (
            jax.jvp(function, (weights, x), tangents),
            jax.jvp(gradient, (weights, x), tangents)[1],
            jax.grad(along, argnums=(0, 1))(weights, x),
        )

    result, expected = (jax.jit(orders(f))(weights, x) for f in functions)
    assert_trees_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("norm", "fields", "weights"), FIRST_OF_CLASS)
def test_vmap_checkpoint_and_scan_keep_the_gradient(norm, fields, weights):
    function, formula, weights, x = made(norm, fields, weights)

    def gradients(function):
        def total(weights, x):
            y, _ = jax.lax.scan(lambda x, _: (x + function(weights, x), None), x, None, length=3)
            return jnp.sum(y * FACTORS[0])

        run = jax.vmap(jax.grad(total, argnums=(0, 1)), in_axes=(None, 0))
        return jax.jit(run)(weights, x)

    expected = gradients(formula)
    policy = jax.checkpoint_policies.nothing_saveable
    for body in (function, jax.checkpoint(function), jax.checkpoint(function, policy=policy)):
        assert_trees_close(gradients(body), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("norm", "fields", "weights"), NORMS)
def test_backward_pass_keeps_the_inputs_and_numbers_of_positions(norm, fields, weights, dtype):
    function, _, weights, x = made(norm, fields, weights, dtype)
    _, backward = jax.vjp(function, weights, x)
    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.ndim == x.ndim]
    assert [leaf.dtype for leaf in kept if leaf.shape == x.shape] == [dtype]
    num_statistics = 2 if issubclass(norm, LayerNorm) else 1
    shapes = [leaf.shape for leaf in kept if leaf.shape != x.shape]
    assert shapes == [(*x.shape[:-1], 1)] * num_statistics
