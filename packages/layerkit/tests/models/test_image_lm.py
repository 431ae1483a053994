"""Language models that read images: places of the vectors, attention within images, and caches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import AUX_LOSS, CACHE, PARAMS, RANDOM
from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.loop import SampleDecoder
from layerkit.errors import ConfigError
from layerkit.layers import (
    Embedding,
    FullSoftmax,
    ImageEmbedding,
    RotaryPositionalEmbedding,
    StackedTransformerRepeated,
)
from layerkit.models import LanguageModel
from layerkit.models.distillation_model import DistillationModel
from layerkit.models.preference_model import (
    KtoModel,
    PreferenceModel,
    RewardModel,
    mismatch_answers,
)

# Ids from `NUM_TEXT` on are those of the vectors in the first test.
NUM_TEXT, IMAGE, TOKENS = 11, 7, 4
VOCAB = NUM_TEXT + 6 * TOKENS
IMAGES = np.random.default_rng(0).normal(size=(3, 2, 4, 4, 3)).astype(np.float32)
IDS = np.array(
    [
        [1, 7, 7, 7, 7, 2, 3, 7, 7, 7, 7, 4],
        [7, 7, 7, 7, 5, 6, 8, 9, 1, 2, 3, 4],
        [5, 6, 8, 9, 1, 2, 3, 4, 5, 6, 8, 9],
    ],
    np.int32,
)


def model_config(*, is_plain=False):
    config = LanguageModel.HParams.config(
        decoder=SampleDecoder.HParams.config(temperature=0.0, max_decode_steps=3)
    )
    lm = config.lm_tpl
    lm.set(vocab_size=VOCAB, model_dims=8, hidden_dims=12, num_layers=2, num_heads=2)
    lm.set(embedding_tpl=Embedding.HParams.config(), softmax_tpl=FullSoftmax.HParams.config())
    lm.stack_tpl = StackedTransformerRepeated.HParams.config()
    attention = lm.stack_tpl.layer_tpl.attention_tpl
    attention.set(rotary_tpl=RotaryPositionalEmbedding.HParams.config(), window=6)
    attention.rotary_tpl.sections = None if is_plain else (0, 1, 1)
    images = ImageEmbedding.HParams.config(token_id=IMAGE)
    images.set(sees_whole_image=not is_plain, has_grid_positions=not is_plain)
    images.tower_tpl.set(model_dims=6, hidden_dims=8, num_heads=2, position_grid=(2, 2))
    images.tower_tpl.patch_tpl.patch_size = 2
    lm.images_tpl = images
    return config


def random_variables(model):
    random = np.random.default_rng(3)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda w: random.normal(0.0, 0.5, w.shape).astype(np.float32), shapes)


def batch_of(ids=IDS, images=IMAGES, **others):
    labels = np.roll(ids, -1, axis=1)
    batch = NestedMap(ids=ids, labels=labels, weights=np.ones(ids.shape, np.float32), **others)
    return batch if images is None else NestedMap(batch, images=images)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, variables, ids, **inputs):
    return model.apply(variables, method=lambda m: m.lm.logits(ids, **inputs))


def test_logits_equal_those_of_a_text_model_whose_embeddings_are_the_vectors():
    config = model_config(is_plain=True)
    model = build(config)
    variables = random_variables(model)
    vectors = jax.jit(lambda v: model.apply(v, method=lambda m: m.lm.images(IMAGES)))(variables)
    assert vectors.shape == (3, 2, 2, 2, 8)
    table = variables[PARAMS]["lm"]["embedding"]["w"].copy()
    table[NUM_TEXT:] = vectors.reshape(-1, 8)
    ids = IDS.copy()
    ids[0, [1, 2, 3, 4, 7, 8, 9, 10]] = NUM_TEXT + np.arange(8)
    ids[1, :4] = NUM_TEXT + 8 + np.arange(4)
    text = config.clone()
    text.lm_tpl.images_tpl = None
    weights = dict(variables[PARAMS]["lm"], embedding={"w": table})
    del weights["images"]
    expected = logits_of(build(text), {PARAMS: {"lm": weights}}, ids)
    logits = logits_of(model, variables, IDS, images=IMAGES)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    # A row of text is that of the text model.
    np.testing.assert_allclose(logits[2], expected[2], atol=1e-6)


def test_placeholders_of_an_image_see_one_another_and_later_tokens_do_not_change_earlier_ones():
    model = build(model_config())
    variables = random_variables(model)
    first = logits_of(model, variables, IDS, images=IMAGES)

    def changed(place):
        images = np.array(IMAGES)
        images[place] += 1.0
        return np.abs(logits_of(model, variables, IDS, images=images) - first).max(axis=-1) > 1e-4

    # The lower right patch of image 0 is the last of its placeholders.
    seen = changed((0, 0, 3, 3))
    assert not seen[0, 0] and seen[0, 1:7].all() and not seen[1:].any()
    assert not changed((0, 1))[0, :7].any()
    # No placeholder reads the second image of row 1.
    assert not changed((1, 1)).any() and changed((1, 0))[1, :4].all()


def test_placeholders_without_a_vector_have_positions_as_text():
    layer = build(model_config().lm_tpl.images_tpl.set(output_dims=8))
    ids = np.array([[1, 7, 7, 7, 7, 2, 7, 3]], np.int32)
    cache = {"vectors": np.zeros((1, 1, 2, 2, 8)), "is_image": np.zeros((1, 8), bool)}
    placed, _ = layer.apply(
        {CACHE: cache}, ids, time_step=jnp.int32(0), method="extend_step", mutable=[CACHE]
    )
    positions = placed.positions(np.arange(8)[None])
    expected = [[0, 1, 1, 1, 1, 3, 4, 5], [0, 1, 1, 2, 2, 3, 4, 5], [0, 1, 2, 1, 2, 3, 4, 5]]
    np.testing.assert_array_equal(positions[0].T, expected)


@pytest.mark.slow
def test_packed_rows_equal_separate_rows():
    model = build(model_config())
    variables = random_variables(model)
    ids = np.concatenate([IDS[1:2, :6], IDS[1:2, :6]], axis=1)
    images = np.stack([IMAGES[1, 0], IMAGES[0, 1]])[None]
    segments = np.repeat([[1, 2]], 6, axis=1).astype(np.int32)
    positions = np.tile(np.arange(6, dtype=np.int32), 2)[None]
    logits = logits_of(
        model, variables, ids, images=images, segment_ids=segments, segment_pos=positions
    )
    expected = logits_of(model, variables, ids.reshape(2, 6), images=images.swapaxes(0, 1))
    np.testing.assert_allclose(logits.reshape(expected.shape), expected, atol=1e-5)


def test_decoding_reads_the_images_of_prompts_as_whole_rows_do():
    model = build(model_config())
    variables = random_variables(model)
    lengths = np.array([12, 6, 3], np.int32)
    batch = NestedMap(ids=IDS, prompt_lengths=lengths, images=IMAGES)
    outputs = jax.jit(lambda v: model.apply(v, batch, method="decode"))(variables)
    logits = jax.nn.log_softmax(logits_of(model, variables, outputs.ids, images=IMAGES))
    for row, length in enumerate(lengths):
        for column in range(length, length + 3):
            best = logits[row, column - 1]
            assert outputs.ids[row, column] == jnp.argmax(best)
            np.testing.assert_allclose(outputs.log_probs[row, column], best.max(), atol=1e-4)


@pytest.mark.slow
def test_samples_that_share_a_prompt_with_images_equal_those_with_copies():
    config = model_config()
    variables = random_variables(build(config))
    lengths = np.array([12, 6, 3], np.int32)
    batch = NestedMap(ids=IDS, prompt_lengths=lengths, images=IMAGES)

    def sample(**fields):
        config.decoder.set(temperature=1.0, num_samples=3, max_decode_steps=4, **fields)
        model = build(config)
        rngs = {RANDOM: jax.random.key(0)}
        return jax.jit(lambda v: model.apply(v, batch, method="decode", rngs=rngs))(variables)

    expected, shared = sample(), sample(lazy_prefix_broadcast=True)
    np.testing.assert_array_equal(shared.ids, expected.ids)
    np.testing.assert_allclose(shared.log_probs, expected.log_probs, atol=1e-4)


def test_loss_leaves_out_placeholders_and_gradients_reach_tower_and_projector():
    model = build(model_config())
    variables = random_variables(model)

    def loss(params, batch):
        metrics, _ = model.apply({PARAMS: params}, batch)
        return metrics["loss"].value, metrics["loss"].weight

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, weight), gradients = step(variables[PARAMS], batch_of())
    assert weight == np.sum(np.roll(IDS, -1, axis=1) != IMAGE)
    for gradient in jax.tree.leaves(gradients["lm"]["images"]):
        assert jnp.abs(gradient).max() > 0
    excluded = NestedMap(batch_of(), weights=(batch_of().labels != IMAGE).astype(np.float32))
    assert step(variables[PARAMS], excluded)[0][0] == value


def test_images_are_rejected_where_they_cannot_be_read(raises):
    config = model_config()
    model = build(config)
    with raises(ConfigError, field="dtype of images"):
        jax.eval_shape(model.init_with_output, jax.random.key(0), batch_of(images=np.uint8(IMAGES)))
    config.lm_tpl.images_tpl = None
    text = build(config)
    with raises(ConfigError, field="images_tpl"):
        jax.eval_shape(text.init_with_output, jax.random.key(0), batch_of())
    variables = jax.eval_shape(text.init, jax.random.key(0))
    prompts = NestedMap(ids=IDS, prompt_lengths=np.full(3, 12), images=IMAGES)
    with raises(ConfigError, field="images_tpl"):
        jax.eval_shape(lambda v: text.apply(v, prompts, method="decode"), variables)


def pairs_of(**batch):
    return NestedMap(chosen=batch_of(**batch), rejected=batch_of(**batch))


def distillation(**fields):
    lm = model_config().lm_tpl
    return DistillationModel.HParams.config(teacher_tpl=lm.clone(), **fields)


@pytest.mark.parametrize(
    ("config", "make_batch"),
    [
        (PreferenceModel.HParams.config(reference="none"), pairs_of),
        (RewardModel.HParams.config(), lambda **b: pairs_of(**b, segment_ids=np.ones_like(IDS))),
        (KtoModel.HParams.config(), lambda **b: NestedMap(answer=batch_of(**b))),
        (distillation(), batch_of),
        (distillation(on_policy_fraction=1.0, beta=1.0), batch_of),
    ],
)
def test_models_of_preferences_and_of_a_teacher_read_images(config, make_batch, raises):
    config.lm_tpl = model_config().lm_tpl
    model = build(config)
    variables = jax.eval_shape(model.init, jax.random.key(0))

    def predict(variables, batch):
        return model.clone(train=True).apply(
            variables,
            batch,
            rngs={RANDOM: jax.random.key(0)},
            method="compute_predictions",
            mutable=[AUX_LOSS],
        )

    # The tower rejects integers, so it has read the images.
    with raises(ConfigError, field="dtype of images"):
        jax.eval_shape(predict, variables, make_batch(images=np.uint8(IMAGES)))


def test_images_of_mismatched_answers_are_those_of_the_prompts():
    assert mismatch_answers(batch_of()).images is IMAGES
    assert "images" not in mismatch_answers(batch_of(images=None))
