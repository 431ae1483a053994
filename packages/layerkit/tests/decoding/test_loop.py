"""The decoding loop, with a model whose continuation can be computed by hand.

The next token is the sum of all tokens of the row so far, modulo the vocabulary. The cache holds
the tokens by column, so a slot that is wrong, or read too early, gives wrong sums.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.decoding.cache_rows import row_axes
from layerkit.decoding.decoder import Prompts
from layerkit.decoding.logit_processors import (
    BannedIds,
    CountPenalty,
    MinP,
    MinSteps,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
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
    return extend_prompts(decoder, extend, cache, Prompts(prompts, prompt_lengths, key))


def decode(decoder, prompts, prompt_lengths, *, key=None, extend=extend_sums):
    rows = np.array(prompts, np.int32), np.array(prompt_lengths, np.int32)
    return jitted(*rows, key, decoder=decoder, extend=extend)


def by_hand(prompt, length, width, *, eos_id=None):
    """The row of at most `length` tokens in `width` columns, and how long it is."""
    row = list(prompt)
    while len(row) < length:
        row.append(sum(row) % VOCAB)
        if row[-1] == eos_id:
            break
    return row + [0] * (width - len(row)), len(row)


# Tokens behind a prompt's end are not part of it, whatever they are.
PROMPTS = [[1, 2, 3, 4], [5, 12, 12, 12], [7, 1, 12, 12]]
LENGTHS = [4, 1, 2]


def test_prompts_of_unequal_lengths_are_continued():
    outputs = decode(SampleDecoder(max_decode_steps=6, temperature=0.0), PROMPTS, LENGTHS)
    rows = [by_hand(p[:n], n + 6, 10)[0] for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    np.testing.assert_array_equal(outputs.ids, rows)
    np.testing.assert_array_equal(outputs.lengths, [10, 7, 8])
    assert outputs.ids.dtype == outputs.lengths.dtype == jnp.int32


def test_log_probs_are_of_drawn_tokens_and_zero_in_prompts():
    outputs = decode(SampleDecoder(max_decode_steps=3, temperature=0.0), PROMPTS, LENGTHS)
    sure = SURE - np.log(np.exp(SURE) + (VOCAB - 1))
    beyond = np.arange(7)[None, :] - np.array(LENGTHS)[:, None]
    drawn = (beyond >= 0) & (beyond < 3)
    np.testing.assert_allclose(outputs.log_probs, np.where(drawn, sure, 0.0), atol=1e-6)
    np.testing.assert_allclose(outputs.scores, [3 * sure] * 3, atol=1e-6)


def test_row_ends_with_its_eos_token():
    # 1 2 3 4 → 10 7 1 | 5 → 5 10 7 1 | 7 1 → 8 3 6 12 11 9 5 10 7 1
    decoder = SampleDecoder(max_decode_steps=9, temperature=0.0, eos_id=7)
    outputs = decode(decoder, PROMPTS, LENGTHS)
    rows = [by_hand(p[:n], n + 9, 13, eos_id=7) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
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


def test_loop_stops_when_every_row_has_ended():
    decoder = SampleDecoder(max_decode_steps=50, temperature=0.0, eos_id=7)
    # The prompts in one go, then each column from the end of the shortest prompt (column 0) to the
    # one before the last that was drawn (10).
    assert count_calls(decoder, PROMPTS, LENGTHS) == [0, *range(10)]


def test_row_of_padding_draws_nothing_and_delays_no_row():
    decoder = SampleDecoder(max_decode_steps=50, temperature=0.0, eos_id=7)
    prompts = [PROMPTS[0], [0, 0, 0, 0]]
    outputs = decode(decoder, prompts, [4, 0])
    np.testing.assert_array_equal(outputs.ids[0], by_hand(PROMPTS[0], 54, 54, eos_id=7)[0])
    np.testing.assert_array_equal(outputs.lengths, [6, 0])
    assert not np.any(outputs.ids[1]) and not np.any(outputs.log_probs[1])
    assert count_calls(decoder, prompts, [4, 0]) == [0, 3, 4]


def test_samples_differ_by_column_row_and_key():
    decoder = SampleDecoder(max_decode_steps=400, temperature=1.0)
    run = partial(decode, decoder, [[1], [1]], [1, 1], extend=uniform)
    outputs, again, other = (run(key=jax.random.key(seed)) for seed in (0, 0, 1))
    drawn = np.asarray(outputs.ids[:, 1:])
    # 800 draws from 13 tokens: with 12 degrees of freedom above 32.91 once in a thousand.
    observed = np.bincount(drawn.ravel(), minlength=VOCAB)
    assert np.sum((observed - 800 / 13) ** 2 / (800 / 13)) < 32.91
    # Columns and rows agree by chance once in 13.
    assert np.mean(drawn[:, 1:] == drawn[:, :-1]) < 0.15
    assert np.mean(drawn[0] == drawn[1]) < 0.15
    np.testing.assert_array_equal(outputs.ids, again.ids)
    assert np.any(outputs.ids != other.ids)
    # Probabilities are the model's own, at any temperature.
    np.testing.assert_allclose(outputs.log_probs[:, 1:], -np.log(VOCAB), rtol=1e-5)


def uniform(cache, ids, time_step):
    """A model that has no opinion."""
    del time_step
    return cache, jnp.zeros((*ids.shape, VOCAB))


def test_samples_of_a_row_do_not_depend_on_other_rows():
    decoder, key = SampleDecoder(max_decode_steps=8), jax.random.key(3)
    together = decode(decoder, [[1, 2, 3], [4, 0, 0], [0, 0, 0], [5, 6, 0]], [3, 1, 0, 2], key=key)

    @jax.jit
    def alone(prompt, row_id):
        # Of another width, too.
        cache = jnp.zeros((1, prompt.shape[1] + 8), jnp.int32)
        lengths = jnp.array([prompt.shape[1]])
        rows = Prompts(prompt, lengths, key, row_ids=row_id[None])
        return extend_prompts(decoder, extend_sums, cache, rows)

    for row, prompt in {0: [1, 2, 3], 1: [4], 3: [5, 6]}.items():
        result = alone(jnp.array([prompt]), jnp.int32(row))
        np.testing.assert_array_equal(result.ids[0], together.ids[row, : len(prompt) + 8])
        np.testing.assert_array_equal(result.lengths[0], together.lengths[row])


def test_samples_are_of_processed_logits():
    def drawn(**fields):
        decoder = SampleDecoder(max_decode_steps=1, **fields)
        outputs = decode(decoder, [[1, 2, 3, 4]] * 200, [4] * 200, key=jax.random.key(0))
        return set(np.asarray(outputs.ids)[:, -1].tolist())

    # The right sum, 10, has the logit 9 and all others 0; at 30 times the temperature that is
    # hardly more likely.
    hot, ban = {"temperature": 30.0}, BannedIds(ids=(10, *range(5)))
    assert drawn(**hot) == set(range(VOCAB))
    assert drawn(**hot, top_k=1) == {10}
    assert drawn(processors=(ban,)) == {5, 6, 7, 8, 9, 11, 12}


def test_processors_run_in_order_before_those_of_fields():
    ban, penalty = BannedIds(ids=(1,)), CountPenalty(frequency=1.0)
    decoder = SampleDecoder(
        processors=[ban, penalty],
        eos_id=2,
        min_decode_steps=3,
        temperature=0.5,
        repetition_penalty=1.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
    )
    assert decoder.all_processors() == (
        ban,
        penalty,
        MinSteps(num_steps=3, eos_ids=(2,)),
        RepetitionPenalty(penalty=1.5),
        Temperature(temperature=0.5),
        TopK(k=5),
        TopP(p=0.9),
        MinP(p=0.1),
    )
    assert SampleDecoder(eos_id=2).all_processors() == ()


def test_log_probs_are_of_the_model_before_processors():
    decoder = SampleDecoder(max_decode_steps=4, temperature=0.2, top_k=3, repetition_penalty=2.0)
    outputs = decode(decoder, [[1], [1]], [1, 1], key=jax.random.key(0), extend=uniform)
    np.testing.assert_allclose(outputs.log_probs[:, 1:], -np.log(VOCAB), rtol=1e-5)


def test_any_of_several_eos_tokens_ends_a_row():
    decoder = SampleDecoder(max_decode_steps=9, temperature=0.0, eos_id=(3, 7))
    np.testing.assert_array_equal(decode(decoder, PROMPTS, LENGTHS).lengths, [6, 4, 4])


def test_row_ends_with_a_stop_sequence():
    # 1 2 3 4 → 10 7 1 2 4 8 | 5 → 5 10 7 1 2 4 | 7 1 → 8 3 6 12 11 9 5 10 7
    def lengths(*sequences, **fields):
        decoder = SampleDecoder(
            max_decode_steps=9, temperature=0.0, stop_sequences=sequences, **fields
        )
        return decode(decoder, PROMPTS, LENGTHS).lengths.tolist()

    assert lengths((10, 7, 1)) == [7, 5, 11]  # the last row stops at its limit, one token before
    assert lengths((12, 11), (2,)) == [8, 6, 7]
    # What was not drawn does not count: 4 10 and 5 5 begin in the prompt.
    assert lengths((4, 10), (5, 5), (7, 1, 8)) == [13, 10, 11]
    assert lengths((10, 7, 1), eos_id=7) == [6, 4, 11]
    assert lengths((10, 7), min_decode_steps=3) == [13, 10, 11]


def test_rows_may_have_separate_step_limits():
    decoder = SampleDecoder(max_decode_steps=6, temperature=0.0)
    cache = jnp.zeros((3, 10), jnp.int32)
    limits = jnp.array([2, 0, 60])
    rows = Prompts(jnp.array(PROMPTS), jnp.array(LENGTHS), max_steps=limits)
    outputs = jax.jit(lambda rows: extend_prompts(decoder, extend_sums, cache, rows))(rows)
    np.testing.assert_array_equal(outputs.lengths, [6, 1, 8])
    by_row = zip(PROMPTS, LENGTHS, [2, 0, 6], strict=True)
    expected = [by_hand(p[:n], n + steps, 10)[0] for p, n, steps in by_row]
    np.testing.assert_array_equal(outputs.ids, expected)


def test_several_samples_of_each_prompt():
    def samples(count):
        decoder = SampleDecoder(max_decode_steps=3, temperature=3.0, num_samples=count)
        return jitted_with_axes(np.array(PROMPTS), np.array(LENGTHS), decoder=decoder)

    one, three = samples(1), samples(3)
    assert "candidates" not in one
    many = three.candidates
    assert many.ids.shape == (3, 3, 7) and many.lengths.shape == many.scores.shape == (3, 3)
    # Best first, and the best once more on its own.
    assert np.all(np.diff(many.scores, axis=1) <= 0)
    for name in ("ids", "lengths", "log_probs", "scores"):
        np.testing.assert_array_equal(three[name], many[name][:, 0])
    for row in range(3):
        rows = np.asarray(many.ids[row])
        assert len({tuple(ids) for ids in rows.tolist()}) == 3
        np.testing.assert_array_equal(rows[:, : LENGTHS[row]], [PROMPTS[row][: LENGTHS[row]]] * 3)
        # The only sample is the first of several.
        assert np.asarray(one.ids[row]).tolist() in rows.tolist()
    # Each sample had a cache of its own: the model gives its tokens the probabilities of its sums.
    for ids, log_probs, length in zip(
        many.ids.reshape(9, 7), many.log_probs.reshape(9, 7), np.repeat(LENGTHS, 3), strict=True
    ):
        for column in range(length, length + 3):
            is_sum = ids[column] == np.sum(ids[:column]) % VOCAB
            logit = np.where(is_sum, SURE, 0.0) - np.log(np.exp(SURE) + VOCAB - 1)
            np.testing.assert_allclose(log_probs[column], logit, atol=1e-5)


@partial(jax.jit, static_argnames="decoder")
def jitted_with_axes(prompts, prompt_lengths, *, decoder):
    make = lambda ids: jnp.zeros(  # noqa: E731
        (ids.shape[0], prompts.shape[1] + decoder.max_decode_steps), jnp.int32
    )
    rows = Prompts(prompts, prompt_lengths, jax.random.key(4))
    axes = row_axes(make, prompts)
    return extend_prompts(decoder, extend_sums, make(prompts), rows, cache_axes=axes)


def extend_float_sums(cache, ids, time_step):
    """Return sums like `extend_sums`, but multiply hidden slots by 0, as attention does."""
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


def test_padding_may_have_ids_outside_of_the_vocabulary():
    def continued(prompts):
        decoder = SampleDecoder(max_decode_steps=3, temperature=0.0)
        rows = Prompts(jnp.array(prompts), jnp.array(LENGTHS))
        run = lambda rows: extend_prompts(decoder, extend_float_sums, jnp.zeros((3, 7)), rows)  # noqa: E731
        return jax.jit(run)(rows)

    outputs = continued([[1, 2, 3, 4], [5, -1, -1, -1], [7, 1, VOCAB, -100]])
    assert np.all(np.isfinite(outputs.log_probs))
    rows = [by_hand(p[:n], n + 3, 7)[0] for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    np.testing.assert_array_equal(outputs.ids, rows)
