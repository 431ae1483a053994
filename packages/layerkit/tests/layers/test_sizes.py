"""What layers say about wrong sizes, in full."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from layerkit.layers.linears import Bias, FeedForward, Linear
from layerkit.layers.normalizations import LayerNorm, RmsNorm

KEY = jax.random.key(0)


def refusal(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Linear(output_dims=3), "Linear(): input_dims=0, expected at least 1"),
        (Linear(input_dims=3), "Linear(): output_dims=0, expected at least 1"),
        (Bias(dims=-2), "Bias(): dims=-2, expected at least 1"),
        (RmsNorm(), "RmsNorm(): dims=0, expected at least 1"),
        (LayerNorm(), "LayerNorm(): dims=0, expected at least 1"),
        (FeedForward(output_dims=3), "Linear(linear): input_dims=0, expected at least 1"),
    ],
)
def test_a_size_below_one_is_refused_in_setup(layer, text):
    assert refusal(lambda: layer.init(KEY)) == text


@pytest.mark.parametrize(
    ("layer", "owner", "field"),
    [
        (Linear(input_dims=4, output_dims=3), "Linear()", "input_dims"),
        (Bias(dims=4), "Bias()", "dims"),
        (RmsNorm(dims=4), "RmsNorm()", "dims"),
        (LayerNorm(dims=4), "LayerNorm()", "dims"),
        (FeedForward(input_dims=4, output_dims=3), "Linear(linear)", "input_dims"),
    ],
)
@pytest.mark.parametrize("shape", [(2, 3), (2, 1), (4, 2), ()])
def test_inputs_of_another_size_are_refused(layer, owner, field, shape):
    text = refusal(lambda: layer.apply(layer.init(KEY), np.zeros(shape, np.float32)))
    assert text == (
        f"{owner}: {field}=4, but the inputs have the shape {shape};"
        " their last axis must be of that size"
    )
