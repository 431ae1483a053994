"""NVFP4 products, compared with NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.linalg
from flax.errors import InvalidRngError

from layerkit.config import Config
from layerkit.layers.basic.linears import Linear
from layerkit.layers.quantization.nvfp4 import ROTATION, NvFp4Dot, nvfp4_matmul


def draw(seed, *shape):
    # Each number has another magnitude, so that blocks have different scales.
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2.0 ** rng.integers(-3, 3, shape)).astype(np.float32)


def rounded(x, rows, columns):
    """Return a matrix rounded to e2m1 with an e4m3 scale for each block of rows × columns."""
    tensor = np.abs(x).max() / (6.0 * 448.0)
    result = np.empty(x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns].astype(np.float64)
            largest = np.abs(block).max() / tensor
            scale = float(np.float32(largest / 6.0).astype(ml_dtypes.float8_e4m3fn)) * tensor
            values = np.clip(block / scale, -6.0, 6.0).astype(np.float32)
            values = values.astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
            result[i : i + rows, j : j + columns] = values * scale
    return result


def rotated(x):
    """Return `[tokens, dims]` as `[dims, tokens]` with the rotation of each 16 tokens."""
    whole = np.pad(x, [(0, -len(x) % 32), (0, 0)])
    return whole.T @ np.kron(np.eye(len(whole) // 16), ROTATION)


@jax.jit
def gradients(x, w, g, key=None):
    """Return output and gradients of `[tokens, in] · [in, out]` by the product in NVFP4."""

    def product(x, w):
        return nvfp4_matmul(x[None], w[None], key, "float32")[0]

    y, pullback = jax.vjp(product, x, w)
    return y, *pullback(g)


@jax.jit
def multiply(x, w):
    return NvFp4Dot().apply({}, x, w)


@jax.jit
def multiply_and_differentiate(x, w, g):
    y, pullback = jax.vjp(multiply, x, w)
    return y, *pullback(g)


def test_rotation_is_a_hadamard_matrix_with_random_signs():
    np.testing.assert_allclose(ROTATION @ ROTATION.T, np.eye(16), atol=1e-12)
    signs = 4 * ROTATION[:, 0]
    np.testing.assert_allclose(4 * ROTATION, signs[:, None] * scipy.linalg.hadamard(16))
    assert set(signs) == {-1.0, 1.0}


# The second sizes are no multiples of a block, neither of features nor of tokens.
@pytest.mark.parametrize(
    ("tokens", "dims", "out_dims"), [pytest.param(64, 96, 32, marks=pytest.mark.slow), (23, 40, 72)]
)
def test_output_and_gradients_equal_numpy(tokens, dims, out_dims):
    x, w, g = draw(0, tokens, dims), draw(1, dims, out_dims), draw(2, tokens, out_dims)
    of_w = rounded(rotated(x), 1, 16) @ rounded(rotated(g), 1, 16).T
    # Forward and backward product read the same rounded weights.
    weights = rounded(w, 16, 16)
    expected = rounded(x, 1, 16) @ weights, rounded(g, 1, 16) @ weights.T, of_w
    for ours, theirs in zip(multiply_and_differentiate(x, w, g), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.slow
def test_group_of_weights_equals_its_members():
    x, w, g = draw(0, 3, 8, 64), draw(1, 3, 64, 32), draw(2, 3, 8, 32)
    x *= np.array([1, 100, 1e-3], np.float32)[:, None, None]  # a scale for each member
    result = multiply_and_differentiate(x, w, g)
    for member in range(3):
        expected = gradients(x[member], w[member], g[member])
        for ours, theirs in zip(result, expected, strict=True):
            np.testing.assert_allclose(ours[member], theirs, rtol=1e-5)


def test_mean_of_stochastically_rounded_gradients_is_exact():
    x, w, g = draw(0, 32, 48), draw(1, 48, 16), draw(2, 32, 16)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.jit(jax.vmap(lambda key: gradients(x, w, g, key)[1:]))(keys)
    expected = g @ rounded(w, 16, 16).T, rounded(rotated(x), 1, 16) @ rotated(g).T
    nearest = gradients(x, w, g)[1:]
    for draws, theirs, biased in zip(drawn, expected, nearest, strict=True):
        error = np.asarray(draws).mean(axis=0) - theirs
        deviation = np.asarray(draws).std(axis=0) / np.sqrt(len(keys))
        assert np.abs(error).mean() < 1.5 * deviation.mean()
        assert np.abs(np.asarray(biased) - theirs).mean() > 5 * deviation.mean()


def test_gradients_of_many_tensors_are_finite():
    w, x = jnp.ones((16, 16)), jnp.ones((16, 16))
    # In some of these, the largest number over the scale of the tensor exceeds 6 · 448 by rounding.
    tensors = jax.random.normal(jax.random.key(0), (3000, 16, 16))
    keys = jax.random.split(jax.random.key(1), len(tensors))
    of_x, of_w = jax.jit(jax.vmap(lambda key, g: gradients(x, w, g, key)[1:]))(keys, tensors)
    assert jnp.isfinite(of_x).all() and jnp.isfinite(of_w).all()


def test_training_draws_gradients_from_the_key_of_the_step():
    layer = Linear(input_dims=32, output_dims=32, dot_tpl=Config(NvFp4Dot), train=True)
    variables, x = layer.init(jax.random.key(0)), draw(0, 4, 32)

    @jax.jit
    def value_and_gradients(key):
        def loss(variables, x):
            output = layer.apply(variables, x, rngs={"random": key})
            return jnp.sin(output).sum(), output

        (_, output), of_all = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables, x)
        return output, of_all[0]["params"]["w"], of_all[1]

    first, again, other = map(value_and_gradients, map(jax.random.key, (1, 1, 2)))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    np.testing.assert_array_equal(first[0], other[0])
    np.testing.assert_array_equal(first[0], jax.jit(layer.clone(train=False).apply)(variables, x))
    assert not np.array_equal(first[1], other[1])
    assert not np.array_equal(first[2], other[2])


def test_training_without_a_key_raises():
    layer = Linear(input_dims=32, output_dims=32, dot_tpl=Config(NvFp4Dot), train=True)
    with pytest.raises(InvalidRngError):
        layer.apply(layer.init(jax.random.key(0)), draw(0, 4, 32))


def test_small_zero_and_infinite_values():
    x, w = draw(0, 4, 64), draw(1, 64, 8)
    assert not np.any(multiply(np.zeros_like(x), w))
    # Each tensor is scaled, so that tiny factors lose nothing; those of 1e-40 are subnormal.
    tiny = multiply(x * np.float32(2.0**-90), w)
    np.testing.assert_allclose(tiny * 2.0**90, multiply(x, w), rtol=1e-6)
    tiny = multiply(x * np.float32(2.0**-80), w * np.float32(2.0**-40))
    np.testing.assert_allclose(tiny * 2.0**120, multiply(x, w), rtol=1e-6)
    assert not np.any(multiply(x * np.float32(1e-40), w))
    # A block whose scale would be below the smallest of e4m3 becomes 0.
    x[:, :16] *= 1e-7
    np.testing.assert_array_equal(multiply(x, np.where(np.arange(64) < 16, w.T, 0).T), 0)
    for value in (np.nan, np.inf):
        x[2, 3] = value
        assert np.isnan(multiply(x, w)).all()
