"""Relative biases and ALiBi, compared with published code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.weights import WeightInit, logical_axes
from layerkit.layers.attention.biases import Alibi, RelativeBias, alibi_slopes, relative_buckets
from layerkit.layers.moe.routing import TopKRouter


def test_buckets_equal_a_published_example():
    distances = jnp.array([5, 2, 0, 12, -3, -1, -15, 1])
    buckets = relative_buckets(distances, num_buckets=8, max_distance=8, bidirectional=True)
    np.testing.assert_array_equal(buckets, [7, 6, 0, 7, 2, 1, 3, 5])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 8), (12, 50), (64, 1000)])
def test_buckets_are_those_of_transformers(num_buckets, max_distance, bidirectional):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = np.arange(-1200, 1201)
    expected = t5.T5Attention._relative_position_bucket(
        torch.tensor(distances),
        bidirectional=bidirectional,
        num_buckets=num_buckets,
        max_distance=max_distance,
    ).numpy()
    result = relative_buckets(
        jnp.asarray(distances),
        num_buckets=num_buckets,
        max_distance=max_distance,
        bidirectional=bidirectional,
    )
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_equals_its_buckets(bidirectional):
    layer = RelativeBias(num_heads=3, num_buckets=6, max_distance=5, bidirectional=bidirectional)
    variables = jax.jit(layer.init)(jax.random.key(0))
    queries, keys = jnp.array([[4, 9], [0, 1]]), jnp.array([[0, 4, 5], [7, 1, 0]])
    bias = layer.apply(variables, queries, keys)
    assert bias.shape == (2, 3, 2, 3) and bias.dtype == jnp.float32
    w = np.asarray(variables["params"]["w"])
    distances = keys[:, None, :] - queries[:, :, None]
    buckets = relative_buckets(
        distances, num_buckets=6, max_distance=5, bidirectional=bidirectional
    )
    buckets, bias = np.asarray(buckets), np.asarray(bias)
    for b, h, q, k in np.ndindex(*bias.shape):
        assert bias[b, h, q, k] == w[buckets[b, q, k], h]


def test_relative_bias_weight_has_axes_init_and_dtype():
    layer = RelativeBias(num_heads=16, num_buckets=32, fprop_dtype="bfloat16")
    boxed = layer.init_boxed(jax.random.key(0))
    assert logical_axes(boxed)["params"] == {"w": (None, "heads")}
    w = boxed["params"]["w"].value
    bound = (6 / (32 + 16)) ** 0.5  # as in T5X: uniform, by the mean of the fans
    assert w.shape == (32, 16) and 0.95 * bound < np.abs(w).max() <= bound
    places = jnp.arange(4)[None]
    assert layer.apply(layer.init(jax.random.key(0)), places, places).dtype == jnp.float32


def test_initializers_of_the_page_on_pax_have_the_deviations_of_praxis(praxis):
    expected = praxis("first_deviations")
    bias = RelativeBias(num_heads=6, weight_init=WeightInit.Gaussian((32 * 6) ** -0.5))
    router = TopKRouter(
        input_dims=32, num_experts=4, weight_init=WeightInit.Uniform((3 / 32) ** 0.5)
    )
    for layer, name in ((bias, "relative_bias"), (router, "router")):
        draw = jax.vmap(layer.init)(jax.random.split(jax.random.key(0), 50))["params"]["w"]
        assert float(draw.std()) == pytest.approx(float(expected[name]), rel=0.03)


def test_every_bucket_has_a_gradient():
    layer = RelativeBias(num_heads=2, num_buckets=8, max_distance=20, bidirectional=True)
    variables = layer.init(jax.random.key(0))
    places = jnp.arange(24)[None]
    gradient = jax.jit(jax.grad(lambda v: layer.apply(v, places, places).sum()))(variables)
    # The bucket of "later by 0" is never used: distance 0 has the other half's.
    counts = np.asarray(gradient["params"]["w"])
    np.testing.assert_array_equal(counts[4], 0.0)
    assert (np.delete(counts, 4, axis=0) > 0).all()
    assert counts[:, 0].sum() == 24 * 24


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8, 12, 20])
def test_alibi_equals_bloom(num_heads):
    torch = pytest.importorskip("torch")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    length = 5
    ones = torch.ones((1, length))
    # [heads, 1, keys], which differs by a constant per query: slope·key, not slope·(key - query).
    by_key = bloom.build_alibi_tensor(ones, num_heads, torch.float32).numpy()
    expected = by_key - by_key.transpose(0, 2, 1)
    places = jnp.arange(length)[None]
    bias = Alibi(num_heads=num_heads).apply({}, places, places)
    assert bias.shape == (1, num_heads, length, length)
    causal = np.tri(length, dtype=bool)
    np.testing.assert_allclose(bias[0][:, causal], expected[:, causal], rtol=1e-6)
    np.testing.assert_array_equal(bias[0], np.swapaxes(bias[0], 1, 2))


def test_alibi_slopes_equal_the_paper():
    np.testing.assert_allclose(alibi_slopes(8), 0.5 ** np.arange(1, 9))
    assert not jax.tree.leaves(Alibi(num_heads=4).init(jax.random.key(0)))
