"""MXFP8 products, compared with NumPy; the kernel's program is traced for absent devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, use_abstract_mesh

from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit.layers.linears import Linear
from layerkit.layers.moe.feed_forward import MoeFeedForward
from layerkit.layers.quantization.block_scaling import MxFp8Dot, mxfp8_matmul, round_to_mxfp8
from layerkit.sharding import BoundSharding

DOT = Config(MxFp8Dot)


def draw(seed, *shape):
    # Each number has another magnitude, so that blocks have different scales.
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2.0 ** rng.integers(-6, 6, shape)).astype(np.float32)


def rounded(x):
    """Return `x` rounded to e4m3 with a power of two for each 32 numbers of the last axis."""
    found = np.empty(x.shape)
    for start in range(0, x.shape[-1], 32):
        block = x[..., start : start + 32]
        scale = 2.0 ** np.ceil(np.log2(np.abs(block).max(axis=-1, keepdims=True) / 448.0))
        values = (block / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        found[..., start : start + 32] = values.astype(np.float64) * scale
    return found


def expected(x, w, g):
    """Return output and gradients of `[tokens, in] · [in, out]`; blocks lie on contracted axes."""
    y = rounded(x) @ rounded(w.T).T
    return y, rounded(g) @ rounded(w).T, rounded(x.T) @ rounded(g.T).T


def on_device(kind, platform):
    """Return a context in which programs are traced for a device of another machine."""
    device = AbstractDevice(kind, num_cores=None, platform=platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


# The second sizes are no multiples of a block, neither of features nor of tokens.
@pytest.mark.parametrize(("tokens", "dims", "out_dims"), [(64, 96, 32), (23, 40, 72)])
def test_output_and_gradients_equal_numpy(tokens, dims, out_dims):
    x, w, g = draw(0, tokens, dims), draw(1, dims, out_dims), draw(2, tokens, out_dims)
    y, pullback = jax.vjp(lambda x, w: MxFp8Dot().apply({}, x, w), x, w)
    for ours, theirs in zip((y, *pullback(g)), expected(x, w, g), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def test_group_of_weights_equals_its_members():
    x, w, g = draw(0, 3, 8, 64), draw(1, 3, 64, 32), draw(2, 3, 8, 32)
    y, pullback = jax.vjp(lambda x, w: MxFp8Dot().apply({}, x, w), x, w)
    of_x, of_w = pullback(g)
    for member in range(3):
        found = y[member], of_x[member], of_w[member]
        for ours, theirs in zip(found, expected(x[member], w[member], g[member]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def test_leading_axes_are_tokens():
    x, w = draw(0, 2, 6, 64), draw(1, 64, 4)
    found = MxFp8Dot().apply({}, x, w)
    np.testing.assert_array_equal(found.reshape(12, 4), MxFp8Dot().apply({}, x.reshape(12, 64), w))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layer_is_near_the_exact_product(dtype):
    exact = Linear(input_dims=64, output_dims=32, fprop_dtype=dtype)
    layer = exact.clone(dot_tpl=DOT)
    variables = exact.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 8, 64), dtype)
    found = layer.apply(variables, x)
    assert found.dtype == dtype
    reference = np.asarray(exact.apply(variables, x), np.float64)
    error = np.square(np.asarray(found, np.float64) - reference).mean()
    # Rounding to 3 bits of mantissa errs by a 16th at most.
    assert 1e-3 < np.sqrt(error / np.square(reference).mean()) < 0.04


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
    assert not np.any(MxFp8Dot().apply({}, np.zeros_like(x), w))
    for value in (np.nan, np.inf):
        x[2, 3] = value
        found = np.asarray(MxFp8Dot().apply({}, x, w))
        assert not np.isfinite(found[2]).any()
        assert np.isfinite(found[[0, 1, 3]]).all()


def test_program_of_blackwell_multiplies_mxfp8_forward_and_backward():
    layer = Linear(input_dims=64, output_dims=96, fprop_dtype="bfloat16", dot_tpl=DOT)
    variables = layer.init(jax.random.key(0))
    x = jnp.ones((8, 4, 64), jnp.bfloat16)
    with on_device("NVIDIA B200", "gpu"):
        grads = jax.grad(lambda v, x: layer.apply(v, x).astype("float32").sum(), argnums=(0, 1))
        text = str(jax.make_jaxpr(grads)(variables, x))
    assert text.count("scaled_matmul_wrapper[") == 3
    assert "dot_general" not in text


def test_product_of_blackwell_supports_vmap():
    x, w = jnp.ones((2, 1, 32, 64)), jnp.ones((2, 1, 64, 96))

    def loss(x, w):
        return jnp.sin(mxfp8_matmul(x, w, "cudnn")).sum()

    of_x, of_w = jax.eval_shape(jax.vmap(jax.grad(loss, argnums=(0, 1))), x, w)
    assert (of_x.shape, of_w.shape) == (x.shape, w.shape)


@pytest.mark.parametrize(
    ("kind", "platform"), [("NVIDIA H100 80GB HBM3", "gpu"), ("TPU v5 lite", "tpu")]
)
def test_other_devices_raise(raises, kind, platform):
    layer = Linear(input_dims=64, output_dims=32, dot_tpl=DOT)
    variables = layer.init(jax.random.key(0))
    with on_device(kind, platform), raises(ConfigError, field="dot_tpl", value="MxFp8Dot"):
        jax.eval_shape(layer.apply, variables, jnp.ones((4, 64)))


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_mesh_that_splits_features_or_positions_raises(raises, axis):
    mesh = Mesh(jax.devices()[:2], (axis,))
    layer = Linear(input_dims=64, output_dims=32, dot_tpl=DOT, sharding=BoundSharding(mesh))
    variables = layer.init(jax.random.key(0))
    with raises(ConfigError, field="dot_tpl", value="MxFp8Dot"):
        jax.eval_shape(layer.apply, variables, jnp.ones((4, 8, 64)))


def make_experts(**fields):
    layer = MoeFeedForward(input_dims=32, hidden_dims=64, num_experts=2, dot_tpl=DOT, **fields)
    return layer, layer.init(jax.random.key(0)), jnp.asarray(draw(0, 2, 4, 32))


def test_experts_evaluate_as_they_train():
    layer, variables, x = make_experts(capacity_factor=2.0)
    trained, _ = layer.clone(train=True).apply(variables, x, mutable=["summaries", "aux_loss"])
    np.testing.assert_allclose(layer.apply(variables, x), trained, rtol=1e-5, atol=1e-5)


def test_experts_without_a_capacity_raise_in_training(raises):
    layer, variables, x = make_experts(train=True)
    with raises(ConfigError, field="dot_tpl", value="MxFp8Dot"):
        layer.apply(variables, x, mutable=["summaries", "aux_loss"])
