"""Tests of layers that are composed of other layers."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit.layers.basic.elementwise import ReLU, Tanh
from layerkit.layers.basic.linears import FeedForward, Linear
from layerkit.layers.basic.sequential import MLPBlock, Sequential, StackingOverTime

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)


def test_sequential_applies_its_layers_in_order(raises):
    config = Sequential.HParams.config(
        layer_tpls=(
            Linear.HParams.config(input_dims=3, output_dims=4),
            Tanh.HParams.config(),
            Linear.HParams.config(input_dims=4, output_dims=2),
        )
    )
    layer = config.Instantiate()
    variables = layer.init(KEY)
    first, last = (variables["params"][f"layers_{i}"]["w"] for i in (0, 2))
    expected = np.tanh(X @ first) @ last
    np.testing.assert_allclose(layer.apply(variables, X), expected, rtol=1e-5, atol=1e-6)
    with raises(ConfigError, owner="Sequential()", field="layer_tpls", value=None):
        Sequential().init(KEY)


@pytest.mark.parametrize("activate_output", [False, True])
def test_mlp_block_equals_its_formula(activate_output):
    layer = MLPBlock(
        input_dims=3,
        hidden_dims=(4, 5),
        output_dims=2,
        activate_output=activate_output,
        activation_tpl=ReLU.HParams.config(),
    )
    variables = layer.init(KEY)
    expected = X
    for number in range(3):
        weights = variables["params"][f"layers_{number}"]
        expected = expected @ weights["linear"]["w"] + weights["bias"]["b"]
        if number < 2 or activate_output:
            expected = np.maximum(expected, 0.0)
    np.testing.assert_allclose(layer.apply(variables, X), expected, rtol=1e-5, atol=1e-6)


def test_mlp_block_refuses_an_activation_or_bias_of_its_template_that_it_would_replace(raises):
    template = FeedForward.HParams.config(activation_tpl=Tanh.HParams.config())
    with raises(ConfigError, field="layer_tpl.activation_tpl"):
        MLPBlock(input_dims=3, output_dims=2, layer_tpl=template).init(KEY)


@pytest.mark.parametrize(("left", "right", "stride"), [(0, 0, 1), (2, 1, 1), (1, 0, 2), (0, 3, 3)])
def test_stacking_concatenates_neighbors(left, right, stride):
    layer = StackingOverTime(left=left, right=right, stride=stride)
    length = X.shape[1]
    expected = []
    for t in range(0, length, stride):
        frames = [
            X[:, s] if 0 <= s < length else np.zeros_like(X[:, 0])
            for s in range(t - left, t + right + 1)
        ]
        expected.append(np.concatenate(frames, axis=-1))
    np.testing.assert_array_equal(layer.apply({}, X), np.stack(expected, axis=1))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("zeros_min", {}),
        ("edges_min", {"pad_with_left_frame": True, "pad_with_right_frame": True}),
        ("left_max", {"pad_with_left_frame": True, "padding_reduce_option": "reduce_max"}),
        ("right_min", {"pad_with_right_frame": True}),
    ],
)
def test_stacking_at_edges_and_of_paddings_equals_praxis(praxis, name, fields):
    case = praxis(f"stacking_{name}")
    layer = StackingOverTime(left=2, right=1, stride=3, **fields)
    np.testing.assert_array_equal(layer.apply({}, case["x"]), case["outputs"])
    paddings = layer.apply({}, case["paddings"][..., 0], method="stack_paddings")
    np.testing.assert_array_equal(paddings, case["out_paddings"][..., 0])
