"""A mixer of a user in the place of attention: packed rows, cached steps, decoding, beams."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import CACHE, WeightHParams
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import BeamSearch, SampleDecoder, SpeculativeDecoder
from layerkit.errors import ConfigError
from layerkit.layers import (
    CausalConvolution,
    MultiHeadAttention,
    MultiTokenPrediction,
    StackedTransformer,
    StackedTransformerRepeated,
    Transformer,
)
from layerkit.layers.recurrent.token_mixer import TokenMixer
from layerkit.models.language_model import LanguageModel
from layerkit.ops.attention.masks import AttentionMask, row_positions

VOCAB, STEPS = 11, 5
PROMPTS = np.random.default_rng(0).integers(1, VOCAB, (4, 6))
LENGTHS = np.array([6, 2, 1, 4])


class MovingAverage(TokenMixer):
    """s_t = 0.8·s_{t-1} + 0.2·x_t·w for each coordinate, token by token."""

    state_axes: ClassVar = {"average": ("batch", "act_embed")}

    def setup(self):
        self.create_variable("w", WeightHParams((self.input_dims,), ("norm",)))

    def initial_state(self, batch_size):
        return {"average": jnp.zeros((batch_size, self.input_dims), jnp.float32)}

    def mix(self, x, state, *, segments):
        average, last, outputs = state["average"], None, []
        for token in range(x.shape[1]):
            new = x[:, token] * self.theta.w
            if segments is None:
                average = 0.8 * average + 0.2 * new
            else:
                now = segments[:, token, None]
                last = now if last is None else last
                kept = jnp.where((now == last) | (now == 0), average, 0.0)
                average = jnp.where(now == 0, kept, 0.8 * kept + 0.2 * new)
                last = jnp.where(now == 0, last, now)
            outputs.append(average)
        return jnp.stack(outputs, axis=1), {"average": average}


def hybrid(**fields):
    """Return a language model that repeats a layer with a mixer, and attention with states."""
    config = LanguageModel.HParams.config(**fields)
    conv = CausalConvolution.HParams.config(width=3)
    attention = MultiHeadAttention.HParams.config(
        window=3, has_rolling_cache=True, qkv_conv_tpl=conv
    )
    mixing = Transformer.HParams.config(attention_tpl=MovingAverage.HParams.config())
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=16, num_layers=4, num_heads=2)
    config.lm_tpl.stack_tpl = StackedTransformerRepeated.HParams.config(
        block_tpls=(mixing, Transformer.HParams.config(attention_tpl=attention))
    )
    return config


def draw_weights(config):
    model = config.Instantiate()
    params = jax.eval_shape(model.init, jax.random.key(0))["params"]
    random = np.random.default_rng(1)
    return model, jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.5, x.shape)), params)


@pytest.mark.parametrize(
    "decoder",
    [
        pytest.param(
            SampleDecoder(max_decode_steps=STEPS, temperature=0.0),
            marks=pytest.mark.slow,
            id="greedy",
        ),
        pytest.param(BeamSearch(max_decode_steps=STEPS, beam_size=3), id="beams"),
    ],
)
def test_log_probs_of_decoded_rows_of_unequal_lengths_are_those_of_whole_rows(decoder):
    model, params = draw_weights(hybrid(decoder=decoder))
    batch = NestedMap(ids=PROMPTS, prompt_lengths=LENGTHS)
    outputs = jax.jit(lambda p: model.apply({"params": p}, batch, method="decode"))(params)
    whole = jax.jit(lambda p, ids: model.bind({"params": p}).lm.logits(ids))(params, outputs.ids)
    log_probs = jax.nn.log_softmax(whole)[:, :-1]
    chosen = np.take_along_axis(np.asarray(log_probs), outputs.ids[:, 1:, None], axis=-1)[..., 0]
    columns = np.arange(1, outputs.ids.shape[1])
    drawn = (columns >= LENGTHS[:, None]) & (columns < LENGTHS[:, None] + STEPS)
    np.testing.assert_allclose(
        outputs.log_probs[:, 1:], np.where(drawn, chosen, 0), atol=1e-5, rtol=1e-5
    )
    if isinstance(decoder, SampleDecoder):
        assert np.all((chosen == np.max(log_probs, axis=-1)) | ~drawn)


def test_packed_rows_of_a_hybrid_equal_separate_rows():
    model, params = draw_weights(hybrid())
    logits = jax.jit(
        lambda ids, **packing: model.bind({"params": params}).lm.logits(ids, **packing)
    )
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0]])
    positions = jnp.asarray([[0, 1, 0, 1, 2, 0]])
    packed = logits(PROMPTS[:1], segment_ids=segments, segment_pos=positions)
    for part in (slice(0, 2), slice(2, 5)):
        alone = logits(PROMPTS[:1, part])
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-6)


def test_speculative_decoding_with_a_state_is_refused(raises):
    config = hybrid(decoder=SpeculativeDecoder(max_decode_steps=STEPS))
    config.lm_tpl.mtp_tpl = MultiTokenPrediction.HParams.config()
    model, params = draw_weights(config)
    batch = NestedMap(ids=PROMPTS, prompt_lengths=LENGTHS)
    with raises(ConfigError, field="decoder", value="SpeculativeDecoder"):
        model.apply({"params": params}, batch, method="decode")


def test_mixer_rejects_masks_and_prefixes_with_later_tokens(raises):
    layer = MovingAverage(input_dims=4)
    variables = layer.init(jax.random.key(0))
    _, state = layer.apply(variables, 2, 3, method="init_cache", mutable=[CACHE])
    x, positions = jnp.ones((2, 3, 4)), row_positions(2, 3)
    with raises(ConfigError, field="mask"):
        layer.apply(variables, x, mask=AttentionMask.bidirectional_mask(2, 3), positions=positions)
    with raises(ConfigError, field="query_ends"):
        layer.apply(
            {**variables, **state},
            x,
            time_step=jnp.int32(0),
            positions=positions,
            query_ends=jnp.ones((2, 1), jnp.int32),
            method="extend_step",
        )


def test_layers_of_one_branch_equal_a_layer_of_both():
    """A layer with a mixer alone and one with a feed-forward alone, as in Nemotron-H."""
    mixer = MovingAverage.HParams.config()
    both, params = draw_weights(StackedTransformer.HParams.config(
        input_dims=8, hidden_dims=16, num_layers=1,
        layer_tpl=Transformer.HParams.config(attention_tpl=mixer),
    ))  # fmt: skip
    layers = (
        Transformer.HParams.config(attention_tpl=mixer, feed_forward_tpl=None),
        Transformer.HParams.config(attention_tpl=None),
    )
    apart = StackedTransformer(input_dims=8, hidden_dims=16, num_layers=2, block_tpls=layers)
    branches = params["layers_0"]
    split = {
        f"layers_{index}": {name: branches[name] for name in branches if name.startswith(branch)}
        for index, branch in enumerate(("attention", "feed_forward"))
    }
    x = jax.random.normal(jax.random.key(2), (2, 5, 8))
    inputs = {"mask": AttentionMask.causal_mask(2, 5), "positions": row_positions(2, 5)}
    expected = jax.jit(lambda params: both.apply({"params": params}, x, **inputs))(params)

    @jax.jit
    def run(params):
        variables = {"params": params}
        _, cache = apart.apply(variables, 2, 5, method="init_cache", mutable=[CACHE])
        more = {"time_step": jnp.int32(0), "positions": inputs["positions"], "mutable": [CACHE]}
        cached, _ = apart.apply({**variables, **cache}, x, method="extend_step", **more)
        return apart.apply(variables, x, **inputs), cached

    for result in run(split):
        np.testing.assert_allclose(result, expected, atol=1e-6)
