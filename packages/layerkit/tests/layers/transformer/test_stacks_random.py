"""Tests of random numbers of stacks: masks by layer and step, and droppath by depth."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import BaseLayer
from layerkit.config import sub_config_field
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.ops.attention.masks import AttentionMask, row_positions

BATCH, LENGTH = 3, 6
ROW = row_positions(BATCH, LENGTH)
CAUSAL = AttentionMask.causal_mask(BATCH, LENGTH)


def make(stack, **fields):
    sizes = {"input_dims": 8, "hidden_dims": 12, "num_heads": 4}
    return stack.HParams.config(**sizes, **fields).Instantiate()


class Noise(BaseLayer):
    """Adds a mask of zeros and twos; has the fields and arguments that a stack hands down."""

    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    dropout_tpl: Any = sub_config_field(Dropout.HParams, rate=0.5)

    def setup(self):
        self.create_child("dropout", self.dropout_tpl)

    def fprop(self, x, *, mask, positions):
        return x + self.dropout(jnp.ones_like(x))


class Rates(Noise):
    """Adds the droppath rate that it is given."""

    def fprop(self, x, *, mask, positions, droppath_rate=0.0):
        return x + droppath_rate


NOISE = Noise.HParams.config()


@pytest.mark.parametrize(
    ("stack", "fields"),
    [
        (StackedTransformer, {"layer_tpl": NOISE, "remat": "full"}),
        (StackedTransformerRepeated, {"layer_tpl": NOISE}),
        (StackedTransformerRepeated, {"layer_tpl": NOISE, "stacked_shape": (2, 2)}),
        (StackedTransformerRepeated, {"block_tpls": (NOISE, NOISE, NOISE), "remat": "full"}),
    ],
)
def test_layers_and_steps_have_different_masks(stack, fields):
    layer = make(stack, num_layers=4, train=True, **fields)
    zeros = jnp.zeros((BATCH, LENGTH, 256))

    @jax.jit
    def run(seed):
        rngs = {"random": jax.random.key(seed)}
        return layer.apply({}, zeros, mask=CAUSAL, positions=ROW, rngs=rngs)

    total = run(0)
    # Were the masks of two layers the same, there would be other numbers of zeros, twos, ….
    counts = [float(jnp.mean(total == 2.0 * hits)) for hits in range(5)]
    np.testing.assert_allclose(counts, np.array([1, 4, 6, 4, 1]) / 16, atol=0.04)
    np.testing.assert_array_equal(total, run(0))
    assert np.any(total != run(1))


RATES = Rates.HParams.config()


@pytest.mark.parametrize(
    ("stack", "fields"),
    [
        (StackedTransformer, {"layer_tpl": RATES}),
        (StackedTransformerRepeated, {"layer_tpl": RATES, "stacked_shape": (5, 1)}),
        (StackedTransformerRepeated, {"block_tpls": (RATES, RATES)}),
    ],
)
def test_droppath_grows_linearly_with_depth_in_training(stack, fields):
    layer = make(stack, num_layers=5, droppath_rate=0.5, **fields)

    def total(layer):
        return np.unique(
            layer.apply({}, jnp.zeros((BATCH, LENGTH, 8)), mask=CAUSAL, positions=ROW)
        ).item()

    np.testing.assert_allclose(total(layer.clone(train=True)), 0.1 + 0.2 + 0.3 + 0.4 + 0.5)
    assert total(layer) == 0.0
