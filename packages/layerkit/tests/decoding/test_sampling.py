"""Samples follow the softmax, and depend on the key of their row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.decoding.loop import row_keys, sample_token

PROBABILITIES = np.array([0.4, 0.3, 0.2, 0.1])
NUM_DRAWS = 20_000
LOGITS = jnp.tile(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)) + 5.0, (NUM_DRAWS, 1))


def drawn(seed):
    keys = row_keys(jax.random.key(seed), jnp.arange(NUM_DRAWS))
    return sample_token(LOGITS, keys)


def test_samples_follow_the_softmax():
    tokens = drawn(0)
    assert tokens.shape == (NUM_DRAWS,) and tokens.dtype == jnp.int32
    expected = PROBABILITIES * NUM_DRAWS
    observed = np.bincount(tokens, minlength=4)
    # Pearson's statistic with three degrees of freedom is above 16.27 once in a thousand.
    assert np.sum((observed - expected) ** 2 / expected) < 16.27


def test_excluded_tokens_are_never_drawn():
    logits = LOGITS.at[:, 0].set(-jnp.inf)
    tokens = sample_token(logits, row_keys(jax.random.key(0), jnp.arange(NUM_DRAWS)))
    assert set(np.asarray(tokens).tolist()) == {1, 2, 3}


def test_most_likely_token_is_taken_without_keys():
    logits = jnp.array([[0.0, 2.0, 1.0], [3.0, 2.0, 3.0]])
    np.testing.assert_array_equal(sample_token(logits, None), [1, 0])


def test_rows_are_drawn_independently():
    tokens = np.asarray(drawn(1))
    agree = np.mean(tokens[1:] == tokens[:-1])
    # Two draws agree with probability Σp² = 0.3; the deviation of the mean is about 0.004.
    assert abs(agree - 0.3) < 0.02


def test_key_depends_on_row_id_and_not_on_row_index():
    key = jax.random.key(2)
    some, all_ = row_keys(key, jnp.array([7, 3])), row_keys(key, jnp.arange(9))
    assert np.all(jax.random.key_data(some) == jax.random.key_data(all_)[np.array([7, 3])])
