"""Captions: laws of the input, pictures and captions, held-out pairs, and metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerkit_experiments.vision.generated_scenes import (
    COLORS,
    IMAGE_ID,
    SHAPES,
    GeneratedScenes,
    WordTokenizer,
)
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.testing import laws


@pytest.mark.parametrize("form", ["captions", "prompts"])
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_scenes_obey_the_laws_of_inputs(law: Any, form: str):
    law(
        lambda **more: GeneratedScenes(**{"batch_size": 4, "num_examples": 6, "form": form, **more})
    )


def test_rows_hold_placeholders_and_a_caption_with_a_loss():
    source = GeneratedScenes(batch_size=64, is_training=True)
    batch = source.get_next()
    assert (batch.ids == IMAGE_ID).sum(axis=1).tolist() == [16] * 64
    assert not batch.weights[batch.labels == IMAGE_ID].any()
    texts = source.ids_to_strings(batch.labels * batch.weights.astype(int), [64] * 64)
    captions = [caption for caption, _ in source._scenes(np.arange(64))]
    assert texts == captions
    config = GeneratedScenes.HParams.config()
    assert spec_of(GeneratedScenes.blank_batch(config, 64)) == spec_of(batch)
    prompts = GeneratedScenes(batch_size=2, num_examples=2, form="prompts").get_next()
    assert prompts.prompt_lengths.tolist() == [17, 17]


def test_words_are_tokens():
    text = "red circle above white diamond"
    tokenizer = WordTokenizer()
    ids = tokenizer.encode(text)
    assert (len(ids), ids.min() > IMAGE_ID, ids.max() < tokenizer.vocab_size) == (5, True, True)
    assert tokenizer.decode([1, *ids, IMAGE_ID, 2, 0]) == text


def test_the_first_shape_of_a_caption_is_left_or_above_and_has_its_color():
    source = GeneratedScenes(batch_size=1, is_training=True)
    for caption, picture in source._scenes(np.arange(40)):
        color, _, relation, *_ = caption.split()
        half = picture[:, :16] if relation == "left-of" else picture[:16]
        distance = np.abs((half + 1) / 2 - np.array(COLORS[color]))
        assert (distance.max(axis=-1) < 0.15).sum() > 12, caption


def test_training_shows_no_held_out_pair_and_all_words():
    def pairs(*, is_training: bool) -> set[str]:
        source = GeneratedScenes(batch_size=1, num_examples=1, is_training=is_training)
        captions = (caption for caption, _ in source._scenes(np.arange(400)))
        return {caption.replace("above", "left-of") for caption in captions}

    train, heldout = pairs(is_training=True), pairs(is_training=False)
    assert not train & heldout
    words = {word for caption in train for word in caption.split()}
    assert {*COLORS, *SHAPES} < words


def test_metrics_are_shares_of_right_words():
    source = GeneratedScenes(batch_size=2, num_examples=2)
    first, second = (caption for caption, _ in source._scenes(np.arange(2)))
    assert set(source.prediction_metrics({0: first, 1: second}).values()) == {1.0}
    color = first.split()[0]
    other = first.replace(color, next(c for c in COLORS if c not in first), 1)
    metrics = source.prediction_metrics({0: other, 1: ""})
    assert metrics == {"color": 0.25, "shape": 0.5, "relation": 0.5, "caption": 0.0}
    assert not source.prediction_metrics({})
