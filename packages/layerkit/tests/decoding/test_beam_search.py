"""Beam search compared with enumeration, a search by hand, and Hugging Face transformers.

The model's logits come from a table, at a place that all tokens of the row decide. It reads them
from the cache, so beams whose cache is another one's get wrong scores.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.decoding.beam_search import BeamSearch
from layerkit.decoding.cache_rows import row_axes
from layerkit.decoding.decoder import Prompts
from layerkit.decoding.logit_processors import BannedIds
from layerkit.decoding.loop import SampleDecoder, extend_prompts

VOCAB, PLACES = 4, 97
TABLE = np.random.default_rng(0).normal(0.0, 1.5, (PLACES, VOCAB)).astype(np.float32)


def extend_table(cache, ids, time_step, table=TABLE):
    """One step of the model; `cache` int32 `[1, rows, max_length]`, as of one repeated layer."""
    cache = jax.lax.dynamic_update_slice_in_dim(cache, ids[None], time_step, axis=2)
    columns = jnp.arange(cache.shape[2])
    own = time_step + jnp.arange(ids.shape[1])
    visible = jnp.where(columns <= own[:, None], cache[0][:, None] + 1, 0)  # [rows, t, max_length]
    return cache, jnp.asarray(table)[jnp.sum(visible * (7 * columns + 3), axis=-1) % PLACES]


def log_probs_after(row):
    """What the model says after a list of tokens, `[vocab]`."""
    place = sum((token + 1) * (7 * column + 3) for column, token in enumerate(row)) % PLACES
    logits = TABLE[place].astype(np.float64)
    return logits - np.log(np.sum(np.exp(logits)))


@partial(jax.jit, static_argnames=("decoder", "extend"))
def jitted(prompts, prompt_lengths, *, decoder, extend):
    def make_cache(ids):
        max_length = prompts.shape[1] + decoder.max_decode_steps
        return jnp.zeros((1, ids.shape[0], max_length), jnp.int32)

    rows, axes = Prompts(prompts, prompt_lengths), row_axes(make_cache, prompts)
    return extend_prompts(decoder, extend, make_cache(prompts), rows, cache_axes=axes)


def search(decoder, prompts, prompt_lengths, *, extend=extend_table):
    rows = np.array(prompts, np.int32), np.array(prompt_lengths, np.int32)
    return jitted(*rows, decoder=decoder, extend=extend)


PROMPTS = [[1, 2, 3], [3, 0, 0], [0, 1, 0], [0, 0, 0]]
LENGTHS = [3, 1, 2, 0]


def normalized(total, length, alpha):
    return total / ((length + 5) / 5) ** alpha


def check(outputs, row, prompt, expected):
    """`expected`: (score, continuation) of each result, best first."""
    results = outputs.candidates if "candidates" in outputs else None
    for place, (score, continuation) in enumerate(expected):
        result = {
            name: outputs[name][row] if results is None else results[name][row, place]
            for name in ("ids", "lengths", "log_probs", "scores")
        }
        ids = [*prompt, *continuation]
        np.testing.assert_array_equal(result["ids"], ids + [0] * (len(result["ids"]) - len(ids)))
        assert result["lengths"] == len(ids)
        np.testing.assert_allclose(result["scores"], score, rtol=1e-5)
        log_probs = np.zeros(len(result["ids"]))
        for column in range(len(prompt), len(ids)):
            log_probs[column] = log_probs_after(ids[:column])[ids[column]]
        np.testing.assert_allclose(result["log_probs"], log_probs, rtol=1e-4, atol=1e-5)


def all_continuations(prompt, steps, eos_ids, alpha):
    """Every continuation that ends with an end token or the last step; (score, tokens)."""
    result = []
    for length in range(1, steps + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ends = tokens[-1] in eos_ids or length == steps
            if not ends or any(token in eos_ids for token in tokens[:-1]):
                continue
            total = sum(
                log_probs_after([*prompt, *tokens[:i]])[token] for i, token in enumerate(tokens)
            )
            result.append((normalized(total, length, alpha), list(tokens)))
    return sorted(result, reverse=True)


@pytest.mark.parametrize(("eos_id", "alpha"), [(2, 0.8), ((1, 3), 2.5), (None, 0.0)])
def test_beam_as_wide_as_the_space_equals_enumeration(eos_id, alpha):
    decoder = BeamSearch(
        beam_size=64, num_results=6, max_decode_steps=3, eos_id=eos_id, length_norm_alpha=alpha
    )
    outputs = search(decoder, PROMPTS, LENGTHS)
    for row in range(3):
        prompt = PROMPTS[row][: LENGTHS[row]]
        check(outputs, row, prompt, all_continuations(prompt, 3, decoder.eos_ids, alpha)[:6])
    # The first result again, on its own.
    for name, value in outputs.candidates.items():
        np.testing.assert_array_equal(outputs[name], value[:, 0])


def search_by_hand(prompt, decoder):
    """The same search with lists, to the last step whatever is found before."""
    going, ended = [(0.0, [])], []
    for step in range(decoder.max_decode_steps):
        candidates = [
            (total + gain, [*tokens, token])
            for total, tokens in going
            for token, gain in enumerate(log_probs_after([*prompt, *tokens]))
        ]
        is_last = step == decoder.max_decode_steps - 1
        ends = [is_last or tokens[-1] in decoder.eos_ids for _, tokens in candidates]
        ended += [
            (normalized(total, step + 1, decoder.length_norm_alpha), tokens)
            for (total, tokens), end in zip(candidates, ends, strict=True)
            if end
        ]
        open_ = [c for c, end in zip(candidates, ends, strict=True) if not end]
        going = sorted(open_, reverse=True)[: decoder.beam_size]
    return sorted(ended, reverse=True)[: decoder.num_results]


@pytest.mark.parametrize(
    ("beam_size", "num_results", "eos_id"), [(1, 1, None), (2, 1, 3), (3, 3, 2)]
)
def test_narrow_beams_equal_a_search_by_hand(beam_size, num_results, eos_id):
    decoder = BeamSearch(
        beam_size=beam_size, num_results=num_results, max_decode_steps=7, eos_id=eos_id
    )
    outputs = search(decoder, PROMPTS, LENGTHS)
    ends_early = False
    for row in range(3):
        prompt = PROMPTS[row][: LENGTHS[row]]
        expected = search_by_hand(prompt, decoder)
        check(outputs, row, prompt, expected)
        ends_early |= any(len(tokens) < 7 for _, tokens in expected)
    assert ends_early == (eos_id is not None)
    # A row that only fills up the batch.
    assert not np.any(outputs.ids[3]) and outputs.lengths[3] == 0


def test_search_stops_when_no_better_beam_is_possible():
    """The end is almost sure after the second token, and everything else all but impossible."""
    calls = []

    def extend(cache, ids, time_step):
        jax.debug.callback(lambda step: calls.append(int(step)), time_step)
        own = time_step + jnp.arange(ids.shape[1])
        end = jnp.where(own >= 3, 20.0, -20.0)[:, None] * (jnp.arange(VOCAB) == 2)
        return cache, jnp.broadcast_to(end, (*ids.shape, VOCAB))

    decoder = BeamSearch(beam_size=3, max_decode_steps=50, eos_id=2)
    outputs = search(decoder, [[1, 1, 1]], [3], extend=extend)
    jax.effects_barrier()
    # The prompts; then the columns 3 and 4 are chosen from what the tokens at 2 and 3 say.
    assert sorted(calls) == [0, 2, 3]
    assert outputs.ids[0, 4] == 2 and outputs.lengths[0] == 5


def test_search_ends_if_scores_are_nan():
    def extend(cache, ids, time_step):
        cache, logits = extend_table(cache, ids, time_step)
        return cache, jnp.full_like(logits, jnp.nan)

    decoder = BeamSearch(max_decode_steps=4, beam_size=2, eos_id=3)
    outputs = search(decoder, [[1, 2]], [2], extend=extend)
    assert np.isnan(outputs.scores).all()


def test_missing_results_have_score_minus_infinity():
    decoder = BeamSearch(beam_size=6, num_results=6, max_decode_steps=1)
    result = search(decoder, PROMPTS, LENGTHS).candidates
    assert np.all(np.isfinite(result.scores[:3, :4])) and np.all(result.scores[:, 4:] == -np.inf)
    np.testing.assert_array_equal(result.lengths[:3, 4:], np.array(LENGTHS[:3])[:, None] * [1, 1])
    np.testing.assert_array_equal(result.ids[0, 5], [1, 2, 3, 0])


def test_processors_and_min_decode_steps_change_the_search():
    # Without the token 0 there are three, and what is left of their probabilities is all there is.
    decoder = BeamSearch(
        beam_size=32,
        max_decode_steps=3,
        min_decode_steps=2,
        eos_id=2,
        processors=(BannedIds(ids=(0,)),),
        length_norm_alpha=0.0,
    )
    outputs = search(decoder, PROMPTS, LENGTHS)
    for row in range(3):
        prompt, best = PROMPTS[row][: LENGTHS[row]], (-np.inf, [])
        for tokens in itertools.product((1, 3), (1, 3), (1, 2, 3)):
            total, so_far = 0.0, [*prompt]
            for place, token in enumerate(tokens):
                left = [1, 2, 3] if place == 2 else [1, 3]
                log_probs = log_probs_after(so_far)
                total += log_probs[token] - np.log(np.sum(np.exp(log_probs[left])))
                so_far.append(token)
            best = max(best, (total, list(tokens)))
        check(outputs, row, prompt, [best])


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("ended", {"beam_size": 3, "max_decode_steps": 4}),
        pytest.param(
            "minimum",
            {"beam_size": 4, "max_decode_steps": 5, "min_decode_steps": 3},
            marks=pytest.mark.slow,
        ),
        ("two_tokens", {"beam_size": 4, "max_decode_steps": 5, "tokens_per_beam": 2}),
    ],
)
def test_fields_of_praxis_give_its_ended_beams(praxis, case, fields):
    reference = praxis(f"beam_search_{case}")
    fields = {"tokens_per_beam": fields["beam_size"], "eos_id": 2, **fields}
    num_results = fields["beam_size"]
    decoder = BeamSearch(num_results=num_results, ends_at_limit=False, renormalize=False, **fields)
    table = np.array(reference["table"], np.float32)
    extend = partial(extend_table, table=table)
    rows = reference["prompts"], reference["prompt_lengths"]
    result = search(decoder, *rows, extend=extend).candidates
    np.testing.assert_array_equal(result.ids, reference["ids"])
    np.testing.assert_array_equal(result.lengths, reference["lengths"])
    np.testing.assert_allclose(result.scores, reference["scores"], rtol=1e-5)
    # Without the fields, open beams of the last step or renormalized ones rank above some.
    ours = search(BeamSearch(num_results=num_results, **fields), *rows, extend=extend).candidates
    assert np.any(np.asarray(ours.scores) > np.array(reference["scores"]) + 1e-3)


def test_max_length_counts_the_steps_over_the_prompt(praxis):
    reference = praxis("greedy_steps")
    extend = partial(extend_table, table=np.array(reference["table"], np.float32))
    greedy = SampleDecoder(max_decode_steps=6, max_length=4 + 1, temperature=0.0)
    result = search(greedy, reference["prompts"], reference["prompt_lengths"], extend=extend)
    np.testing.assert_array_equal(result.ids, np.array(reference["ids"])[:, 0, :5])
    np.testing.assert_array_equal(result.lengths, [5, 5, 5])
    shorter = BeamSearch(max_decode_steps=6, max_length=2)
    result = search(shorter, reference["prompts"], reference["prompt_lengths"], extend=extend)
    np.testing.assert_array_equal(result.lengths, [3, 2, 2])


@pytest.fixture(scope="module")
def gpt2():
    """A small GPT-2 with random weights, and its logits as a function of JAX arrays."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=19,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).eval()

    def logits(ids):
        with torch.no_grad():
            return model(torch.tensor(np.asarray(ids), dtype=torch.long)).logits.numpy()

    def extend(cache, ids, time_step):
        cache = jax.lax.dynamic_update_slice_in_dim(cache, ids[None], time_step, axis=2)
        shape = jax.ShapeDtypeStruct((*cache.shape[1:], 19), jnp.float32)
        everything = jax.pure_callback(logits, shape, cache[0])
        return cache, jax.lax.dynamic_slice_in_dim(everything, time_step, ids.shape[1], axis=1)

    return model, extend


def test_equals_the_beam_search_of_hugging_face(gpt2):
    model, extend = gpt2
    torch = pytest.importorskip("torch")
    prompts = [[3, 1, 4], [15, 9, 2]]
    decoder = BeamSearch(beam_size=3, num_results=3, max_decode_steps=6, length_norm_alpha=0.0)
    result = search(decoder, prompts, [3, 3], extend=extend).candidates
    expected = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(2, 3, dtype=torch.long),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=6,
        do_sample=False,
        length_penalty=0.0,
        early_stopping="never",
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    np.testing.assert_array_equal(result.ids.reshape(6, 9), expected.sequences.numpy())
    np.testing.assert_allclose(
        result.scores.reshape(6), expected.sequences_scores.numpy(), rtol=1e-5
    )
    # Not what taking the best token each time finds.
    greedy = SampleDecoder(max_decode_steps=6, temperature=0.0)
    assert np.any(search(greedy, prompts, [3, 3], extend=extend).ids != result.ids[:, 0])
