"""Tests of SigmoidCrossEntropy, compared with its formula."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit.layers.basic.sigmoid_cross_entropy import SigmoidCrossEntropy

KEY = jax.random.key(0)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(5, 4)).astype(np.float32)
LABELS = RANDOM.integers(0, 2, (5, 3)).astype(np.float32)
WEIGHTS = np.array([1, 1, 0, 2, 1], np.float32)


def test_loss_is_the_sum_of_binary_losses():
    layer = SigmoidCrossEntropy(input_dims=4, num_classes=3)
    variables = layer.init(KEY)
    logits = np.asarray(X @ variables["params"]["w"], np.float64)
    p = 1 / (1 + np.exp(-logits))
    losses = -(LABELS * np.log(p) + (1 - LABELS) * np.log(1 - p)).sum(-1)
    outputs = layer.apply(variables, X, LABELS, WEIGHTS)
    np.testing.assert_allclose(outputs.per_example_loss, losses, rtol=1e-5)
    np.testing.assert_allclose(outputs.loss, np.average(losses, weights=WEIGHTS), rtol=1e-5)
    assert outputs.total_weight == 5.0


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 3), ()])
def test_labels_of_another_shape_raise(raises, shape):
    layer = SigmoidCrossEntropy(input_dims=4, num_classes=3)
    with raises(ConfigError, field="shape of labels", value=list(shape)):
        layer.apply(layer.init(KEY), X, np.zeros(shape, np.float32), WEIGHTS)


def test_bias_starts_at_the_initial_probability():
    layer = SigmoidCrossEntropy(input_dims=4, num_classes=3, initial_probability=0.01)
    variables = layer.init(KEY)
    logits = layer.apply(variables, np.zeros((1, 4), np.float32), method="logits")
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), 0.01, rtol=1e-5)


def test_large_logits_give_finite_losses():
    layer = SigmoidCrossEntropy(input_dims=1, num_classes=1, use_bias=False)
    variables = {"params": {"w": np.full((1, 1), 1e4, np.float32)}}
    outputs = layer.apply(variables, np.ones((1, 1)), np.zeros((1, 1)), np.ones(1))
    np.testing.assert_allclose(outputs.loss, 1e4)
