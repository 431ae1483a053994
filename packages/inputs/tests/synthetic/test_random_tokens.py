"""SyntheticInput: rows by number, with an entropy that can be counted."""

from __future__ import annotations

import collections
import itertools
import math

import numpy as np
import pytest

from layerkit_inputs import LocalText, SyntheticInput
from layerkit_inputs.base.host_batches import spec_of


def tokens_of(source, num_batches):
    batches = [source.get_next() for _ in range(num_batches)]
    return np.concatenate([np.concatenate([b.ids, b.labels[:, -1:]], 1) for b in batches])


def test_fields_are_those_of_local_text(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"some text " * 20 + name.encode())
    text = LocalText(batch_size=2, seq_length=8, paths=[str(tmp_path)])
    made = SyntheticInput(batch_size=2, seq_length=8, num_examples=4)
    assert spec_of(made.get_next()) == spec_of(text.get_next())


def test_labels_are_the_next_tokens_and_all_count():
    batch = SyntheticInput(batch_size=3, vocab_size=7, seq_length=9, is_training=True).get_next()
    np.testing.assert_array_equal(batch.ids[:, 1:], batch.labels[:, :-1])
    assert batch.weights.all() and not batch.paddings.any() and (batch.segment_ids == 1).all()
    np.testing.assert_array_equal(batch.segment_pos, np.tile(np.arange(9), (3, 1)))
    assert batch.ids.min() >= 0 and batch.labels.max() < 7


def test_without_noise_each_token_has_one_successor_on_one_cycle():
    source = SyntheticInput(batch_size=8, vocab_size=11, seq_length=30, noise=0.0, is_training=True)
    tokens = tokens_of(source, 4)
    successor = {}
    for row in tokens:
        for token, following in itertools.pairwise(row):
            assert successor.setdefault(int(token), int(following)) == following
    walk, at = [], 0
    for _ in range(11):
        walk.append(at)
        at = successor[at]
    assert at == 0 and sorted(walk) == list(range(11))
    assert source.baselines() == {"entropy of the source": 0.0}


@pytest.mark.parametrize("fields", [{"noise": 0.3}, {"noise": 1.0}, {"learnable": False}])
def test_the_stated_entropy_is_that_of_the_tokens(fields):
    source = SyntheticInput(batch_size=64, vocab_size=5, seq_length=200, is_training=True, **fields)
    tokens = tokens_of(source, 8)
    pairs = collections.Counter(zip(tokens[:, :-1].ravel(), tokens[:, 1:].ravel(), strict=True))
    firsts = collections.Counter(tokens[:, :-1].ravel())
    total = sum(pairs.values())
    measured = -sum(n / total * math.log(n / firsts[pair[0]]) for pair, n in pairs.items())
    (stated,) = source.baselines().values()
    assert measured == pytest.approx(stated, abs=0.01)


def test_rows_differ_by_number_seed_and_between_training_and_evaluation():
    rows = [
        tuple(row)
        for seed in (0, 1)
        for fields in ({"is_training": True}, {"num_examples": 8})
        for row in tokens_of(
            SyntheticInput(batch_size=8, seq_length=32, input_random_seed=seed, **fields), 1
        )
    ]
    assert len(set(rows)) == 32


@pytest.mark.parametrize("learnable", [True, False])
def test_a_row_is_the_same_whatever_is_drawn_with_it(learnable):
    source = SyntheticInput(batch_size=1, seq_length=6, is_training=True, learnable=learnable)
    together = source._read_rows(np.arange(8))
    picked = np.array([5, 6, 2, 7, 0])
    alone = source._read_rows(picked)
    np.testing.assert_array_equal(alone.ids, together.ids[picked])
    np.testing.assert_array_equal(alone.labels, together.labels[picked])
    assert len(np.unique(together.ids, axis=0)) == 8


def test_training_on_a_number_of_examples_repeats_them_in_another_order():
    source = SyntheticInput(batch_size=6, seq_length=16, num_examples=6, is_training=True)
    first, second = (source.get_next().ids.tolist() for _ in range(2))
    assert first != second and sorted(first) == sorted(second)


def test_ids_are_shown_as_numbers():
    source = SyntheticInput(batch_size=1, is_training=True)
    assert source.ids_to_strings(np.array([[3, 1, 4], [1, 5, 9]]), [2, 3]) == ["3 1", "1 5 9"]
