"""LanguageModel: metrics, and cached decoding compared with repeated full forward passes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.decoding.beam_search import BeamSearch
from layerkit.decoding.loop import SampleDecoder
from layerkit.errors import ConfigError
from layerkit.layers.attention.latent import MultiHeadLatentAttention
from layerkit.layers.basic.embeddings import Embedding, FullSoftmax
from layerkit.layers.basic.positions import (
    PositionalEmbedding,
    RotaryPositionalEmbedding,
    set_longest_sequence,
)
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.layers.transformer.transformer import Transformer
from layerkit.models.language_model import LanguageModel
from layerkit.ops.rotary_scaling import LongRopeScaling

KEY = jax.random.key(0)
VOCAB = 17


def language_model(stack=StackedTransformerRepeated, **decoder):
    """Rotary with grouped queries in a loop, or sinusoids in a row."""
    decoder = {"temperature": 0.0, "max_decode_steps": 5, **decoder}
    config = LanguageModel.HParams.config(decoder=SampleDecoder.HParams.config(**decoder))
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=12, num_layers=2, num_heads=4)
    config.lm_tpl.stack_tpl = stack.HParams.config()
    # Tied to the embedding, random weights would say the same token over and over.
    config.lm_tpl.embedding_tpl = Embedding.HParams.config()
    config.lm_tpl.softmax_tpl = FullSoftmax.HParams.config()
    if stack is StackedTransformerRepeated:
        config.lm_tpl.num_kv_heads = 2
        attention = config.lm_tpl.stack_tpl.layer_tpl.attention_tpl
        attention.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    else:
        config.lm_tpl.position_tpl = PositionalEmbedding.HParams.config()
    return config.Instantiate()


def random_weights(model):
    """Weights large enough for greedy continuations to wander."""
    random = np.random.default_rng(3)

    def draw(path, weight):
        name = jax.tree_util.keystr(path)
        if "bias" in name:
            return np.zeros(weight.shape, np.float32)
        deviation = 1.5 if "embedding" in name else 1.0
        return random.normal(0.0, deviation, weight.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, KEY))


@pytest.fixture(
    scope="module",
    params=[pytest.param(StackedTransformer, marks=pytest.mark.slow), StackedTransformerRepeated],
)
def stack(request):
    return request.param


@pytest.fixture(scope="module")
def asked(stack):
    """The weights of a model, and a function from ids `[4, 9]` to the logits after each."""
    model = language_model(stack)
    variables = random_weights(model)
    logits = lambda model, ids: model.lm.logits(ids)  # noqa: E731
    return variables, jax.jit(lambda ids: model.apply(variables, ids, method=logits))


@partial(jax.jit, static_argnums=0)
def decode(model, variables, batch, key=None):
    rngs = {} if key is None else {"random": key}
    return model.apply(variables, batch, method="decode", rngs=rngs)


# The last row only fills up the batch; behind a prompt's end stands what is none of its business.
PROMPTS = np.array([[3, 1, 4, 1], [2, 9, 9, 9], [5, 6, 9, 9], [0, 0, 0, 0]], np.int32)
LENGTHS = np.array([4, 1, 2, 0], np.int32)
BATCH = NestedMap(ids=PROMPTS, prompt_lengths=LENGTHS)


# What five steps draw of rows of nine columns.
IS_DRAWN = (np.arange(9) >= LENGTHS[:, None]) & (np.arange(9) < LENGTHS[:, None] + 5)
IS_DRAWN &= LENGTHS[:, None] > 0


def greedy_by_asking(logits):
    """Continues the prompts by running the whole model on the whole rows for each token."""
    ids = np.where(np.arange(9) < LENGTHS[:, None], np.pad(PROMPTS, ((0, 0), (0, 5))), 0)
    for column in range(1, 9):
        best = np.argmax(logits(ids)[:, column - 1], axis=-1)
        ids[:, column] = np.where(IS_DRAWN[:, column], best, ids[:, column])
    return ids


def log_probs_of(logits, ids):
    """Return log p of each token given those before it, `[batch, length − 1]`."""
    table = np.asarray(jax.nn.log_softmax(logits(ids)))[:, :-1]
    return np.take_along_axis(table, ids[:, 1:, None], axis=-1)[..., 0]


def test_greedy_decoding_equals_repeated_forward_passes(asked, stack):
    variables, logits = asked
    outputs = decode(language_model(stack), variables, BATCH)
    expected = greedy_by_asking(logits)
    assert len(set(expected[IS_DRAWN])) >= 6  # not one token repeated
    np.testing.assert_array_equal(outputs.ids, expected)
    np.testing.assert_array_equal(outputs.lengths, [9, 6, 7, 0])
    log_probs = np.where(IS_DRAWN[:, 1:], log_probs_of(logits, expected), 0.0)
    np.testing.assert_allclose(outputs.log_probs[:, 1:], log_probs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outputs.scores, np.sum(log_probs, axis=1), rtol=1e-4, atol=1e-5)


SEVERAL = {
    "samples": SampleDecoder(max_decode_steps=5, temperature=2.0, num_samples=3),
    "beams": BeamSearch(max_decode_steps=5, beam_size=4, num_results=3, eos_id=3),
}


def check_candidates(result, logits):
    """Compare the log-probabilities of three continuations of each row with those of the model."""
    for place in range(3):
        ids, lengths = np.asarray(result.ids[:, place]), np.asarray(result.lengths[:, place])
        is_drawn = IS_DRAWN & (np.arange(9) < lengths[:, None])
        expected = np.where(is_drawn[:, 1:], log_probs_of(logits, ids), 0.0)
        np.testing.assert_allclose(result.log_probs[:, place, 1:], expected, rtol=1e-4, atol=1e-5)


# Beams of unlike layers are below.
@pytest.mark.parametrize("name", ["samples", pytest.param("beams", marks=pytest.mark.slow)])
def test_several_continuations_have_separate_caches(asked, stack, name):
    variables, logits = asked
    model = language_model(stack).clone(decoder=SEVERAL[name])
    result = decode(model, variables, BATCH, jax.random.key(1)).candidates
    check_candidates(result, logits)
    assert all(len({tuple(ids) for ids in row.tolist()}) == 3 for row in np.asarray(result.ids[:3]))


def unlike_layers():
    """Return a stack that repeats a layer with a window and one with latent attention."""
    window, latent = Transformer.HParams.config(), Transformer.HParams.config()
    window.attention_tpl.window = 3
    latent.attention_tpl = MultiHeadLatentAttention.HParams.config(
        latent_dims=4, plain_dim_per_head=2, rotary_dim_per_head=2, value_dim_per_head=2
    )
    return StackedTransformerRepeated.HParams.config(block_tpls=(window, latent))


def stages():
    return PipelinedTransformer.HParams.config(
        num_stages=3, stream_inputs=False, num_microbatches=2
    )


@pytest.mark.parametrize("make", [unlike_layers, pytest.param(stages, marks=pytest.mark.slow)])
def test_beams_reorder_caches_of_every_kind(make):
    model = language_model(StackedTransformer)
    lm_tpl = model.lm_tpl.clone(stack_tpl=make(), num_layers=3)
    model = model.clone(lm_tpl=lm_tpl, decoder=SEVERAL["beams"])
    variables = random_weights(model)
    result = decode(model, variables, BATCH).candidates
    read = jax.jit(lambda ids: model.apply(variables, ids, method=lambda m, ids: m.lm.logits(ids)))
    check_candidates(result, read)


@pytest.mark.parametrize(
    ("trained", "name"),
    [
        (6, "greedy"),
        pytest.param(3, "greedy", marks=pytest.mark.slow),
        pytest.param(6, "samples", marks=pytest.mark.slow),
        pytest.param(6, "beams", marks=pytest.mark.slow),
    ],
)
def test_decoding_beyond_the_trained_length_equals_whole_rows(trained, name):
    greedy = language_model().decoder
    scaling = LongRopeScaling((1.0,), (4.0,), original_max_position=trained, max_position=64)
    lm_tpl = language_model().lm_tpl.clone()
    lm_tpl.stack_tpl.layer_tpl.attention_tpl.rotary_tpl.scaling = scaling
    model = language_model().clone(lm_tpl=lm_tpl, decoder={**SEVERAL, "greedy": greedy}[name])
    variables = random_weights(model)
    if trained < LENGTHS.max():
        # Its whole batch has the factors of long rows, as in Transformers.
        model_of_rows = model.clone(lm_tpl=set_longest_sequence(lm_tpl, 64))
    else:
        model_of_rows = model

    @jax.jit
    def logits(ids):
        """Return the logits after each token, in a row that ends with it."""

        def after(end):
            read = lambda model: model.lm.logits(ids, segment_ids=is_token)  # noqa: E731
            is_token = jnp.tile(jnp.arange(9) <= end, (len(ids), 1)).astype(jnp.int32)
            return model_of_rows.apply(variables, method=read)[:, end]

        return jnp.swapaxes(jax.lax.map(after, jnp.arange(9)), 0, 1)

    outputs = decode(model, variables, BATCH, jax.random.key(1))
    if name == "greedy":
        np.testing.assert_array_equal(outputs.ids, greedy_by_asking(logits))
    else:
        check_candidates(outputs.candidates, logits)


@pytest.mark.slow  # test_loop.py has rows that do not depend on other rows
def test_row_continues_as_in_a_batch_of_one():
    decoder = SampleDecoder(max_decode_steps=5, temperature=1.5, top_p=0.9, eos_id=3)
    model = language_model().clone(decoder=decoder)
    variables = random_weights(model)
    key = jax.random.key(5)
    together = decode(model, variables, BATCH, key)
    assert np.any(decode(model, variables, BATCH, KEY).ids != together.ids)
    # Row 2 has a prompt of two tokens.
    prompt = NestedMap(ids=PROMPTS[2:3, :2], row_ids=np.array([2], np.int32))
    alone = decode(model, variables, prompt, key)
    np.testing.assert_array_equal(alone.ids[0], together.ids[2, : 2 + 5])
    np.testing.assert_allclose(alone.log_probs[0], together.log_probs[2, : 2 + 5], atol=1e-5)


def test_prompts_without_lengths_fill_their_rows():
    model = language_model()
    variables = random_weights(model)
    full = np.full((4,), 4, np.int32)
    given = decode(model, variables, NestedMap(ids=PROMPTS, prompt_lengths=full))
    left_out = decode(model, variables, NestedMap(ids=PROMPTS))
    np.testing.assert_array_equal(given.ids, left_out.ids)
    np.testing.assert_array_equal(left_out.prompt_lengths, full)


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        (BATCH | {"segment_ids": np.ones((4, 4), np.int32)}, "segment_ids"),
        (NestedMap(ids=PROMPTS, paddings=np.zeros(PROMPTS.shape)), "prompt_lengths"),
    ],
    ids=["packed", "paddings_without_lengths"],
)
def test_batch_that_cannot_be_decoded_raises(raises, batch, field):
    model = language_model()
    with raises(ConfigError, owner="LanguageModel()", field=field):
        decode(model, random_weights(model), batch)


# Metrics.

IDS = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]], np.int32)
TRAIN_BATCH = NestedMap(
    ids=IDS,
    labels=np.roll(IDS, -1, axis=1),
    weights=np.array([[1, 1, 0.5, 1, 0, 0], [0, 2, 1, 1, 1, 1]], np.float32),
)


def test_metrics_are_weighted_means_over_the_tokens():
    smoothing = 0.1  # changes the loss, but not the reported xent
    model = language_model()
    softmax = model.lm_tpl.softmax_tpl.clone(label_smoothing=smoothing)
    model = model.clone(lm_tpl=model.lm_tpl.clone(softmax_tpl=softmax))
    variables = random_weights(model)
    read = lambda model, ids: model.lm.logits(ids)  # noqa: E731
    (metrics, per_example), logits = jax.jit(
        lambda v: (model.apply(v, TRAIN_BATCH), model.apply(v, IDS, method=read))
    )(variables)

    logits = np.asarray(logits, np.float64)
    log_z = np.log(np.sum(np.exp(logits), axis=-1))
    of_label = np.take_along_axis(logits, TRAIN_BATCH.labels[..., None], -1)[..., 0]
    expected = {
        "loss": log_z - (1.0 - smoothing) * of_label - smoothing * np.mean(logits, axis=-1),
        "xent": log_z - of_label,
        "accuracy": np.argmax(logits, axis=-1) == TRAIN_BATCH.labels,
    }
    assert set(metrics) == set(expected)
    for name, values in expected.items():
        mean = np.sum(values * np.asarray(TRAIN_BATCH.weights, np.float64)) / 9.5
        np.testing.assert_allclose(metrics[name].value, mean, rtol=1e-5, atol=1e-6)
        assert float(metrics[name].weight) == 9.5
    np.testing.assert_allclose(per_example.per_token_xent, expected["xent"], rtol=1e-4, atol=1e-5)


def test_batch_without_weight_has_zero_loss_and_gradients():
    model = language_model()
    variables = random_weights(model)
    # Labels of weight 0 may be invalid.
    batch = TRAIN_BATCH | {
        "weights": np.zeros((2, 6), np.float32),
        "labels": np.full((2, 6), -1, np.int32),
    }

    @jax.jit
    def run(variables):
        def loss(variables):
            metrics, _ = model.apply(variables, batch)
            return metrics["loss"].value, metrics

        return jax.value_and_grad(loss, has_aux=True)(variables)

    (loss, metrics), gradients = run(variables)
    assert float(loss) == 0.0
    assert all(float(m.value) == float(m.weight) == 0.0 for m in metrics.values())
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_packed_batches_reach_the_network():
    model = language_model()
    variables = random_weights(model)
    run = jax.jit(lambda batch: model.apply(variables, batch)[1].per_token_xent)
    segments = {
        "segment_ids": np.array([[1, 1, 1, 2, 2, 2]] * 2, np.int32),
        "segment_pos": np.array([[0, 1, 2, 0, 1, 2]] * 2, np.int32),
    }
    packed = run(TRAIN_BATCH | segments)
    alone = run(
        NestedMap({name: np.tile(TRAIN_BATCH[name][:, 3:], (1, 2)) for name in TRAIN_BATCH})
    )
    np.testing.assert_allclose(packed[:, 3:], alone[:, :3], rtol=1e-5, atol=1e-5)
    assert np.all(np.abs(packed[:, 4:] - run(TRAIN_BATCH)[:, 4:]) > 1e-6)


def test_weights_of_examples_multiply_those_of_their_tokens_where_they_are_applied(asked):
    variables, _ = asked
    ids = np.random.default_rng(1).integers(0, VOCAB, (3, 5)).astype(np.int32)
    weights = np.random.default_rng(2).uniform(size=(3, 4)).astype(np.float32)
    examples = np.array([1.0, 0.25, 0.0], np.float32)
    stack = StackedTransformer
    if "repeat" in variables["params"]["lm"]["stack"]:
        stack = StackedTransformerRepeated
    model = language_model(stack)

    @partial(jax.jit, static_argnums=0)
    def metrics(model, **batch):
        batch = NestedMap(ids=ids[:, :-1], labels=ids[:, 1:], **batch)
        return model.apply(variables, batch)[0]

    applying = model.clone(apply_eval_sample_weights=True)
    result = metrics(applying, weights=weights, eval_sample_weights=examples)
    expected = metrics(model, weights=weights * examples[:, None])
    ignored = metrics(model, weights=weights, eval_sample_weights=examples)
    for name, metric in expected.items():
        np.testing.assert_allclose(result[name].value, metric.value, rtol=1e-6)
        np.testing.assert_allclose(
            result[name].weight, np.sum(weights * examples[:, None]), rtol=1e-6
        )
        np.testing.assert_allclose(ignored[name].weight, np.sum(weights), rtol=1e-6)
    np.testing.assert_array_equal(
        metrics(applying, weights=weights)["xent"].value,
        metrics(model, weights=weights)["xent"].value,
    )
