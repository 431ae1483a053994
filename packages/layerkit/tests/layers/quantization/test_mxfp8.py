"""MXFP8 products, compared with NumPy."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from layerkit.layers.quantization.mxfp8 import MxFp8Dot, round_to_mxfp8


@jax.jit
def multiply(x, w):
    return MxFp8Dot().apply({}, x, w)


@jax.jit
def multiply_and_differentiate(x, w, g):
    y, pullback = jax.vjp(multiply, x, w)
    return y, *pullback(g)


def draw(seed, *shape):
    # Each number has another magnitude, so that blocks have different scales.
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2.0 ** rng.integers(-6, 6, shape)).astype(np.float32)


def rounded(x):
    """Return `x` rounded to e4m3 with a power of two for each 32 numbers of the last axis."""
    result = np.empty(x.shape)
    for start in range(0, x.shape[-1], 32):
        block = x[..., start : start + 32]
        scale = 2.0 ** np.ceil(np.log2(np.abs(block).max(axis=-1, keepdims=True) / 448.0))
        values = (block / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        result[..., start : start + 32] = values.astype(np.float64) * scale
    return result


def expected(x, w, g):
    """Return output and gradients of `[tokens, in] · [in, out]`; blocks lie on contracted axes."""
    y = rounded(x) @ rounded(w.T).T
    return y, rounded(g) @ rounded(w).T, rounded(x.T) @ rounded(g.T).T


# The second sizes are no multiples of a block, neither of features nor of tokens.
@pytest.mark.parametrize(
    ("tokens", "dims", "out_dims"), [pytest.param(64, 96, 32, marks=pytest.mark.slow), (23, 40, 72)]
)
def test_output_and_gradients_equal_numpy(tokens, dims, out_dims):
    x, w, g = draw(0, tokens, dims), draw(1, dims, out_dims), draw(2, tokens, out_dims)
    result = multiply_and_differentiate(x, w, g)
    for ours, theirs in zip(result, expected(x, w, g), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def test_group_of_weights_equals_its_members():
    x, w, g = draw(0, 3, 8, 64), draw(1, 3, 64, 32), draw(2, 3, 8, 32)
    y, of_x, of_w = multiply_and_differentiate(x, w, g)
    for member in range(3):
        result = y[member], of_x[member], of_w[member]
        for ours, theirs in zip(result, expected(x[member], w[member], g[member]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def test_no_number_is_clipped_and_scales_are_as_small_as_possible():
    x = np.array([448, 449, 896, 1e-30, 3e38, 2e-38], np.float32)[:, None] * np.ones(32, "f4")
    values, scales = map(np.asarray, round_to_mxfp8(x))
    # 2**-126 is the smallest normal number of float32, and the smallest scale.
    np.testing.assert_array_equal(
        scales[:, 0].astype(np.float64), 2.0 ** np.array([0, 1, 1, -108, 120, -126])
    )
    restored = values.astype(np.float32) * scales.astype(np.float32)
    np.testing.assert_allclose(restored, x, rtol=1 / 16)


def test_zeros_and_values_that_are_not_finite():
    x, w = draw(0, 4, 64), draw(1, 64, 8)
    assert not np.any(multiply(np.zeros_like(x), w))
    for value in (np.nan, np.inf):
        x[2, 3] = value
        result = np.asarray(multiply(x, w))
        assert not np.isfinite(result[2]).any()
        assert np.isfinite(result[[0, 1, 3]]).all()
