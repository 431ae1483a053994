"""Prefix language models: bidirectional attention within inputs, causal attention for targets."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.decoding.beam_search import BeamSearch
from layerkit.decoding.loop import SampleDecoder
from layerkit.errors import ConfigError
from layerkit.layers.attention.latent import MultiHeadLatentAttention
from layerkit.layers.basic.embeddings import Embedding, FullSoftmax
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.models.language_model import LanguageModel

VOCAB = 17
NUM_STEPS = 4


def model_config(stack=StackedTransformerRepeated):
    config = LanguageModel.HParams.config(
        is_prefix_lm=True,
        decoder=SampleDecoder.HParams.config(temperature=0.0, max_decode_steps=NUM_STEPS),
    )
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=12, num_layers=2, num_heads=4)
    config.lm_tpl.stack_tpl = stack.HParams.config()
    config.lm_tpl.embedding_tpl = Embedding.HParams.config()
    config.lm_tpl.softmax_tpl = FullSoftmax.HParams.config()
    attention = config.lm_tpl.stack_tpl.layer_tpl.attention_tpl
    attention.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    return config


def latent_config():
    config = model_config()
    config.lm_tpl.stack_tpl.layer_tpl.attention_tpl = MultiHeadLatentAttention.HParams.config(
        latent_dims=6,
        rotary_dim_per_head=2,
        plain_dim_per_head=2,
        value_dim_per_head=2,
        rotary_tpl=RotaryPositionalEmbedding.HParams.config(),
    )
    return config


def random_variables(model):
    """Weights large enough for greedy continuations to wander."""
    random = np.random.default_rng(3)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda w: random.normal(0.0, 1.0, w.shape).astype(np.float32), shapes)


@partial(jax.jit, static_argnums=0)
def logits_of(model, variables, ids, **options):
    def ask(model, ids):
        return model.lm.logits(ids, **options)

    return model.apply(variables, ids, method=ask)


IDS = np.random.default_rng(1).integers(1, VOCAB, (2, 8), np.int32)


def test_empty_prefix_is_causal_and_full_prefix_is_an_encoder():
    config = model_config()
    model = config.Instantiate()
    variables = random_variables(model)
    everything = np.ones(IDS.shape, bool)
    np.testing.assert_array_equal(
        logits_of(model, variables, IDS, in_prefix=~everything), logits_of(model, variables, IDS)
    )
    config.lm_tpl.is_causal = False
    encoder = config.Instantiate()
    np.testing.assert_allclose(
        logits_of(model, variables, IDS, in_prefix=everything),
        logits_of(encoder, variables, IDS),
        atol=1e-5,
    )


def test_packed_documents_have_separate_prefixes():
    model = model_config().Instantiate()
    variables = random_variables(model)
    sizes, given = (5, 3), (3, 1)
    first, second = IDS[0, :5], IDS[0, 5:]
    in_prefix = np.concatenate([np.arange(n) < g for n, g in zip(sizes, given, strict=True)])
    packed = logits_of(
        model,
        variables,
        IDS[:1],
        segment_ids=np.repeat([1, 2], sizes)[None],
        segment_pos=np.concatenate([np.arange(n) for n in sizes])[None],
        in_prefix=in_prefix[None],
    )
    apart = [
        logits_of(model, variables, ids[None], in_prefix=(np.arange(len(ids)) < g)[None])[0]
        for ids, g in ((first, given[0]), (second, given[1]))
    ]
    np.testing.assert_allclose(packed[0], np.concatenate(apart), atol=1e-5)


def test_inputs_indicator_marks_the_prefix(raises):
    model = model_config().Instantiate()
    variables = random_variables(model)
    batch = NestedMap(ids=IDS, labels=np.roll(IDS, -1, 1), weights=np.ones(IDS.shape, np.float32))
    with raises(KeyError, value="inputs_indicator", choices=("ids", "labels", "weights")):
        model.apply(variables, batch)
    indicator = (np.arange(8) < 5).astype(np.int32) * np.ones((2, 1), np.int32)
    metrics, _ = jax.jit(model.apply)(variables, NestedMap(batch, inputs_indicator=indicator))
    logits = logits_of(model, variables, IDS, in_prefix=indicator != 0)
    log_probs = np.take_along_axis(jax.nn.log_softmax(logits), batch.labels[..., None], -1)
    np.testing.assert_allclose(metrics["xent"].value, -log_probs.mean(), rtol=1e-5)


def test_prefix_of_a_bidirectional_model_raises(raises):
    config = model_config()
    config.lm_tpl.is_causal = False
    model = config.Instantiate()
    with raises(ConfigError, field="is_causal", value=False):
        logits_of(model, random_variables(model), IDS, in_prefix=np.ones(IDS.shape, bool))


PROMPTS = np.array([[3, 1, 4, 1], [2, 9, 9, 9], [5, 6, 9, 9], [0, 0, 0, 0]], np.int32)
LENGTHS = np.array([4, 1, 2, 0], np.int32)
BATCH = NestedMap(ids=PROMPTS, prompt_lengths=LENGTHS)


@partial(jax.jit, static_argnums=0)
def decode(model, variables, key):
    return model.apply(variables, BATCH, method="decode", rngs={"random": key})


def greedy_by_asking(model, variables):
    """Runs the whole model on the whole rows for each token."""
    columns = np.arange(PROMPTS.shape[1] + NUM_STEPS)
    ids = np.where(columns < LENGTHS[:, None], np.pad(PROMPTS, ((0, 0), (0, NUM_STEPS))), 0)
    is_drawn = (columns >= LENGTHS[:, None]) & (columns < LENGTHS[:, None] + NUM_STEPS)
    is_drawn &= LENGTHS[:, None] > 0
    in_prefix = columns < LENGTHS[:, None]
    log_probs = np.zeros(ids.shape, np.float32)
    for column in columns[1:]:
        logits = logits_of(model, variables, ids, in_prefix=in_prefix)
        best = np.argmax(logits[:, column - 1], axis=-1)
        ids[:, column] = np.where(is_drawn[:, column], best, ids[:, column])
        log_prob = np.max(jax.nn.log_softmax(logits[:, column - 1]), axis=-1)
        log_probs[:, column] = np.where(is_drawn[:, column], log_prob, 0.0)
    return ids, log_probs


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(model_config(StackedTransformer), id="row", marks=pytest.mark.slow),
        pytest.param(model_config(), id="loop"),
        pytest.param(latent_config(), id="latent", marks=pytest.mark.slow),
    ],
)
def test_cached_prompt_of_any_length_attends_in_both_directions(config):
    model = config.Instantiate()
    variables = random_variables(model)
    expected, asked_log_probs = greedy_by_asking(model, variables)
    outputs = decode(model, variables, jax.random.key(0))
    np.testing.assert_array_equal(outputs.ids, expected)
    np.testing.assert_allclose(outputs.log_probs, asked_log_probs, rtol=1e-4, atol=1e-4)
    config.is_prefix_lm = False
    causal = decode(config.Instantiate(), variables, jax.random.key(0))
    assert not np.allclose(causal.scores, outputs.scores)  # or the prefix would be nothing


@pytest.mark.parametrize(
    "decoder",
    [
        pytest.param(
            BeamSearch.HParams.config(beam_size=3, num_results=3, max_decode_steps=NUM_STEPS),
            id="beams",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SampleDecoder.HParams.config(num_samples=3, max_decode_steps=NUM_STEPS), id="samples"
        ),
    ],
)
def test_several_continuations_have_separate_prefixes(decoder):
    config = model_config()
    config.decoder = decoder
    model = config.Instantiate()
    variables = random_variables(model)
    result = decode(model, variables, jax.random.key(2)).candidates
    columns = np.arange(PROMPTS.shape[1] + NUM_STEPS)
    for sample in range(3):
        ids = np.asarray(result.ids[:, sample])
        in_prefix = columns < LENGTHS[:, None]
        logits = logits_of(model, variables, ids, in_prefix=in_prefix)
        table = np.asarray(jax.nn.log_softmax(logits))[:, :-1]
        asked = np.take_along_axis(table, ids[:, 1:, None], axis=-1)[..., 0]
        chosen = (columns[1:] >= LENGTHS[:, None]) & (
            columns[1:] < np.asarray(result.lengths)[:, sample, None]
        )
        np.testing.assert_allclose(
            result.log_probs[:, sample, 1:], np.where(chosen, asked, 0.0), rtol=1e-4, atol=1e-4
        )
