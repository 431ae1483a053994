"""Tests of MaskedLmAugmenter: rates and positions of masked tokens."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from layerkit.layers.basic.masked_lm_augmenter import MaskedLmAugmenter

KEY = jax.random.key(0)
VOCAB, MASK = 1000, 999


def augmenter(**fields):
    return MaskedLmAugmenter(vocab_size=VOCAB, mask_token_id=MASK, **fields)


def hide(layer, ids, can_mask, key=KEY):
    run = jax.jit(partial(layer.apply, {}, rngs={"random": key}))
    return run(ids, can_mask=can_mask)


def hide_in_evaluation(ids, can_mask, **fields):
    layer = augmenter(train=False, **fields)
    return jax.jit(partial(layer.apply, {}))(ids, can_mask=can_mask)


def test_masking_follows_the_rates_of_bert_and_changes_only_chosen_tokens():
    random = np.random.default_rng(0)
    ids = random.integers(0, MASK, (200, 500)).astype(np.int32)
    can_mask = random.random(ids.shape) < 0.5
    hidden = hide(augmenter(train=True), ids, can_mask)
    chosen = np.asarray(hidden.weights) == 1.0
    assert not chosen[~can_mask].any()
    np.testing.assert_array_equal(np.asarray(hidden.ids)[~chosen], ids[~chosen])
    # 50,000 draws: three standard deviations are 0.005 of them.
    assert abs(chosen[can_mask].mean() - 0.15) < 0.005
    seen, were = np.asarray(hidden.ids)[chosen], ids[chosen]
    assert abs((seen == MASK).mean() - 0.8) < 0.015
    assert abs((seen == were).mean() - 0.1) < 0.011
    replaced = seen[(seen != MASK) & (seen != were)]
    assert abs(replaced.size / seen.size - 0.1) < 0.011
    assert abs(replaced.mean() - VOCAB / 2) < 30


def test_evaluation_masks_are_fixed_and_training_masks_are_random():
    ids = np.arange(400, dtype=np.int32).reshape(4, 100)
    everywhere = np.ones(ids.shape, bool)
    first, second = (hide_in_evaluation(ids, everywhere) for _ in range(2))
    np.testing.assert_array_equal(first.ids, second.ids)
    other = hide_in_evaluation(ids, everywhere, evaluation_seed=1)
    assert (first.ids != other.ids).any()
    training = [hide(augmenter(train=True), ids, everywhere, jax.random.key(k)) for k in (0, 1)]
    assert (training[0].ids != training[1].ids).any()


def test_evaluation_masks_of_a_row_do_not_depend_on_its_batch():
    ids = np.random.default_rng(0).integers(0, MASK, (6, 50)).astype(np.int32)
    everywhere = np.ones(ids.shape, bool)
    whole = hide_in_evaluation(ids, everywhere)
    for rows in (slice(0, 2), slice(3, 4), slice(5, None, -1)):
        part = hide_in_evaluation(ids[rows], everywhere[rows])
        np.testing.assert_array_equal(part.ids, whole.ids[rows])
        np.testing.assert_array_equal(part.weights, whole.weights[rows])
    assert len({row.tobytes() for row in np.asarray(whole.weights)}) == 6
