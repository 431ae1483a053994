"""Tests of BatchNorm and GroupNorm, compared with NumPy in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from layerkit.base.base_layer import NON_TRAINABLE
from layerkit.base.sharding import BoundSharding
from layerkit.layers.basic.batch_norm import BatchNorm, GroupNorm

KEY = jax.random.key(0)
BATCH, LENGTH, DIMS = 4, 6, 8
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(3.0, 2.0, (BATCH, LENGTH, DIMS)).astype(np.float32)
IS_TOKEN = np.arange(LENGTH) < np.array([6, 3, 1, 0])[:, None]


def draw_weights(layer):
    """Scale and bias that are seen."""
    variables = layer.init(KEY)
    random = np.random.default_rng(1)
    draw = lambda w: random.normal(size=w.shape).astype(np.float32)  # noqa: E731
    return {**variables, "params": jax.tree.map(draw, variables["params"])}


def scaled(normalized, variables):
    params = variables["params"]
    return normalized * (1.0 + params["scale"]) + params["bias"]


def train_on(layer, variables, x, **kwargs):
    layer = layer.clone(train=True)
    y, updates = layer.apply(variables, x, mutable=[NON_TRAINABLE], **kwargs)
    return y, updates[NON_TRAINABLE]


@pytest.mark.parametrize("is_token", [None, IS_TOKEN], ids=["full", "padded"])
def test_batch_norm_normalizes_by_batch_statistics_in_training(is_token):
    layer = BatchNorm(dims=DIMS, decay=0.9)
    variables = draw_weights(layer)
    tokens = X.reshape(-1, DIMS) if is_token is None else X[is_token]
    mean, variance = tokens.mean(0, dtype=np.float64), tokens.var(0, dtype=np.float64)
    y, moving = train_on(layer, variables, X, is_token=is_token)
    expected = scaled((X - mean) / np.sqrt(variance + 1e-3), variables)
    if is_token is not None:
        expected = np.where(is_token[..., None], expected, 0.0)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moving["moving_mean"], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(moving["moving_variance"], 0.9 + 0.1 * variance, rtol=1e-5)
    assert layer.init(KEY, X)[NON_TRAINABLE]["moving_mean"].sum() == 0.0


def test_batch_norm_normalizes_by_moving_averages_in_evaluation():
    layer = BatchNorm(dims=DIMS)
    variables = draw_weights(layer)
    mean, variance = X[0, 0], np.square(X[0, 1]) + 0.5
    variables[NON_TRAINABLE] = {"moving_mean": mean, "moving_variance": variance}
    expected = scaled((X - mean) / np.sqrt(variance + 1e-3), variables)
    np.testing.assert_allclose(layer.apply(variables, X), expected, rtol=1e-4, atol=1e-5)
    y, moving = train_on(layer.clone(force_evaluation=True), variables, X)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert (moving["moving_mean"] == mean).all()


def test_training_by_updated_moving_averages_equals_praxis(praxis):
    case = praxis("batch_norm_moving")
    layer = BatchNorm(dims=4, decay=0.9, use_moving_averages_in_training=True)
    variables = layer.init(KEY)
    assert not variables["params"]  # neither scale nor bias
    is_token = case["paddings"] == 0
    y, moving = train_on(layer, variables, case["x"], is_token=is_token)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), dict(moving), case["moving"]
    )
    # Praxis also normalizes padding, for which the outputs are 0 here.
    expected = np.where(is_token[..., None], case["outputs"], 0.0)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    evaluated = layer.apply({**variables, NON_TRAINABLE: moving}, case["x"], is_token=is_token)
    np.testing.assert_allclose(evaluated, y, rtol=1e-5, atol=1e-6)


def test_batch_norm_keeps_its_averages_for_a_batch_of_padding():
    layer = BatchNorm(dims=DIMS)
    variables = draw_weights(layer)
    y, moving = train_on(layer, variables, X, is_token=np.zeros_like(IS_TOKEN))
    assert not np.any(y)
    jax.tree.map(np.testing.assert_array_equal, moving, variables[NON_TRAINABLE])


def test_batch_norm_on_a_mesh_uses_the_global_batch():
    layer = BatchNorm(dims=DIMS, train=True)
    variables = layer.init(KEY)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    sharded = layer.clone(sharding=BoundSharding(mesh))
    y, updates = jax.jit(lambda v, x: sharded.apply(v, x, mutable=[NON_TRAINABLE]))(
        variables, jax.device_put(X, rows)
    )
    expected, moving = train_on(layer, variables, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates[NON_TRAINABLE], moving
    )


@pytest.mark.parametrize("is_token", [None, IS_TOKEN], ids=["full", "padded"])
def test_group_norm_normalizes_each_example_in_groups(is_token):
    layer = GroupNorm(dims=DIMS, num_groups=2)
    variables = draw_weights(layer)
    expected = np.zeros(X.shape)
    for row in range(BATCH):
        kept = slice(None) if is_token is None else is_token[row]
        for group in (slice(0, 4), slice(4, 8)):
            part = X[row, kept, group].astype(np.float64)
            if part.size:
                expected[row, kept, group] = (part - part.mean()) / np.sqrt(part.var() + 1e-3)
    expected = scaled(expected, variables)
    if is_token is not None:
        expected = np.where(is_token[..., None], expected, 0.0)
    y = layer.apply(variables, X, is_token=is_token)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [BatchNorm(dims=DIMS), GroupNorm(dims=DIMS, num_groups=4)])
def test_values_of_padding_have_no_effect(layer):
    layer = layer.clone(train=True)
    variables = draw_weights(layer)
    poisoned = np.where(IS_TOKEN[..., None], X, np.nan)

    def loss(variables, x):
        y, _ = layer.apply(variables, x, is_token=IS_TOKEN, mutable=[NON_TRAINABLE])
        return (y**2).sum()

    clean = jax.value_and_grad(loss)(variables, X)
    dirty = jax.value_and_grad(loss)(variables, poisoned)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
