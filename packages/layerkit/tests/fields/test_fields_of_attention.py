"""Every field of every attention layer changes something."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import layerkit.layers.attention as attention
from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.layers.attention.base_attention import (
    AttentionLayer,
    BaseAttention,
    HeadProjection,
    OutputProjection,
)
from layerkit.layers.attention.biases import Alibi, RelativeBias
from layerkit.layers.attention.combined_projection import CombinedProjection
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.attention.latent import MultiHeadLatentAttention
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.attention.transformer_xl import TransformerXLAttention
from layerkit.layers.basic.linears import Bias
from layerkit.layers.basic.normalizations import LayerNorm, RmsNorm
from layerkit.layers.basic.positions import PositionalEmbedding, RotaryPositionalEmbedding
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.layers.recurrent.mixer_parts import CausalConvolution
from layerkit.ops.attention.masks import AttentionMask, row_positions
from layerkit.testing import Change, Example, dead_fields, ignored_fields

BATCH, LENGTH, DIMS = 4, 8, 8
RANDOM = np.random.default_rng(0)
NUMBERS = jnp.asarray(RANDOM.normal(size=(BATCH, LENGTH, 64)), jnp.float32)
MEMORY = jnp.asarray(RANDOM.normal(size=(BATCH, LENGTH, 64)), jnp.float32)
POSITIONS = row_positions(BATCH, LENGTH)
SEGMENTS = jnp.asarray(RANDOM.integers(1, 3, (BATCH, LENGTH)), jnp.int32)
FP8 = Config(Fp8Dot)
ROTARY = Config(RotaryPositionalEmbedding)


def of(layer_class, fields, run, **changes):
    return Example(Config(layer_class, **fields), run, changes)


def in_heads(layer):
    return NUMBERS[..., None, : layer.head_dim] * jnp.ones((layer.num_heads, 1))


def whole_and_cached(layer):
    x = NUMBERS[..., : layer.input_dims]
    mask = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS)
    whole = layer(x, mask=mask, positions=POSITIONS)
    layer.init_cache(BATCH, LENGTH)
    step = layer.extend_step(x[:, :1], time_step=jnp.int32(0), positions=POSITIONS[:, :1])
    return whole, step


def reads_a_memory(layer):
    x = NUMBERS[..., : layer.input_dims]
    memory = MEMORY[..., : layer.memory_dims or layer.input_dims]
    mask = AttentionMask.cross_mask(BATCH, LENGTH, LENGTH, key_segments=SEGMENTS)
    whole = layer(x, memory=memory, mask=mask)
    layer.init_cache(memory)
    one = AttentionMask.cross_mask(BATCH, 1, LENGTH, key_segments=SEGMENTS)
    return whole, layer.extend_step(x[:, :1], mask=one)


EVERYWHERE = {
    "logit_scale": 0.7,
    "logit_cap": 3.0,
    # It scales weights after a training step that collects `step_maxima`.
    "qk_clip": Change(100.0, refusal="no weight would be scaled"),
    "dropout_rate": 0.5,
    "backend": Change("cudnn", refusal="cudnn"),
    "context_parallel": "ring",
    # The size of blocks has no effect on results.
    "kernel_blocks": Change((64, 24), refusal="powers of two"),
}
HEADS = {
    **EVERYWHERE,
    "sink_logit": 0.7,
    "num_kv_heads": 2,
    "dim_per_head": 4,
    "use_output_bias": True,
    "use_key_bias": Change(value=False, others={"use_bias": True}),
    "qk_norm_tpl": Config(LayerNorm),
    "qk_norm_over": Change("projection", others={"qk_norm_tpl": Config(RmsNorm)}),
}

SELF_ATTENTION = dict(
    rotary_tpl=ROTARY,
    qk_norm_before_rotary=Change(
        value=True, others={"qk_norm_tpl": Config(RmsNorm), "rotary_tpl": ROTARY}
    ),
    value_norm_tpl=Config(RmsNorm),
    output_gate_tpl=HeadProjection.HParams.config(),
    window=2,
    look_ahead=2,
    chunk=3,  # a window of 2 hides keys of the same chunk
    query_growth=0.5,
    query_growth_step=Change(2, others={"query_growth": 0.5}),
    relative_bias_tpl=Config(RelativeBias),
    qkv_tpl=Change(
        CombinedProjection.HParams.config(dtype="bfloat16"), others={"combined_qkv": True}
    ),
    kv_layer=Change(1, refusal="kv_layer"),
    cache_format="int8",
    qkv_conv_tpl=CausalConvolution.HParams.config(width=3),
    has_rolling_cache=Change(value=True, others={"window": 3}),
    **HEADS,
)

EXAMPLES = [
    of(
        MultiHeadAttention, {"input_dims": DIMS, "num_heads": 4}, whole_and_cached, **SELF_ATTENTION
    ),
    of(
        TransformerXLAttention,
        {"input_dims": DIMS, "num_heads": 4},
        whole_and_cached,
        position_tpl=PositionalEmbedding.HParams.config(max_timescale=100.0),
        **{
            **SELF_ATTENTION,
            "qk_clip": Change(100.0, refusal="no effect"),
            "context_parallel": Change("ring", refusal="no bias"),
        },
    ),
    of(
        CrossAttention,
        {"input_dims": DIMS, "num_heads": 4},
        reads_a_memory,
        memory_dims=16,
        # A memory may be all padding, for which a ring reads 0.
        **{**HEADS, "context_parallel": Change("ring", refusal="sees no key")},
    ),
    of(
        MultiHeadLatentAttention,
        {
            "input_dims": DIMS,
            "num_heads": 4,
            "latent_dims": 4,
            "plain_dim_per_head": 4,
            "rotary_dim_per_head": 2,
            "value_dim_per_head": 4,
        },
        whole_and_cached,
        query_latent_dims=4,
        rotary_tpl=RotaryPositionalEmbedding.HParams.config(max_timescale=100.0),
        bias_tpl=Change(Config(Bias, dtype="bfloat16"), others={"use_bias": True}),
        window=2,
        **EVERYWHERE,
    ),
    of(
        HeadProjection,
        {"input_dims": DIMS, "num_heads": 4, "head_dim": 4},
        lambda layer: layer(NUMBERS[..., : layer.input_dims]),
        dot_tpl=FP8,
    ),
    of(
        OutputProjection,
        {"output_dims": DIMS, "num_heads": 4, "head_dim": 4},
        lambda layer: layer(in_heads(layer)),
        dot_tpl=FP8,
    ),
    of(
        CombinedProjection,
        {"input_dims": DIMS, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4},
        lambda layer: layer(NUMBERS[..., : layer.input_dims]),
        dot_tpl=FP8,
    ),
    of(
        RelativeBias,
        {"num_heads": 4},
        lambda layer: layer(POSITIONS, POSITIONS),
        weight_init=WeightInit.Constant(1.0),
    ),
    of(Alibi, {"num_heads": 4}, lambda layer: layer(POSITIONS, POSITIONS)),
]


# They have the most fields after those of `MultiHeadAttention`.
SLOW = {TransformerXLAttention, MultiHeadLatentAttention}


def test_changing_a_field_has_an_effect(example, sharding):
    assert dead_fields(example, sharding=sharding) == []


@pytest.mark.slow
def test_ignored_field_raises(example, sharding):
    # Both add a bias to the projection out: one says so of itself, the other of all projections.
    states = ("use_bias=True", "use_key_bias=False")  # the second needs the first
    agreeing = {f"use_output_bias while {state}" for state in states}
    assert set(ignored_fields(example, sharding=sharding)) <= agreeing


def test_every_layer_has_an_example(layers_in):
    abstract = {AttentionLayer, BaseAttention}
    assert layers_in(attention) <= {example.layer_class for example in EXAMPLES} | abstract
