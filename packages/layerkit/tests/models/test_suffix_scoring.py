"""Scores of suffixes equal those that cached decoding gives the same tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.decoding.loop import SampleDecoder
from layerkit.errors import ConfigError
from layerkit.layers.basic.embeddings import Embedding, FullSoftmax
from layerkit.layers.basic.positions import PositionalEmbedding
from layerkit.models.language_model import LanguageModel

VOCAB, STEPS = 11, 5
# The last row is padding.
PROMPTS = np.array([[3, 1, 4, 1], [2, 9, 9, 9], [5, 6, 9, 9], [0, 0, 0, 0]], np.int32)
LENGTHS = np.array([4, 1, 2, 0], np.int32)
BATCH = NestedMap(ids=PROMPTS, prompt_lengths=LENGTHS)


def make(**fields):
    decoder = SampleDecoder.HParams.config(temperature=0.0, max_decode_steps=STEPS)
    config = LanguageModel.HParams.config(decoder=decoder, **fields)
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=12, num_layers=2, num_heads=2)
    config.lm_tpl.set(
        position_tpl=PositionalEmbedding.HParams.config(),
        embedding_tpl=Embedding.HParams.config(),
        softmax_tpl=FullSoftmax.HParams.config(),
    )
    model = config.Instantiate()
    random = np.random.default_rng(4)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, jax.tree.map(lambda x: random.normal(0, 0.5, x.shape).astype(x.dtype), shapes)


def decode(model, variables, batch, **rngs):
    return model.apply(variables, batch, method="decode", rngs=rngs)


@pytest.mark.parametrize("is_prefix_lm", [False, True])
def test_scores_of_what_would_be_decoded_next_are_its_log_probs(is_prefix_lm):
    model, variables = make(is_prefix_lm=is_prefix_lm)
    whole = decode(model, variables, BATCH)
    drawn = 2
    columns = LENGTHS[:, None] + drawn + np.arange(STEPS - drawn)
    following = np.take_along_axis(np.asarray(whole.ids), columns, axis=1)
    batch = BATCH | {
        "max_steps": np.full(4, drawn),
        # The second suffix is the first token of the first one; the rest of it is padding.
        "suffixes": np.stack([following, np.where(np.arange(3) < 1, following, 7)], axis=1),
        "suffix_lengths": np.array([[3, 1]] * 4, np.int32),
    }
    found = decode(model, variables, batch)
    np.testing.assert_array_equal(found.lengths, [6, 3, 4, 0])
    expected = np.take_along_axis(np.asarray(whole.log_probs), columns, axis=1)
    expected[3] = 0  # the row of padding
    np.testing.assert_allclose(found.suffix_log_probs[:, 0], expected, atol=1e-5)
    only_first = np.where(np.arange(3) < 1, expected, 0.0)
    np.testing.assert_allclose(found.suffix_log_probs[:, 1], only_first, atol=1e-5)
    np.testing.assert_allclose(found.suffix_scores[:, 0], expected.sum(-1), atol=1e-5)


def test_each_sample_has_scores_of_its_own():
    model, variables = make()
    sampling = model.clone(decoder=SampleDecoder(max_decode_steps=3, num_samples=2))
    suffixes = np.random.default_rng(0).integers(0, VOCAB, (4, 3, 2)).astype(np.int32)
    found = decode(sampling, variables, BATCH | {"suffixes": suffixes}, random=jax.random.key(1))
    many = found.candidates
    assert many.suffix_scores.shape == (4, 2, 3)
    np.testing.assert_array_equal(found.suffix_scores, many.suffix_scores[:, 0])
    logits = jax.jit(lambda v, ids: model.apply(v, ids, method=lambda m, ids: m.lm.logits(ids)))
    for sample, suffix in ((0, 2), (1, 1)):
        row = [*many.ids[2, sample, : many.lengths[2, sample]], *suffixes[2, suffix]]
        log_probs = jax.nn.log_softmax(logits(variables, jnp.array([row]))[0])
        by_hand = sum(log_probs[column - 1, row[column]] for column in (-2, -1))
        np.testing.assert_allclose(many.suffix_scores[2, sample, suffix], by_hand, atol=1e-5)


def test_suffixes_of_another_shape_raise(raises):
    model, variables = make()
    with raises(ConfigError, field="shape of suffixes", value=[3, 2]):
        decode(model, variables, BATCH | {"suffixes": np.zeros((3, 2), np.int32)})
