"""TransformerEncoderDecoder and SequenceModel: attention masks, caches and decoding."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import CACHE
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import BeamSearch, SampleDecoder
from layerkit.layers.attention.biases import RelativeBias
from layerkit.layers.basic.embeddings import Embedding, FullSoftmax
from layerkit.layers.basic.positions import PositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.models.encoder_decoder import TransformerEncoderDecoder
from layerkit.models.sequence_model import SequenceModel

KEY = jax.random.key(0)
BATCH, SOURCE, TARGET, VOCAB = 3, 7, 5, 13
RANDOM = np.random.default_rng(0)
SOURCE_IDS = RANDOM.integers(1, VOCAB, (BATCH, SOURCE)).astype(np.int32)
TARGET_IDS = RANDOM.integers(1, VOCAB, (BATCH, TARGET)).astype(np.int32)
LENGTHS = np.array([7, 4, 1])
SOURCE_SEGMENTS = (np.arange(SOURCE) < LENGTHS[:, None]).astype(np.int32)


def network(config=None):
    config = config or TransformerEncoderDecoder.HParams.config()
    config.set(vocab_size=VOCAB, model_dims=8, hidden_dims=12, num_heads=2)
    config.set(num_encoder_layers=1, num_decoder_layers=2)
    return config


def sinusoidal():
    config = network()
    config.position_tpl = PositionalEmbedding.HParams.config()
    config.embedding_tpl = Embedding.HParams.config()
    config.softmax_tpl = FullSoftmax.HParams.config()
    return config


def repeated_with_relative_bias():
    """Like T5: a table of distances that all layers of a side share, and no other positions."""
    config = network()
    layer = config.decoder_stack_tpl.layer_tpl.clone()
    for side in ("encoder", "decoder"):
        stack = StackedTransformerRepeated.HParams.config(
            relative_bias_tpl=RelativeBias.HParams.config(num_buckets=8, max_distance=16)
        )
        setattr(config, f"{side}_stack_tpl", stack)
    config.decoder_stack_tpl.layer_tpl = layer
    return config


def weights_of(model):
    """Large enough for greedy continuations to wander."""
    random = np.random.default_rng(3)
    shapes = jax.eval_shape(model.init, KEY)
    return jax.tree.map(lambda w: random.normal(size=w.shape).astype(np.float32), shapes)


@pytest.fixture(
    scope="module",
    params=[pytest.param(sinusoidal, marks=pytest.mark.slow), repeated_with_relative_bias],
    ids=lambda f: f.__name__,
)
def made(request):
    """A function that makes a config, weights of its model, and the model's jitted logits."""
    model = request.param().Instantiate()
    return request.param, weights_of(model), jax.jit(partial(model.apply, method="logits"))


def test_target_attends_to_earlier_targets_and_the_whole_source(made):
    _, variables, logits = made
    before = logits(variables, SOURCE_IDS, TARGET_IDS)
    changed = TARGET_IDS.copy()
    changed[:, 3] = (changed[:, 3] + 1) % VOCAB
    after = logits(variables, SOURCE_IDS, changed)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (np.abs(before - after)[:, 3:].max(-1) > 0).all()
    other = SOURCE_IDS.copy()
    other[:, -1] = (other[:, -1] + 1) % VOCAB
    after = logits(variables, other, TARGET_IDS)
    assert (np.abs(before - after).max(-1) > 0).all()


def test_padding_of_the_source_is_masked(made):
    _, variables, logits = made
    noise = np.where(SOURCE_SEGMENTS, SOURCE_IDS, 1 + SOURCE_IDS % (VOCAB - 1))
    before, after = (
        logits(variables, ids, TARGET_IDS, source_segment_ids=SOURCE_SEGMENTS)
        for ids in (SOURCE_IDS, noise)
    )
    np.testing.assert_array_equal(before, after)
    alone = logits(variables, SOURCE_IDS[1:2, :4], TARGET_IDS[1:2])
    np.testing.assert_allclose(before[1], alone[0], rtol=2e-4, atol=2e-5)


def test_packed_documents_attend_to_their_source(made):
    _, variables, logits = made
    packed = logits(
        variables,
        SOURCE_IDS[:1],
        TARGET_IDS[:1],
        source_segment_ids=np.array([[1, 1, 1, 2, 2, 2, 0]]),
        source_segment_pos=np.array([[0, 1, 2, 0, 1, 2, 0]]),
        target_segment_ids=np.array([[1, 1, 2, 2, 2]]),
        target_segment_pos=np.array([[0, 1, 0, 1, 2]]),
    )
    first = logits(variables, SOURCE_IDS[:1, :3], TARGET_IDS[:1, :2])
    second = logits(variables, SOURCE_IDS[:1, 3:6], TARGET_IDS[:1, 2:])
    alone = np.concatenate([first, second], axis=1)
    np.testing.assert_allclose(packed, alone, rtol=2e-4, atol=2e-5)


def test_cached_steps_equal_the_full_pass(made):
    make, variables, logits = made
    model, options = make().Instantiate(), {"method": "init_cache", "mutable": [CACHE]}
    init = jax.jit(partial(model.apply, **options), static_argnums=2)
    _, state = init(variables, SOURCE_IDS, TARGET, segment_ids=SOURCE_SEGMENTS)
    extend = jax.jit(partial(model.apply, method="extend_step", mutable=[CACHE]))
    steps = []
    for start, end in ((0, 3), (3, 4), (4, 5)):
        step, state = extend(
            {**variables, **state}, TARGET_IDS[:, start:end], time_step=jnp.int32(start)
        )
        steps.append(step)
    full = logits(variables, SOURCE_IDS, TARGET_IDS, source_segment_ids=SOURCE_SEGMENTS)
    np.testing.assert_allclose(np.concatenate(steps, axis=1), full, rtol=2e-4, atol=2e-5)


