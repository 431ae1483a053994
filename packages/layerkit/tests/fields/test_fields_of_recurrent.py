"""Tests that each field has an effect, for the layers with a state."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import layerkit.layers as L  # noqa: N812 - the index is read as one name, a layer a line
from layerkit.config import Config
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.testing import Change, Example, dead_fields, ignored_fields

DIMS = 8
NUMBERS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4, 16)), jnp.float32)
SIZES = {"input_dims": DIMS, "output_dims": DIMS}
BASES = {L.BaseRnnCell, L.TokenMixer}


def of(layer_class, fields, run, **changes):
    return Example(Config(layer_class, **fields), run, changes)


def step(cell):
    return cell(NUMBERS[:, 0, : cell.input_dims], cell.initial_state(4))


def mix(layer):
    return layer.mix(NUMBERS[..., : layer.input_dims])


EXAMPLES = [
    of(
        L.LstmCell,
        SIZES,
        step,
        hidden_dims=4,
        dot_tpl=Config(Fp8Dot),
        layer_norm_epsilon=Change(1e-3, others={"uses_layer_norm": True}),
    ),
    of(L.GruCell, SIZES, step, dot_tpl=Config(Fp8Dot)),
    of(L.Frnn, SIZES, mix, cell_tpl=Config(L.GruCell), remat="full"),
    of(
        L.StackedFrnn,
        SIZES,
        mix,
        dropout_rate=Change(0.25, others={"num_layers": 2}),
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.layer_class.__name__)
def test_changing_a_field_has_an_effect(example, sharding):
    assert dead_fields(example, sharding=sharding) == []


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.layer_class.__name__)
def test_ignored_field_raises(example, sharding):
    assert ignored_fields(example, sharding=sharding) == []


def test_every_layer_has_an_example(layers_in):
    here = {layer for layer in layers_in(L) if layer.__module__.split(".")[2] == "recurrent"}
    assert here - BASES <= {example.layer_class for example in EXAMPLES}
