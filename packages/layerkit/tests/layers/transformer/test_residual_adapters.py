"""Tests of residual adapters: formula, initial outputs and parameter paths."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from layerkit.base.base_layer import PARAMS
from layerkit.base.weights import logical_axes
from layerkit.layers.attention.base_attention import OutputProjection
from layerkit.layers.basic.elementwise import SiLU
from layerkit.layers.transformer.residual_adapters import (
    RESIDUAL_ADAPTER_WEIGHTS,
    AdaptedFeedForward,
    AdaptedOutputProjection,
    MultitaskResidualAdapter,
    ResidualAdapter,
)
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import TransformerFeedForward

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (2, 3, 8))
ADAPTER = ResidualAdapter.HParams.config(bottleneck_dims=4, activation_tpl=SiLU.HParams.config())


def drawn(tree):
    random = np.random.default_rng(7)
    return jax.tree.map(lambda x: random.normal(0.0, 1.0, x.shape).astype(np.float32), tree)


def by_hand(params, x):
    down, up = params["down"], params["up"]
    hidden = x @ np.asarray(down["linear"]["w"]) + np.asarray(down["bias"]["b"])
    hidden = hidden / (1 + np.exp(-hidden))
    return x + hidden @ np.asarray(up["linear"]["w"]) + np.asarray(up["bias"]["b"])


def test_outputs_equal_their_formula_and_start_at_zero():
    layer = ADAPTER.clone(input_dims=8).Instantiate()
    variables = layer.init(KEY)
    np.testing.assert_array_equal(layer.apply(variables, X), X)
    params = drawn(variables[PARAMS])
    result = layer.apply({PARAMS: params}, X)
    np.testing.assert_allclose(result, by_hand(params, np.asarray(X)), rtol=1e-4, atol=1e-5)
    axes = logical_axes(layer.init_boxed(KEY))[PARAMS]
    assert axes["down"] == {"linear": {"w": ("embed", None)}, "bias": {"b": (None,)}}
    assert axes["up"] == {"linear": {"w": (None, "embed")}, "bias": {"b": ("embed",)}}


@pytest.mark.parametrize(
    ("adapted", "plain", "x"),
    [
        (
            AdaptedFeedForward(input_dims=8, hidden_dims=6, adapter_tpl=ADAPTER),
            TransformerFeedForward(input_dims=8, hidden_dims=6),
            X,
        ),
        (
            AdaptedOutputProjection(output_dims=8, num_heads=2, head_dim=4, adapter_tpl=ADAPTER),
            OutputProjection(output_dims=8, num_heads=2, head_dim=4),
            X.reshape(2, 3, 2, 4),
        ),
    ],
)
def test_adapter_follows_the_branch(adapted, plain, x):
    params = drawn(jax.eval_shape(adapted.init, KEY)[PARAMS])
    base = {name: value for name, value in params.items() if name != "adapter"}
    branch = np.asarray(plain.apply({PARAMS: base}, x))
    expected = by_hand(params["adapter"], branch)
    result = adapted.apply({PARAMS: params}, x)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_adapted_model_keeps_weights_and_initial_outputs():
    plain = StackedTransformerRepeated.HParams.config(num_layers=2, input_dims=8, num_heads=2)
    plain.set(hidden_dims=12)
    config = plain.clone()
    layer = config.layer_tpl
    layer.feed_forward_tpl = layer.feed_forward_tpl.with_class(AdaptedFeedForward)
    output = layer.attention_tpl.output_tpl.with_class(AdaptedOutputProjection)
    layer.attention_tpl.output_tpl = output
    for adapted in (layer.feed_forward_tpl, output):
        adapted.adapter_tpl.bottleneck_dims = 4
    adapted, model = config.Instantiate(), plain.Instantiate()
    result, base = (
        flatten_dict(jax.tree.map(jnp.shape, jax.eval_shape(layer.init, KEY)[PARAMS]), sep="/")
        for layer in (adapted, model)
    )
    assert base.items() <= result.items()
    new = result.keys() - base.keys()
    assert len(new) == 8
    assert {name for name in result if re.fullmatch(RESIDUAL_ADAPTER_WEIGHTS, name)} == new
    assert result["repeat/sub/feed_forward/adapter/down/linear/w"] == (2, 8, 4)


@pytest.mark.parametrize("name", ["row", "token"])
def test_adapters_of_tasks_equal_praxis(praxis, name):
    case = praxis(f"adapter_by_{name}")
    # The scale of Praxis' norm is stored minus 1, as here.
    layer = MultitaskResidualAdapter(input_dims=4, bottleneck_dims=3, num_tasks=3)
    result = layer.apply({"params": case["weights"]}, case["x"], case["tasks"])
    np.testing.assert_allclose(result, case["outputs"], rtol=1e-5, atol=1e-6)
    plain = layer.clone(add_residual=False)
    result = plain.apply({"params": case["weights"]}, case["x"], case["tasks"])
    np.testing.assert_allclose(result, case["outputs"] - case["x"], rtol=1e-4, atol=1e-5)


def test_adapters_of_tasks_change_nothing_at_first():
    layer = MultitaskResidualAdapter(input_dims=8, bottleneck_dims=3, num_tasks=2)
    tasks = np.array([1, 0], np.int32)
    np.testing.assert_array_equal(layer.apply(layer.init(KEY), X, tasks), X)
