"""Continuations that share their prompts equal those with copies of the cache, in less memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.sharding import BoundSharding
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import BeamSearch, SampleDecoder, SpeculativeDecoder
from layerkit.errors import ConfigError
from layerkit.layers import (
    Frnn,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    RelativeBias,
    RotaryPositionalEmbedding,
    StackedTransformer,
    StackedTransformerRepeated,
    Transformer,
)
from layerkit.layers.attention.transformer_xl import TransformerXLAttention
from layerkit.layers.recurrent.mixer_parts import CausalConvolution
from layerkit.models import LanguageModel, SequenceModel, TransformerEncoderDecoder
from layerkit.ops.attention.dot_product import AttentionOptions, xla_attention
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.rotary_scaling import LongRopeScaling

KEY = jax.random.key(0)
VOCAB, WIDTH, STEPS, SAMPLES = 16, 6, 4, 3
LENGTHS = np.array([6, 1, 3, 0, 5, 2, 6, 4], np.int32)
ROTARY = RotaryPositionalEmbedding.HParams.config()
LONG_ROPE = RotaryPositionalEmbedding.HParams.config(scaling=LongRopeScaling((1.0,), (2.0,), 4, 8))
XL = TransformerXLAttention.HParams.config()
SAMPLING = SampleDecoder(max_decode_steps=STEPS, num_samples=SAMPLES, top_p=0.9)
BEAMS = BeamSearch(max_decode_steps=STEPS, beam_size=SAMPLES, num_results=2, eos_id=5)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def attention(base=MultiHeadAttention, **fields):
    config = base.HParams.config(rotary_tpl=ROTARY)
    return config.set(**fields)


def layer(mixer=None):
    return Transformer.HParams.config(attention_tpl=mixer or attention())


def make(*, unroll=1, repeated=True, stack=None, layers=2, tpl=None, lm=None, **fields):
    template = (StackedTransformerRepeated if repeated else StackedTransformer).HParams.config()
    template.set(**({"unroll": unroll} if repeated else {}) | (stack or {}))
    if template.block_tpls is None:
        template.layer_tpl.attention_tpl = attention(**fields) if tpl is None else tpl
    config = LanguageModel.HParams.config(**(lm or {}))
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=12, num_layers=layers)
    config.lm_tpl.set(num_heads=4, stack_tpl=template)
    return config.Instantiate()


LATENT = MultiHeadLatentAttention.HParams.config(
    latent_dims=4, plain_dim_per_head=2, rotary_dim_per_head=2, value_dim_per_head=3
)
BIAS = RelativeBias.HParams.config(num_buckets=8, max_distance=8)
MODELS = {
    "one_layer": lambda: make(repeated=False, layers=1, num_kv_heads=1),
    "scanned": lambda: make(num_kv_heads=2),
    "unrolled": lambda: make(unroll=None),
    "window": lambda: make(window=3, sink_logit=0.5, logit_cap=3.0),
    "growth": lambda: make(query_growth=1.0, query_growth_step=2),
    "chunk": lambda: make(chunk=4, num_kv_heads=2),
    "bias": lambda: make(stack={"relative_bias_tpl": BIAS}, relative_bias_tpl=BIAS),
    "conv": lambda: make(qkv_conv_tpl=CausalConvolution.HParams.config(width=3)),
    "latent": lambda: make(tpl=LATENT),
    "latent_with_bias": lambda: make(
        tpl=LATENT.clone().set(up_tpl=LATENT.up_tpl.clone().set(use_bias=True))
    ),
    "prefix": lambda: make(lm={"is_prefix_lm": True}),
    "kv_layer": lambda: make(layers=3, stack={"first_tpls": (layer(),)}, kv_layer=1),
    "mixer": lambda: make(stack={"block_tpls": (layer(), layer(Frnn.HParams.config()))}),
}


def random_weights(model):
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(model.init, KEY)
    return jax.tree.map(lambda x: random.normal(0.0, 0.6, x.shape).astype(np.float32), shapes)


def prompts(rows=8, width=WIDTH):
    ids = np.random.default_rng(5).integers(1, VOCAB, (rows, width)).astype(np.int32)
    return NestedMap(ids=ids, prompt_lengths=np.minimum(LENGTHS[:rows], width))


def decode_of(model, decoder, *, lazy):
    decoder = dataclasses.replace(decoder, lazy_prefix_broadcast=lazy)
    model = model.clone(decoder=decoder)
    return lambda variables, batch: model.apply(
        variables, batch, method="decode", rngs={"random": jax.random.key(3)}
    )


def check(model, decoder, *, sharding=None):
    variables = random_weights(model)
    expected = jax.jit(decode_of(model, decoder, lazy=False))(variables, prompts())
    model = model.clone(sharding=sharding)
    outputs = jax.jit(decode_of(model, decoder, lazy=True))(variables, prompts())
    for name, value in expected.candidates.items():
        np.testing.assert_allclose(
            outputs.candidates[name], value, rtol=1e-5, atol=1e-5, err_msg=name
        )
    assert len(np.unique(expected.candidates.ids)) > 5


CASES = [(name, decoder) for name in MODELS for decoder in (SAMPLING, BEAMS)]


@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        pytest.param(
            *case,
            marks=[pytest.mark.slow] * (case != ("one_layer", BEAMS)),
            id=f"{case[0]}-{type(case[1]).__name__}",
        )
        for case in CASES
    ],
)
def test_continuations_that_share_prompts_equal_those_with_copies(name, decoder):
    check(MODELS[name](), decoder)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [SAMPLING, BEAMS], ids=["samples", "beams"])
def test_shared_prompts_on_a_mesh_equal_copies_on_one_device(decoder):
    devices = np.reshape(jax.devices()[:4], (2, 2))
    check(MODELS["scanned"](), decoder, sharding=BoundSharding(Mesh(devices, ("data", "tensor"))))


@pytest.mark.slow
def test_shared_prompts_may_be_split_by_position():
    devices = np.reshape(jax.devices()[:4], (2, 2))
    check(MODELS["scanned"](), BEAMS, sharding=BoundSharding(Mesh(devices, ("data", "context"))))


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [SampleDecoder(num_samples=8), BeamSearch(beam_size=8)])
@pytest.mark.parametrize(("lazy", "slots"), [(True, 1024 + 64 + 8 * 64), (False, 8 * (1024 + 64))])
def test_loop_over_tokens_holds_each_prompt_once(decoder, lazy, slots):
    model, decoder = make(), dataclasses.replace(decoder, max_decode_steps=64)
    shapes, rows = jax.eval_shape(model.init, KEY), 2
    run = decode_of(model, decoder, lazy=lazy)
    jaxpr = jax.make_jaxpr(run)(shapes, prompts(rows=rows, width=1024))
    (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "while"]
    caches = [x.aval for x in loop.invars if len(x.aval.shape) == 5]  # layers, rows, heads, …
    held = sum(x.size * x.dtype.itemsize for x in caches if x.shape[-1] == 2)
    assert held == 2 * rows * slots * 8 * 4 * 2  # layers, rows, slots, dims, bytes, keys and values


@pytest.mark.parametrize(
    ("fields", "decoder", "message"),
    [
        ({"cache_format": "int8"}, SAMPLING, "cache_format='int8'.*lazy_prefix_broadcast"),
        slow(
            {"window": 3, "has_rolling_cache": True}, SAMPLING, "attention that caches all tokens"
        ),
        slow({"look_ahead": 3}, SAMPLING, "look_ahead=3.*lazy_prefix_broadcast=True"),
        slow({"tpl": XL}, BEAMS, "class='TransformerXLAttention'"),
        slow({"rotary_tpl": LONG_ROPE}, SAMPLING, "LongRopeScaling.*lazy_prefix_broadcast=True"),
    ],
)
def test_unsupported_networks_name_their_field(fields, decoder, message):
    model = make(**fields)
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(
            decode_of(model, decoder, lazy=True), jax.eval_shape(model.init, KEY), prompts()
        )


@pytest.mark.slow
def test_encoder_may_override_attend():
    network = TransformerEncoderDecoder.HParams.config(vocab_size=VOCAB, model_dims=8, num_heads=2)
    network.set(hidden_dims=12, num_encoder_layers=1, num_decoder_layers=1)
    network.encoder_stack_tpl.layer_tpl.attention_tpl = XL
    model = SequenceModel.HParams.config(model_tpl=network, start_id=2).Instantiate()
    batch = NestedMap(src=NestedMap(ids=prompts().ids))
    run = decode_of(model, SAMPLING, lazy=True)
    outputs = jax.eval_shape(run, jax.eval_shape(model.init, KEY), batch)
    assert outputs.candidates.ids.shape == (8, SAMPLES, 1 + STEPS)


def test_drafts_are_unsupported():
    with pytest.raises(ConfigError, match="SpeculativeDecoder.*lazy_prefix_broadcast=True"):
        SpeculativeDecoder(lazy_prefix_broadcast=True)


def test_attention_to_shared_keys_is_one_softmax_over_both_sets():
    random = np.random.default_rng(0)
    samples, rows, heads, kv_heads, dims = 3, 6, 4, 2, 5

    def draw(*shape):
        return random.normal(size=shape).astype(np.float32)

    query, bias = draw(rows, 1, heads, dims), draw(1, heads, 1, 11)
    shared, own = (
        (draw(n, keys, kv_heads, dims), draw(n, keys, kv_heads, dims))
        for n, keys in ((2, 7), (rows, 4))
    )
    mask = AttentionMask.sample_mask(rows, 7, 4, time_step=np.int32(5))
    fields = {"mask": mask, "bias": bias, "sinks": draw(heads), "logit_cap": 2.0}

    @functools.partial(jax.jit, static_argnames="is_shared")
    def attend(keys, prompts, *, is_shared):
        options = AttentionOptions(**fields, prompts=prompts if is_shared else None)
        return xla_attention(query, *keys, options)

    outputs = attend(own, shared, is_shared=True)
    whole = tuple(
        np.concatenate([np.repeat(a, samples, axis=0), b], axis=1)
        for a, b in zip(shared, own, strict=True)
    )
    np.testing.assert_allclose(outputs, attend(whole, None, is_shared=False), rtol=1e-5, atol=1e-6)
    # Slot 1 has the token at position 5, slot 2 that at 2, and the prompt those before and after.
    positions = np.asarray(mask.key_positions)[0]
    np.testing.assert_array_equal(positions[7:], [4, 5, 2, 3])
    seen = positions[np.asarray(mask.dense())[0, 0, 0]]
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]
