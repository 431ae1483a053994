"""The decoding loop, with a model whose right continuation can be worked out by hand.

The next token is the sum of all tokens of the row so far, modulo the vocabulary. The cache holds
the tokens by column, so a slot that is wrong, or read too early, gives wrong sums.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import build
from layerkit.decoding.loop import SampleDecoder, extend_prompts

VOCAB = 13
SURE = 9.0  # logit of the right token; the others have 0


def extend_sums(cache, ids, time_step):
    """One step of the model of sums; `cache` int32 `[batch, max_length]`."""
    cache = jax.lax.dynamic_update_slice_in_dim(cache, ids, time_step, axis=1)
    columns = jnp.arange(cache.shape[1])
    own = time_step + jnp.arange(ids.shape[1])
    visible = columns[None, :] <= own[:, None]  # [t, max_length]
    sums = jnp.sum(jnp.where(visible[None], cache[:, None], 0), axis=-1) % VOCAB
    return cache, SURE * jax.nn.one_hot(sums, VOCAB)


@partial(jax.jit, static_argnames=("decoder", "extend"))
def jitted(prompts, prompt_lengths, key, *, decoder, extend):
    cache = jnp.zeros((prompts.shape[0], prompts.shape[1] + decoder.max_decode_steps), jnp.int32)
    rows = {"prompts": prompts, "prompt_lengths": prompt_lengths}
    return extend_prompts(decoder, extend, cache, **rows, key=key)


def decode(decoder, prompts, prompt_lengths, *, key=None, extend=extend_sums):
    rows = np.array(prompts, np.int32), np.array(prompt_lengths, np.int32)
    return jitted(*rows, key, decoder=decoder, extend=extend)


def by_hand(prompt, length, *, eos_id=None):
    """The row up to column `length`, and how long it is."""
    row = list(prompt)
    while len(row) < length:
        row.append(sum(row) % VOCAB)
        if row[-1] == eos_id:
            break
    return row + [0] * (length - len(row)), len(row)


# Tokens behind a prompt's end are not part of it, whatever they are.
PROMPTS = [[1, 2, 3, 4], [5, 12, 12, 12], [7, 1, 12, 12]]
LENGTHS = [4, 1, 2]


def test_prompts_of_unequal_lengths_are_continued():
    outputs = decode(SampleDecoder(max_decode_steps=6, temperature=0.0), PROMPTS, LENGTHS)
    rows = [by_hand(p[:n], 10) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    np.testing.assert_array_equal(outputs.ids, [row for row, _ in rows])
    np.testing.assert_array_equal(outputs.lengths, [10, 10, 10])
    assert outputs.ids.dtype == outputs.lengths.dtype == jnp.int32


def test_log_probs_are_those_of_what_was_drawn_and_zero_in_prompts():
    outputs = decode(SampleDecoder(max_decode_steps=3, temperature=0.0), PROMPTS, LENGTHS)
    sure = SURE - np.log(np.exp(SURE) + (VOCAB - 1))
    drawn = np.arange(7)[None, :] >= np.array(LENGTHS)[:, None]
    np.testing.assert_allclose(outputs.log_probs, np.where(drawn, sure, 0.0), atol=1e-6)


def test_a_row_ends_with_the_token_that_ends_it():
    # 1 2 3 4 → 10 7 1 | 5 → 5 10 7 1 | 7 1 → 8 3 6 12 11 9 5 10 7 1
    decoder = SampleDecoder(max_decode_steps=9, temperature=0.0, eos_id=7)
    outputs = decode(decoder, PROMPTS, LENGTHS)
    rows = [by_hand(p[:n], 13, eos_id=7) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    assert [length for _, length in rows] == [6, 4, 11]
    np.testing.assert_array_equal(outputs.ids, [row for row, _ in rows])
    # The 7 with which the last prompt begins was not drawn, and ends nothing.
    np.testing.assert_array_equal(outputs.lengths, [6, 4, 11])
    drawn = np.asarray(outputs.log_probs) != 0.0
    np.testing.assert_array_equal(drawn.sum(axis=1), [6 - 4, 4 - 1, 11 - 2])


def count_calls(decoder, prompts, prompt_lengths):
    calls = []

    def extend(cache, ids, time_step):
        jax.debug.callback(lambda step: calls.append(int(step)), time_step)
        return extend_sums(cache, ids, time_step)

    jax.block_until_ready(decode(decoder, prompts, prompt_lengths, extend=extend))
    jax.effects_barrier()
    return sorted(calls)


def test_the_loop_stops_when_every_row_has_ended():
    decoder = SampleDecoder(max_decode_steps=50, temperature=0.0, eos_id=7)
    # The prompts in one go, the last token of the shortest (column 0), and then each column up to
    # the last that was drawn, 10.
    assert count_calls(decoder, PROMPTS, LENGTHS) == [0, *range(11)]


def test_a_row_that_fills_up_the_batch_draws_nothing_and_delays_nobody():
    decoder = SampleDecoder(max_decode_steps=50, temperature=0.0, eos_id=7)
    prompts = [PROMPTS[0], [0, 0, 0, 0]]
    outputs = decode(decoder, prompts, [4, 0])
    np.testing.assert_array_equal(outputs.ids[0], by_hand(PROMPTS[0], 54, eos_id=7)[0])
    np.testing.assert_array_equal(outputs.lengths, [6, 0])
    assert not np.any(outputs.ids[1]) and not np.any(outputs.log_probs[1])
    assert count_calls(decoder, prompts, [4, 0]) == [0, 3, 4, 5]


def test_a_batch_of_nothing_but_filling_ends_at_once():
    outputs = decode(SampleDecoder(max_decode_steps=5, temperature=0.0), [[1, 2], [3, 4]], [0, 0])
    assert not np.any(outputs.ids) and not np.any(outputs.lengths)


def test_prompts_of_width_one():
    outputs = decode(SampleDecoder(max_decode_steps=4, temperature=0.0), [[5], [1]], [1, 1])
    np.testing.assert_array_equal(outputs.ids, [[5, 5, 10, 7, 1], [1, 1, 2, 4, 8]])


def test_one_step_is_enough():
    outputs = decode(SampleDecoder(max_decode_steps=1, temperature=0.0), [[5, 5]], [2])
    np.testing.assert_array_equal(outputs.ids, [[5, 5, 10]])


def test_draws_differ_by_column_row_and_key_and_repeat_with_the_same_key():
    def uniform(cache, ids, time_step):
        return cache, jnp.zeros((*ids.shape, VOCAB))

    decoder = SampleDecoder(max_decode_steps=400, temperature=1.0)
    run = lambda seed: decode(  # noqa: E731
        decoder, [[1], [1]], [1, 1], key=jax.random.key(seed), extend=uniform
    )
    outputs = run(0)
    drawn = np.asarray(outputs.ids[:, 1:])
    # 800 draws from 13 tokens: with 12 degrees of freedom above 32.91 once in a thousand.
    observed = np.bincount(drawn.ravel(), minlength=VOCAB)
    assert np.sum((observed - 800 / 13) ** 2 / (800 / 13)) < 32.91
    # Columns and rows agree by chance once in 13.
    assert np.mean(drawn[:, 1:] == drawn[:, :-1]) < 0.15
    assert np.mean(drawn[0] == drawn[1]) < 0.15
    np.testing.assert_array_equal(outputs.ids, run(0).ids)
    assert np.any(outputs.ids != run(1).ids)
    # Probabilities are the model's own, at any temperature.
    np.testing.assert_allclose(outputs.log_probs[:, 1:], -np.log(VOCAB), rtol=1e-5)


def test_decoders_are_values():
    config = SampleDecoder.HParams.config(max_decode_steps=3)
    assert build(config) == SampleDecoder(max_decode_steps=3)
    assert hash(build(config)) == hash(SampleDecoder(max_decode_steps=3))
    assert build(config) != SampleDecoder(max_decode_steps=4)
    assert SampleDecoder() != object()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_decode_steps": 0}, "max_decode_steps=0 must be at least 1"),
        ({"temperature": -0.5}, "temperature=-0.5 must not be negative (0 is greedy)"),
    ],
)
def test_wrong_fields_are_refused(fields, text):
    with pytest.raises(ValueError) as caught:
        SampleDecoder(**fields)
    assert str(caught.value) == text


def extend_float_sums(cache, ids, time_step):
    """The model of sums as attention has it: hidden slots are multiplied by 0."""
    known = (ids >= 0) & (ids < VOCAB)
    cache = jax.lax.dynamic_update_slice_in_dim(
        cache, jnp.where(known, ids, jnp.nan), time_step, axis=1
    )
    own = time_step + jnp.arange(ids.shape[1])
    visible = jnp.arange(cache.shape[1])[None, :] <= own[:, None]  # [t, max_length]
    sums = jnp.sum(visible[None] * cache[:, None], axis=-1) % VOCAB
    return cache, jnp.where(
        jnp.isnan(sums)[..., None], jnp.nan, SURE * jax.nn.one_hot(sums.astype(int), VOCAB)
    )


def test_padding_may_hold_ids_that_the_model_does_not_have():
    def continued(prompts):
        decoder = SampleDecoder(max_decode_steps=3, temperature=0.0)
        rows = {"prompts": jnp.array(prompts), "prompt_lengths": jnp.array(LENGTHS)}
        return extend_prompts(decoder, extend_float_sums, jnp.zeros((3, 7)), **rows, key=None)

    outputs = continued([[1, 2, 3, 4], [5, -1, -1, -1], [7, 1, VOCAB, -100]])
    assert np.all(np.isfinite(outputs.log_probs))
    rows = [by_hand(p[:n], 7)[0] for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    np.testing.assert_array_equal(outputs.ids, rows)


def test_a_length_beyond_the_row_is_that_of_the_row():
    decoder = SampleDecoder(max_decode_steps=2, temperature=0.0)
    found, expected = (decode(decoder, [[1, 2]], [length]) for length in (5, 2))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found.lengths.tolist() == [4]


def test_fields_of_a_subclass_tell_decoders_apart():
    class Cautious(SampleDecoder):
        top_k: int = 1

    assert Cautious(top_k=2) == Cautious(top_k=2)
    assert hash(Cautious(top_k=2)) == hash(Cautious(top_k=2))
    assert Cautious(top_k=2) != Cautious(top_k=3) and Cautious() != SampleDecoder()
