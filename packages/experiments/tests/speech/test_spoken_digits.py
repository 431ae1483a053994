"""Spoken digits: laws of inputs, what a row holds, and the sizes of published Conformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_experiments.speech.librispeech import ConformerS
from layerkit_experiments.speech.spoken_digits import SpokenDigits, speak
from layerkit_inputs.testing import laws


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_spoken_digits_obey_the_laws_of_inputs(law: Any):
    fields = {"batch_size": 4, "num_examples": 6, "min_digits": 1, "max_digits": 1}
    law(lambda **more: SpokenDigits(**{**fields, **more}))


def test_rows_are_strings_of_digits_that_fit():
    source = SpokenDigits(batch_size=8, is_training=True)
    batch = source.get_next()
    texts = source.ids_to_strings(batch.tgt.labels, 9 - batch.tgt.paddings.sum(axis=1).astype(int))
    assert all(3 <= len(text.split()) <= 5 for text in texts)
    assert batch.src.lengths.max() < source.max_samples and np.abs(batch.src.waveform).max() <= 1
    other = SpokenDigits(batch_size=8, num_examples=8).get_next()
    assert not np.array_equal(batch.src.waveform, other.src.waveform)
    # The slowest speaker of the longest digits fits too.
    slow = max(len(speak([7] * 5, np.random.default_rng(n), sample_rate=8000)) for n in range(50))
    assert slow < source.max_samples


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("ConformerS", 10.3e6),
        ("ConformerM", 30.7e6),
        ("ConformerL", 118.8e6),
        ("ConformerXLBestRq", 0.6e9),
    ],
)
def test_sizes_are_about_those_of_the_paper(name: str, published: float, num_params: Any):
    # The predictor and the joint network differ; see the module.
    assert abs(num_params(f"speech.librispeech.{name}") / published - 1) < 0.15


def test_tokenizer_larger_than_the_vocabulary_raises(raises: Any):
    with raises(ConfigError, field="VOCAB_SIZE"):
        ConformerS(VOCAB_SIZE=258).validate()
    ConformerS(VOCAB_SIZE=258, LOSS="best_rq").validate()
