"""Losses and decoding of models of speech whose decoder attends to the encoded sounds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.decoding import BeamSearch, SampleDecoder
from layerkit.errors import ConfigError
from layerkit.layers import ConformerEncoder, SpeechTransformerEncoder
from layerkit.models import AttentionDecoderModel
from layerkit.ops.losses.alignment import ctc_loss

VOCAB, BINS, END = 7, 4, 6
RANDOM = np.random.default_rng(0)
SRC = NestedMap(
    features=jnp.asarray(RANDOM.normal(size=(2, 24, BINS)), jnp.float32),
    paddings=jnp.asarray(np.arange(24) >= np.array([24, 13])[:, None], jnp.float32),
)
TGT = NestedMap(
    labels=jnp.array([[1, 2, 2], [3, 0, 0]]), paddings=jnp.array([[0, 0, 0], [0, 1, 1]])
)
BATCH = NestedMap(src=SRC, tgt=TGT)
GREEDY = SampleDecoder.HParams.config(temperature=0.0, max_decode_steps=5, eos_id=END)
ENCODERS = {
    SpeechTransformerEncoder: SpeechTransformerEncoder.HParams.config(),
    ConformerEncoder: ConformerEncoder.HParams.config(num_channels=4),
}


@functools.cache
def make(encoder=SpeechTransformerEncoder, decoder=GREEDY, **fields):
    config = AttentionDecoderModel.HParams.config(
        frontend_tpl=None, augmenter_tpl=None, train=False, prompt_ids=(5, 4), decoder=decoder
    )
    sizes = {"model_dims": 8, "hidden_dims": 8, "num_heads": 2}
    encoder_tpl = ENCODERS[encoder].clone().set(num_bins=BINS, **sizes)
    config.model_tpl.set(vocab_size=VOCAB, encoder_tpl=encoder_tpl, **sizes)
    model = config.set(**fields).Instantiate()
    random = np.random.default_rng(4)
    shapes = jax.eval_shape(model.init, jax.random.key(0), BATCH)
    # These weights choose several labels and the end; with biases, all rows choose the same label.
    draw = lambda x: random.normal(0, x.ndim > 1, x.shape).astype(np.float32)  # noqa: E731
    statistics = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    return model, {**statistics, "params": jax.tree.map(draw, shapes["params"])}


@functools.partial(jax.jit, static_argnums=0)
def decode(model, variables, batch):
    return model.apply(variables, batch, method="decode")


@pytest.mark.parametrize(
    "encoder", [SpeechTransformerEncoder, pytest.param(ConformerEncoder, marks=pytest.mark.slow)]
)
def test_padded_rows_have_the_losses_and_labels_of_shorter_ones(encoder):
    model, variables = make(encoder)
    run = jax.jit(lambda v, batch: model.apply(v, batch, method="compute_predictions"))
    short = jax.tree.map(lambda x: x[1:, :13], BATCH)
    padded, alone = run(variables, BATCH), run(variables, short)
    np.testing.assert_allclose(
        padded.per_token_xent[1:, :4], alone.per_token_xent[:, :4], rtol=1e-5
    )
    assert decode(model, variables, BATCH).ids[1].tolist() == (
        decode(model, variables, short).ids[0].tolist()
    )


def test_target_has_the_prompt_the_labels_and_the_end():
    model, variables = make()
    batch = NestedMap(BATCH, eval_sample_weights=jnp.array([1.0, 0.5]))
    target = jax.jit(lambda v: model.apply(v, batch, method="_target"))(variables)
    np.testing.assert_array_equal(target.ids[0], [0, 5, 4, 1, 2, 2])
    np.testing.assert_array_equal(target.labels, [[5, 4, 1, 2, 2, END], [5, 4, 3, END, 0, 0]])
    np.testing.assert_array_equal(target.weights, [[0, 0, 1, 1, 1, 1], [0, 0, 0.5, 0.5, 0, 0]])
    with pytest.raises(ConfigError, match=r"decoder\.eos_id"):
        make(decoder=SampleDecoder.HParams.config())
    with pytest.raises(ConfigError, match="ctc_weight"):
        make(ctc_weight=1.0)
    packed = {"source_segment_pos": jnp.zeros((2, 24), jnp.int32)}
    with pytest.raises(ConfigError, match="source_segment_pos"):
        model.bind(variables).model.logits(SRC.features, target.ids, **packed)


def test_cached_decoding_chooses_the_most_likely_label_of_whole_rows():
    model, variables = make()
    outputs = decode(model, variables, BATCH)
    segments = jnp.int32(SRC.paddings == 0)

    def whole(model):
        return model.model.logits(SRC.features, outputs.ids, source_segment_ids=segments)

    best = jnp.argmax(jax.jit(lambda v: model.apply(v, method=whole))(variables), axis=-1)
    assert outputs.prompt_lengths.tolist() == [3, 3] and "source" not in outputs
    for row, length in enumerate(outputs.lengths):
        assert outputs.ids[row, 3:length].tolist() == best[row, 2 : length - 1].tolist()


@pytest.mark.slow
def test_a_beam_is_at_least_as_likely_as_greedy_decoding():
    greedy = decode(*make(), BATCH)
    beam = decode(*make(decoder=BeamSearch(beam_size=4, max_decode_steps=5, eos_id=END)), BATCH)
    assert (beam.log_probs.sum(axis=1) >= greedy.log_probs.sum(axis=1) - 1e-5).all()


def test_joint_loss_is_the_weighted_sum_with_ctc():
    model, variables = make(ctc_weight=0.3)
    batch = jax.tree.map(lambda x: x[jnp.array([0, 1, 1])], BATCH)
    batch.src.paddings = batch.src.paddings.at[2].set(1)  # too short for CTC

    def losses(model):
        predictions = model.compute_predictions(batch)
        logits = model.ctc_softmax.logits(predictions.encoded)
        paddings = {"logit_paddings": batch.src.paddings[:, ::2]}
        paddings["label_paddings"] = batch.tgt.paddings
        ctc, _ = ctc_loss(logits, batch.tgt.labels, **paddings)
        return ctc[:2].sum() / 8, model.compute_loss(predictions, batch)[0]

    ctc, metrics = jax.jit(lambda v: model.apply(v, method=losses))(variables)
    np.testing.assert_allclose(metrics["ctc"].value, ctc, rtol=1e-5)
    expected = 0.7 * metrics["xent"].value + 0.3 * ctc
    np.testing.assert_allclose(metrics["loss"].value, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["unaligned_rows"].value, 1 / 3, rtol=1e-6)
