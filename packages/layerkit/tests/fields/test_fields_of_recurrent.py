"""Tests that each field has an effect, for the layers with a state."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import layerkit.layers as L  # noqa: N812 - the index is read as one name, a layer a line
from layerkit.config import Config
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.ops.attention.masks import AttentionMask, row_positions
from layerkit.testing import Change, Example, dead_fields, ignored_fields

DIMS = 8
NUMBERS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4, 16)), jnp.float32)
SIZES = {"input_dims": DIMS, "output_dims": DIMS}
BASES = {L.BaseRnnCell, L.LinearAttention, L.StateSpace, L.TokenMixer}
STATES = {
    "input_dims": DIMS,
    "num_key_heads": 2,
    "num_value_heads": 4,
    "key_dim_per_head": 4,
    "value_dim_per_head": 4,
}
MAMBA2 = Config(L.Mamba2, **{name: size for name, size in STATES.items() if name != "input_dims"})
HEADS = {"num_heads": 4, "head_dim": 4}
OF_MIXERS = {
    "num_key_heads": 4,
    "gate_rank": 3,
    # The size of chunks has no effect on results.
    "tokens_per_chunk": Change(3, refusal="a power of two"),
    "down_tpl": Change(Config(L.Linear, dtype="bfloat16"), others={"gate_rank": 3}),
    "activation_tpl": Config(L.GELU),
    "norm_tpl": None,
}


def of(layer_class, fields, run, **changes):
    return Example(Config(layer_class, **fields), run, changes)


def step(cell):
    return cell(NUMBERS[:, 0, : cell.input_dims], cell.initial_state(4))


def mix(layer):
    return layer.mix(NUMBERS[..., : layer.input_dims])


def mix_rows(layer):
    x = NUMBERS[..., : layer.input_dims]
    mask = AttentionMask.causal_mask(4, 4, segment_ids=jnp.array([[1, 1, 2, 2]] * 4))
    return layer(x, mask=mask, positions=row_positions(4, 4))


def heads(layer):
    dims = layer.head_dim if hasattr(layer, "head_dim") else layer.dims
    return NUMBERS[:, :, None, :dims] * jnp.ones((layer.num_heads, 1))


EXAMPLES = [
    of(
        L.Mamba2,
        STATES,
        mix_rows,
        norm_groups=1,
        projection_multipliers=(1.0, 2.0, 1.0, 1.0, 1.0),
        **OF_MIXERS,
    ),
    of(L.ShortConvolution, {"input_dims": DIMS}, mix_rows),
    of(
        L.ParallelMixers,
        {"input_dims": DIMS, "num_heads": 2, "recurrent_tpl": MAMBA2},
        mix_rows,
        num_kv_heads=1,
        dim_per_head=2,
        recurrent_tpl=MAMBA2.clone(use_bias=True),
    ),
    of(L.GatedDeltaNet, STATES, mix_rows, **OF_MIXERS),
    of(L.KimiDeltaAttention, STATES, mix_rows, **OF_MIXERS),
    of(
        L.CausalConvolution,
        HEADS,
        lambda layer: layer(heads(layer), jnp.zeros((4, layer.width - 1, *heads(layer).shape[2:]))),
    ),
    of(
        L.TimeSteps,
        {"num_heads": 4},
        lambda layer: layer(NUMBERS[..., : layer.num_heads, None]),
        limits=(0.01, 0.05),
        initial_rates=(1.0, 2.0),
        initial_steps=(0.01, 0.02),
    ),
    of(
        L.GatedNorm,
        {"num_heads": 4, "dims": 4},
        lambda layer: layer(heads(layer), heads(layer) - 1),
        num_groups=2,
        activation_tpl=Config(L.Sigmoid),
    ),
    of(L.S4D, {"input_dims": DIMS, "num_states": 3}, mix_rows, step_size=0.2, poles="legs"),
    of(L.S5, {"input_dims": DIMS, "num_states": 3}, mix_rows, step_size=0.2, poles="lagt"),
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


# `GatedDeltaNet` has most of their fields.
SLOW = {L.ParallelMixers, L.Mamba2, L.KimiDeltaAttention}


def test_changing_a_field_has_an_effect(example, sharding):
    assert dead_fields(example, sharding=sharding) == []


@pytest.mark.slow
def test_ignored_field_raises(example, sharding):
    assert ignored_fields(example, sharding=sharding) == []


def test_every_layer_has_an_example(layers_in):
    here = {layer for layer in layers_in(L) if layer.__module__.split(".")[2] == "recurrent"}
    assert here - BASES <= {example.layer_class for example in EXAMPLES}
