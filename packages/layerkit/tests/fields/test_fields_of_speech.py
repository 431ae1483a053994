"""Every field of the layers of speech has an effect."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import layerkit.layers as L  # noqa: N812 - the index is read as one name, a layer a line
from layerkit.config import Config
from layerkit.layers import speech
from layerkit.ops.attention.masks import AttentionMask, row_positions
from layerkit.testing import Change, Example, dead_fields, ignored_fields

BATCH, LENGTH, DIMS = 4, 8, 8
NUMBERS = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, LENGTH, 16)), jnp.float32)
SEGMENTS = (jnp.arange(LENGTH) < jnp.array([8, 5, 2, 1])[:, None]).astype(jnp.int32)
WAVEFORM = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, 1600)), jnp.float32)
LOWER = Config(L.FeedForward, dtype="bfloat16", activation_tpl=Config(L.Identity))
NARROW = Config(L.TransformerFeedForward, dtype="bfloat16", has_bias=True)


def of(layer_class, fields, run, **changes):
    return Example(Config(layer_class, **fields), run, changes)


def convolve(layer):
    x = NUMBERS[..., : layer.input_dims]
    layer.init_cache(BATCH, LENGTH)
    return layer(x, is_token=SEGMENTS != 0), layer.extend_step(x[:, :1])


def whole_and_cached(layer):
    x = NUMBERS[..., : layer.input_dims]
    positions = row_positions(BATCH, LENGTH)
    cross = layer.cross_attention_tpl is not None and not layer.allow_skip_cross_attention
    memory = {}
    if cross:
        mask = AttentionMask.cross_mask(BATCH, LENGTH, LENGTH, key_segments=SEGMENTS)
        memory = {"memory": x, "memory_mask": mask}
    mask = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS)
    whole = layer(x, mask=mask, positions=positions, **memory)
    if cross or layer.layer_input_tpl is not None:
        return whole
    layer.init_cache(BATCH, LENGTH)
    return whole, layer.extend_step(x[:, :1], time_step=jnp.int32(0), positions=positions[:, :1])


def encode(layer):
    features = jnp.tile(NUMBERS, (1, 1, 2))[..., : layer.num_bins]
    return layer(features, paddings=1.0 - SEGMENTS).encoded


def augment(layer):
    return layer(NUMBERS, paddings=1.0 - SEGMENTS)


WIDE = {"input_dims": DIMS, "hidden_dims": 8, "num_heads": 4}
ENCODER = {"num_bins": 8, "num_channels": 4, "model_dims": DIMS, "hidden_dims": 8, "num_heads": 4}

EXAMPLES = [
    of(
        L.LogMel,
        {"frame_length": 200, "hop_length": 80, "fft_length": 256, "num_bins": 8},
        lambda layer: layer(WAVEFORM, lengths=jnp.array([1600, 800, 700, 400])),
        frame_length=160,
        high_frequency=3000.0,
        mel_scale="slaney",
        window="povey",
        normalization="utterance",
        num_samples=3200,
        low_frequency=50.0,
    ),
    of(
        L.SpectrumAugmenter,
        {"time_mask_max_ratio": 0.5},
        augment,
        time_mask_max_frames=2,
        freq_mask_max_bins=4,
    ),
    of(
        L.LightConv1D,
        {"input_dims": DIMS, "kernel_size": 3},
        convolve,
        linear_tpl=LOWER,
        up_tpl=LOWER,
        norm_tpl=Config(L.LayerNorm),
        activation_tpl=Config(L.Tanh),
    ),
    of(
        L.Conformer,
        WIDE,
        whole_and_cached,
        num_kv_heads=2,
        dim_per_head=4,
        norm_policy="post",
        parallel_shares_norm=Change(value=True, others={"parallel": True}),
        cross_attention_tpl=Config(L.CrossAttention),
        allow_skip_cross_attention=Change(
            value=True, others={"cross_attention_tpl": Config(L.CrossAttention)}
        ),
        feed_forward_tpl=NARROW,
        feed_forward_start_tpl=NARROW,
        feed_forward_norm_tpl=Config(L.RmsNorm),
        final_norm_tpl=Config(L.RmsNorm),
        layer_input_tpl=Change(Config(L.GatedInput, dims=4), refusal="layer_input"),
        droppath_rate=0.5,
    ),
    of(
        L.SpeechTransformerEncoder,
        {name: size for name, size in ENCODER.items() if name != "num_channels"},
        encode,
        num_bins=16,
        activation_tpl=Config(L.Tanh),
        position_tpl=Config(L.TrainablePositionalEmbedding, max_length=LENGTH),
    ),
    of(L.ConformerEncoder, ENCODER, encode, num_bins=16, activation_tpl=Config(L.Tanh)),
]


SLOW = {L.Conformer, L.ConformerEncoder, L.SpeechTransformerEncoder}


def test_changing_a_field_has_an_effect(example, sharding):
    assert dead_fields(example, sharding=sharding) == []


@pytest.mark.slow
def test_ignored_field_raises(example, sharding):
    # Masks of frames are bounded by the smaller of both limits, and noise needs training.
    assert ignored_fields(example, sharding=sharding) == []


def test_every_layer_has_an_example(layers_in):
    assert layers_in(speech) <= {example.layer_class for example in EXAMPLES}
