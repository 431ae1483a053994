"""GeneratedDigits: any row anywhere, every digit in every hand, and something to learn."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit_inputs import GeneratedDigits
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.synthetic.generated_digits import NUM_CLASSES, glyphs
from layerkit_inputs.testing import laws


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param({"is_training": True}, marks=pytest.mark.slow, id="training"),
        pytest.param({"num_examples": 9}, id="epoch"),
    ],
)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, mode):
    law(lambda **more: GeneratedDigits(**{"batch_size": 4, **mode, **more}))


def test_glyphs_differ():
    drawn = glyphs().reshape(-1, *glyphs().shape[2:])
    assert len(drawn) == 3 * NUM_CLASSES
    assert len({glyph.tobytes() for glyph in drawn}) == len(drawn)


def test_digits_come_equally_often_and_look_like_themselves():
    batch = GeneratedDigits(batch_size=2000, is_training=True).get_next()
    assert batch.inputs.shape == (2000, 28, 28, 1) and batch.inputs.dtype == np.float32
    assert batch.inputs.min() >= 0.0 and batch.inputs.max() <= 1.0
    counts = np.bincount(batch.labels, minlength=NUM_CLASSES)
    assert counts.min() > 150 and counts.sum() == 2000
    # Nearest neighbors of the first half tell the second half far above chance.
    flat = batch.inputs.reshape(2000, -1)
    known, asked = flat[:1000], flat[1000:]
    distances = (known**2).sum(1) - 2 * asked @ known.T
    result = batch.labels[:1000][distances.argmin(axis=1)]
    assert 0.6 < (result == batch.labels[1000:]).mean() < 1.0


def test_held_out_rows_are_others():
    train = GeneratedDigits(batch_size=8, is_training=True).get_next()
    heldout = GeneratedDigits(batch_size=8, num_examples=8).get_next()
    assert not (train.inputs == heldout.inputs).all(axis=(1, 2, 3)).any()


def test_blank_batch_has_the_spec_of_a_drawn_batch():
    config = GeneratedDigits.HParams.config(is_training=True)
    batch = GeneratedDigits(batch_size=3, is_training=True).get_next()
    assert spec_of(GeneratedDigits.blank_batch(config, 3)) == spec_of(batch)
