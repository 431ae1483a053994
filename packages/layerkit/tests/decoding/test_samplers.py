"""Draws follow the distribution that the temperature says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.decoding.samplers import sample_token

PROBABILITIES = np.array([0.4, 0.3, 0.2, 0.1])
NUM_DRAWS = 20_000
LOGITS = jnp.tile(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)) + 5.0, (NUM_DRAWS, 1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_that_temperature(temperature):
    tokens = sample_token(LOGITS, jax.random.key(0), temperature=temperature)
    assert tokens.shape == (NUM_DRAWS,) and tokens.dtype == jnp.int32
    expected = PROBABILITIES ** (1.0 / temperature)
    expected *= NUM_DRAWS / expected.sum()
    observed = np.bincount(tokens, minlength=4)
    # Pearson's statistic with three degrees of freedom is above 16.27 once in a thousand.
    assert np.sum((observed - expected) ** 2 / expected) < 16.27


def test_temperature_zero_is_greedy_and_needs_no_key():
    logits = jnp.array([[0.0, 2.0, 1.0], [3.0, 2.0, 3.0]])
    np.testing.assert_array_equal(sample_token(logits, None, temperature=0.0), [1, 0])


def test_rows_are_drawn_independently():
    tokens = np.asarray(sample_token(LOGITS, jax.random.key(1), temperature=1.0))
    agree = np.mean(tokens[1:] == tokens[:-1])
    # Two draws agree with probability Σp² = 0.3; the deviation of the mean is about 0.004.
    assert abs(agree - 0.3) < 0.02


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError) as caught:
        sample_token(LOGITS, None, temperature=0.7)
    assert str(caught.value) == "temperature=0.7 needs a random key (only 0 needs none)"
    with pytest.raises(ValueError) as caught:
        sample_token(LOGITS, None, temperature=-1.0)
    assert str(caught.value) == "temperature=-1.0 must not be negative (0 is greedy)"