def sequence_model(make, decoder):
    return SequenceModel.HParams.config(model_tpl=make(), decoder=decoder, start_id=2).Instantiate()


def test_greedy_decoding_equals_repeated_forward_passes(made):
    make, own, logits = made
    model = sequence_model(make, SampleDecoder.HParams.config(temperature=0.0, max_decode_steps=4))
    variables = {"params": {"model": own["params"]}}
    source = NestedMap(ids=SOURCE_IDS, paddings=1 - SOURCE_SEGMENTS)
    source.paddings[2] = 1  # a row that only fills up the batch
    decoded = jax.jit(partial(model.apply, method="decode"))(variables, NestedMap(src=source))
    ids = np.full((BATCH, TARGET), 2, np.int32)
    for column in range(1, TARGET):
        step = logits(own, SOURCE_IDS, ids, source_segment_ids=SOURCE_SEGMENTS)
        ids[:, column] = np.argmax(step[:, column - 1], axis=-1)
    np.testing.assert_array_equal(decoded.ids[:2], ids[:2])
    np.testing.assert_array_equal(decoded.lengths, [5, 5, 0])
    np.testing.assert_array_equal(decoded.prompt_lengths, [1, 1, 0])
    np.testing.assert_array_equal(decoded.source.ids, SOURCE_IDS)
    np.testing.assert_array_equal(decoded.source.lengths, [7, 4, 0])


@pytest.mark.slow
def test_beam_as_wide_as_the_vocabulary_finds_the_most_likely_pair(made):
    make, variables, logits = made
    model = sequence_model(make, BeamSearch.HParams.config(beam_size=VOCAB, max_decode_steps=2))
    batch = NestedMap(src=NestedMap(ids=SOURCE_IDS, segment_ids=SOURCE_SEGMENTS))
    decoded = jax.jit(partial(model.apply, method="decode"))(
        {"params": {"model": variables["params"]}}, batch
    )
    pairs = np.stack(np.meshgrid(np.arange(VOCAB), np.arange(VOCAB), indexing="ij"), -1)
    pairs = pairs.reshape(-1, 2)
    targets = np.concatenate([np.full((len(pairs), 1), 2), pairs], axis=1).astype(np.int32)
    for row in range(BATCH):
        source, segments = (
            np.repeat(x[row : row + 1], len(pairs), axis=0) for x in (SOURCE_IDS, SOURCE_SEGMENTS)
        )
        every = logits(variables, source, targets[:, :2], source_segment_ids=segments)
        log_probs = np.asarray(jax.nn.log_softmax(every))
        totals = np.take_along_axis(log_probs, targets[:, 1:, None], -1)[..., 0].sum(-1)
        np.testing.assert_array_equal(decoded.ids[row], targets[np.argmax(totals)])
        np.testing.assert_allclose(decoded.log_probs[row].sum(), totals.max(), rtol=1e-4)


@pytest.mark.parametrize("method", ["compute_predictions", "decode"])
@pytest.mark.parametrize(("name", "are_runs"), [("paddings", False), ("segment_ids", True)])
def test_kernels_of_runs_are_not_selected_for_paddings(attention_calls, name, are_runs, method):
    model = sequence_model(sinusoidal, SampleDecoder.HParams.config(temperature=0.0))
    variables = jax.eval_shape(model.init, KEY)
    target = NestedMap(ids=TARGET_IDS, labels=TARGET_IDS, weights=np.float32(TARGET_IDS))
    source = NestedMap({"ids": SOURCE_IDS, name: SOURCE_SEGMENTS})
    run = partial(model.apply, method=method)
    jax.eval_shape(run, variables, NestedMap(src=source, tgt=target))
    encoder_calls = [call for call in attention_calls if call.num_queries == SOURCE]
    assert {call.segments_are_runs for call in encoder_calls} == {are_runs}


def test_kernels_of_runs_are_not_selected_for_encoding_documents_with_gaps(attention_calls):
    model = sinusoidal().Instantiate()
    variables = jax.eval_shape(model.init, KEY)
    encode = partial(model.apply, method="encode", segments_are_runs=False)
    jax.eval_shape(encode, variables, SOURCE_IDS, segment_ids=SOURCE_SEGMENTS)
    assert {call.segments_are_runs for call in attention_calls} == {False}


def test_loss_is_weighted():
    model = sequence_model(sinusoidal, SampleDecoder.HParams.config())
    variables = weights_of(model)
    weights = (RANDOM.random((BATCH, TARGET)) < 0.5).astype(np.float32)
    labels = RANDOM.integers(0, VOCAB, (BATCH, TARGET)).astype(np.int32)
    batch = NestedMap(
        src=NestedMap(ids=SOURCE_IDS, paddings=1.0 - SOURCE_SEGMENTS),
        tgt=NestedMap(ids=TARGET_IDS, labels=labels, weights=weights),
    )
    metrics, _ = jax.jit(model.apply)(variables, batch)
    own = {"params": variables["params"]["model"]}
    run = jax.jit(partial(model.model_tpl.Instantiate().apply, method="logits"))
    logits = run(own, SOURCE_IDS, TARGET_IDS, source_segment_ids=SOURCE_SEGMENTS)
    every = jax.nn.log_softmax(logits)
    xent = -np.take_along_axis(np.asarray(every), labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(metrics["xent"].value, np.average(xent, weights=weights), rtol=1e-4)
    accuracy = np.average(np.argmax(logits, -1) == labels, weights=weights)
    np.testing.assert_allclose(metrics["accuracy"].value, accuracy, rtol=1e-6)
