"""The combined projection, compared with separate projections."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import logical_axes
from layerkit.layers.attention.combined_projection import CombinedProjection
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.ops.attention.masks import AttentionMask

BATCH, LENGTH, DIMS, HEADS = 4, 6, 8, 4
ROTARY = RotaryPositionalEmbedding.HParams.config()


def make(**fields):
    return MultiHeadAttention(
        input_dims=DIMS, num_heads=HEADS, rotary_tpl=ROTARY, use_bias=True, **fields
    )


def drawn_weights(layer):
    """Return weights without zeros, since weights that start at 0 would hide errors."""
    random, shapes = np.random.default_rng(0), jax.eval_shape(layer.init, jax.random.key(0))
    return jax.tree.map(lambda w: random.normal(0.0, 0.5, w.shape).astype(np.float32), shapes)


def combine_heads(query, key, value):
    *leading, kv_heads, head_dim = key.shape
    grouped = query.reshape(*leading, kv_heads, -1, head_dim)
    return jnp.concatenate([grouped, key[..., None, :], value[..., None, :]], axis=-2)


def combined_weights(weights):
    params = dict(weights["params"])
    separate = [params.pop(name) for name in ("query", "key", "value")]
    qkv = {n: combine_heads(*(part[n] for part in separate)) for n in ("w", "b")}
    return {"params": {**params, "qkv": qkv}}


def value_and_gradients(layer):
    def loss(weights, x):
        mask = AttentionMask.causal_mask(BATCH, LENGTH)
        positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
        out = layer.apply(weights, x, mask=mask, positions=positions)
        return jnp.sum(out**2), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def close(actual, expected):
    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1.0, np.abs(b).max()))

    jax.tree.map(check, actual, expected)


X = jax.random.normal(jax.random.key(3), (BATCH, LENGTH, DIMS))


@pytest.mark.parametrize(
    "kv_heads",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)],
)
def test_equals_separate_projections_with_the_same_weights(kv_heads):
    separate = make(num_kv_heads=kv_heads)
    weights = drawn_weights(separate)
    (_, expected), gradients = value_and_gradients(separate)(weights, X)
    combined = make(num_kv_heads=kv_heads, combined_qkv=True)
    moved = combined_weights(weights)
    shapes = jax.eval_shape(combined.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, moved) == jax.tree.map(jnp.shape, shapes)
    (_, out), result = value_and_gradients(combined)(moved, X)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    close(result, combined_weights(gradients))


def test_weight_is_split_over_devices_by_groups():
    bound = BoundSharding(Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "fsdp", "tensor")))
    layer = make(num_kv_heads=2, combined_qkv=True)
    weights = drawn_weights(layer)
    expected = value_and_gradients(layer)(weights, X)
    axes = logical_axes(layer.init_boxed(jax.random.key(0)))["params"]
    assert axes["qkv"] == {
        "w": ("embed", "kv_heads", None, "head_dim"),
        "b": ("kv_heads", None, "head_dim"),
    }
    places = jax.tree.map(bound.sharding, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    placed = {"params": jax.device_put(weights["params"], places)}
    w = placed["params"]["qkv"]["w"]
    assert w.sharding.shard_shape(w.shape) == (DIMS // 2, 1, HEADS // 2 + 2, DIMS // HEADS)
    close(value_and_gradients(layer.clone(sharding=bound))(placed, X), expected)


def test_fans_are_those_of_the_combined_product():
    layer = CombinedProjection(input_dims=32, num_heads=4, num_kv_heads=2, head_dim=8)
    w = jax.jit(layer.init)(jax.random.key(0))["params"]["w"]
    bound = (6 / (32 + (4 + 2 + 2) * 8)) ** 0.5
    assert 0.98 * bound < np.abs(w).max() <= bound
