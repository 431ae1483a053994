"""Tests of the checks of sizes and input shapes by layers."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit.layers.attention.base_attention import HeadProjection
from layerkit.layers.basic.linears import Bias, FeedForward, Linear
from layerkit.layers.basic.normalizations import LayerNorm, RmsNorm

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("layer", "owner", "field", "value"),
    [
        (Bias(dims=-2), "Bias()", "dims", -2),
        (FeedForward(output_dims=3), "Linear(linear)", "input_dims", 0),
        (HeadProjection(input_dims=8, num_heads=2), "HeadProjection()", "head_dim", 0),
    ],
)
def test_init_raises_unless_sizes_are_positive(raises, layer, owner, field, value):
    with raises(ConfigError, owner=owner, field=field, value=value):
        layer.init(KEY)


@pytest.mark.parametrize(
    ("layer", "owner"),
    [
        (Linear(input_dims=4, output_dims=3), "Linear()"),
        (Bias(dims=4), "Bias()"),
        (RmsNorm(dims=4), "RmsNorm()"),
        (LayerNorm(dims=4), "LayerNorm()"),
        (FeedForward(input_dims=4, output_dims=3), "Linear(linear)"),
    ],
)
def test_apply_raises_for_inputs_of_another_size(raises, layer, owner):
    variables = layer.init(KEY)
    with raises(ConfigError, owner=owner, field="shape of inputs", value=[2, 1]):
        layer.apply(variables, np.zeros((2, 1), np.float32))
