"""Products with current scaling, compared with NumPy and with exact products."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from layerkit.layers.basic.linears import Linear
from layerkit.layers.quantization.current_scaling import (
    FP8_CURRENT,
    INT8,
    Fp8CurrentDot,
    Int8Dot,
    grouped_scaled_matmul,
    scaled_matmul,
)
from layerkit.ops.moe.grouped_matmul import GroupedMatmul, RowGroups, RowsProduct

DOTS = {"fp8": (Fp8CurrentDot, FP8_CURRENT), "int8": (Int8Dot, INT8)}
multiply = jax.jit(scaled_matmul, static_argnums=2)
SCHEMES = pytest.mark.parametrize("scheme", [FP8_CURRENT, INT8], ids=["fp8", "int8"])


def draw(seed, *shape):
    # Rows of very different sizes, which one scale rounds worse than many.
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * rng.uniform(0.2, 3, shape[:-1] + (1,))).astype(np.float32)


def rounded(x, dtype, axis):
    """Return `x` rounded to an 8-bit dtype, with one scale along an axis; None for all of it."""
    most = 127.0 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)
    scale = (np.abs(x).max(axis=axis, keepdims=True) / most).astype(np.float32)
    values = np.clip(x / scale, -most, most)
    values = np.round(values) if dtype == np.int8 else values
    return values.astype(dtype).astype(np.float64) * scale


def expected(x, w, g, scheme):
    """Return the output and the gradients of `[tokens, in] · [in, out]` by the definition."""
    if scheme is INT8:
        e = np.int8
        y = rounded(x, e, 1) @ rounded(w, e, 0)
        return y, rounded(g, e, 1) @ rounded(w, e, 1).T, x.T.astype(np.float64) @ g
    e4, e5 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    x8, w8, g8 = rounded(x, e4, None), rounded(w, e4, None), rounded(g, e5, None)
    return x8 @ w8, g8 @ w8.T, x8.T @ g8


@partial(jax.jit, static_argnums=3)
def multiply_and_differentiate(x, w, g, scheme):
    y, pullback = jax.vjp(lambda x, w: scaled_matmul(x, w, scheme), x, w)
    return y, *pullback(g)


@SCHEMES
def test_output_and_gradients_equal_numpy(scheme):
    x, w, g = draw(0, 24, 16), draw(1, 16, 32), draw(2, 24, 32)
    result = multiply_and_differentiate(x, w, g, scheme)
    for ours, theirs in zip(result, expected(x, w, g, scheme), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max())


@SCHEMES
def test_group_of_weights_equals_its_members(scheme):
    x, w, g = draw(0, 3, 8, 16), draw(1, 3, 16, 4), draw(2, 3, 8, 4)
    result = multiply_and_differentiate(x, w, g, scheme)
    for member in range(3):
        alone = multiply_and_differentiate(x[member], w[member], g[member], scheme)
        for ours, theirs in zip(result, alone, strict=True):
            np.testing.assert_allclose(ours[member], theirs, rtol=1e-5, atol=1e-5)


@SCHEMES
@pytest.mark.parametrize("implementation", ["ragged_dot", "blocks"])
def test_rows_of_each_group_equal_numpy(scheme, implementation):
    sizes = [8, 0, 24]
    matmul = GroupedMatmul(implementation, "cpu")
    groups = RowGroups(np.array(sizes, np.int32), block=8, num_balanced=32)
    product = RowsProduct(groups, matmul, num_rows=32)
    rows, w, g = draw(0, 32, 16), draw(1, 3, 16, 8), draw(2, 32, 8)

    @jax.jit
    def multiply_and_differentiate(rows, w, g):
        y, pullback = jax.vjp(
            lambda rows, w: grouped_scaled_matmul(rows, w, product, scheme), rows, w
        )
        return y, *pullback(g)

    y, of_rows, of_w = multiply_and_differentiate(rows, w, g)
    for group, part in ((0, slice(0, 8)), (2, slice(8, 32))):
        result = y[part], of_rows[part], of_w[group]
        for ours, theirs in zip(
            result, expected(rows[part], w[group], g[part], scheme), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max())
    assert not np.any(of_w[1])


@SCHEMES
def test_leading_axes_are_tokens(scheme):
    x, w, g = draw(0, 2, 6, 16), draw(1, 16, 4), draw(2, 2, 6, 4)
    result, _, of_w = multiply_and_differentiate(x, w, g, scheme)
    rows = x.reshape(12, 16), w, g.reshape(12, 4)
    own, _, own_of_w = multiply_and_differentiate(*rows, scheme)
    np.testing.assert_allclose(result.reshape(12, 4), own, rtol=1e-6)
    np.testing.assert_allclose(of_w, own_of_w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layer_is_near_the_exact_product(name, dtype):
    cls, _ = DOTS[name]
    exact = Linear(input_dims=64, output_dims=32, fprop_dtype=dtype)
    layer = exact.clone(dot_tpl=cls.HParams.config())
    variables, x = exact.init(jax.random.key(0)), jnp.asarray(draw(3, 4, 8, 64), dtype)
    result = jax.jit(layer.apply)(variables, x)
    assert result.dtype == dtype
    reference = np.asarray(exact.apply(variables, x), np.float64)
    error = np.sqrt(
        np.mean((np.asarray(result, np.float64) - reference) ** 2) / np.mean(reference**2)
    )
    # The root mean square error of rounding: a 16th at most in e4m3, half of a 127th in int8.
    assert 1e-3 < error < (0.04 if name == "fp8" else 0.015)


@SCHEMES
def test_zeros_and_values_that_are_not_finite(scheme):
    x, w = draw(0, 4, 16), draw(1, 16, 8)
    assert not np.any(multiply(np.zeros_like(x), w, scheme))
    # The scale of these would be below the normal float32 numbers.
    assert not np.any(multiply(np.where(x > 1, np.float32(1e-36), 0), w, scheme))
    for value in (np.nan, np.inf):
        x[2, 3] = value
        result = np.asarray(multiply(x, w, scheme))
        assert not np.isfinite(result[2]).any()
