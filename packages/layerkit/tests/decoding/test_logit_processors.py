"""Logit processors compared with Hugging Face transformers, or with values by hand."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.decoding.logit_processors import (
    BannedIds,
    CountPenalty,
    EpsilonCutoff,
    LogitBias,
    MinP,
    MinSteps,
    NoRepeatNgrams,
    RepetitionPenalty,
    RowsSoFar,
    Temperature,
    TopK,
    TopP,
    process_logits,
)
from layerkit.errors import ConfigError

ROWS, VOCAB, WIDTH, COLUMN = 6, 11, 12, 9
RANDOM = np.random.default_rng(0)
# A small vocabulary, so that tokens and sequences repeat; 10 stands nowhere in the rows so far.
IDS = RANDOM.integers(0, 4, (ROWS, WIDTH)).astype(np.int32)
IDS[:, COLUMN:] = 10
PROMPT_LENGTHS = np.array([1, 3, 5, 7, 8, 9], np.int32)
LOGITS = RANDOM.normal(0.0, 2.0, (ROWS, VOCAB)).astype(np.float32)
# Every value twice or more.
TIES = np.round(RANDOM.uniform(-2.0, 2.0, (ROWS, VOCAB))).astype(np.float32)


def rows_at(column):
    return RowsSoFar(jnp.array(IDS), jnp.array(PROMPT_LENGTHS), jnp.int32(column))


def processed(processor, logits=LOGITS, column=COLUMN):
    """As in a loop, where the column is known to the running program only."""
    rows = rows_at(column)
    return np.asarray(jax.jit(lambda logits, rows: processor(logits, rows))(logits, rows))


def hugging_face(name, *arguments, **options):
    module = pytest.importorskip("transformers.generation.logits_process")
    return getattr(module, name)(*arguments, **options)


def by_hugging_face(make, logits=LOGITS, column=COLUMN):
    torch = pytest.importorskip("torch")
    ids = torch.tensor(IDS[:, :column], dtype=torch.long)
    return make()(ids, torch.tensor(logits)).numpy()


# Ours, and what makes theirs where it is installed.
theirs = partial(partial, hugging_face)
PAIRS = {
    "repetition": (RepetitionPenalty(penalty=1.7), theirs("RepetitionPenaltyLogitsProcessor", 1.7)),
    "reward": (RepetitionPenalty(penalty=0.5), theirs("RepetitionPenaltyLogitsProcessor", 0.5)),
    **{
        f"no {n}-grams": (NoRepeatNgrams(size=n), theirs("NoRepeatNGramLogitsProcessor", n))
        for n in (1, 2, 3)
    },
    "banned": (
        BannedIds(ids=(2, 9)),
        theirs("SuppressTokensLogitsProcessor", [2, 9], device="cpu"),
    ),
    "bias": (
        LogitBias(biases=((3, -1.5), (7, 2.0))),
        theirs("SequenceBiasLogitsProcessor", [[[3], -1.5], [[7], 2.0]]),
    ),
    "temperature": (Temperature(temperature=0.3), theirs("TemperatureLogitsWarper", 0.3)),
    **{f"top {k}": (TopK(k=k), theirs("TopKLogitsWarper", k)) for k in (1, 4, 11, 50)},
    **{f"top p {p}": (TopP(p=p), theirs("TopPLogitsWarper", p)) for p in (0.05, 0.6, 0.95, 1.0)},
    **{f"min p {p}": (MinP(p=p), theirs("MinPLogitsWarper", p)) for p in (0.0, 0.2, 1.0)},
    **{
        f"epsilon {p}": (EpsilonCutoff(epsilon=p), theirs("EpsilonLogitsWarper", p))
        for p in (1e-6, 0.05, 0.9)
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_processor_equals_that_of_hugging_face(name):
    ours, theirs = PAIRS[name]
    np.testing.assert_allclose(processed(ours), by_hugging_face(theirs), rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in PAIRS if name[:3] in ("top", "min", "eps")])
def test_ties_stay_together_as_in_hugging_face_or_in_order_of_ids(name):
    ours, theirs = PAIRS[name]
    result, expected = processed(ours, TIES), by_hugging_face(theirs, TIES)
    if isinstance(ours, TopP):
        # Which of equally likely tokens stay is left open there; here it is those that come first.
        for row, (ids, values) in enumerate(zip(result, TIES, strict=True)):
            for value in set(values.tolist()):
                stays = np.isfinite(ids[values == value])
                assert np.all(np.diff(stays.astype(int)) <= 0), (row, value)
        result, expected = np.sort(result), np.sort(expected)
    np.testing.assert_array_equal(result, expected)


def test_top_p_of_one_keeps_all_of_a_large_vocabulary():
    # Sums of so many float32 numbers pass 1 before the end.
    logits = jnp.array(np.random.default_rng(0).normal(size=(2, 50_257)).astype(np.float32))
    np.testing.assert_array_equal(TopP(p=1.0)(logits, rows_at(COLUMN)), logits)


def test_chain_of_processors_equals_hugging_face():
    names = ["repetition", "no 3-grams", "temperature", "top 4", "top p 0.95", "min p 0.2"]
    ours = tuple(PAIRS[name][0] for name in names)
    run = jax.jit(process_logits, static_argnums=0)
    result = run(ours, jnp.array(LOGITS), rows_at(COLUMN))
    chain = partial(hugging_face, "LogitsProcessorList", [PAIRS[name][1]() for name in names])
    np.testing.assert_allclose(result, by_hugging_face(chain), rtol=1e-5)
    turned = run(ours[::-1], jnp.array(LOGITS), rows_at(COLUMN))
    assert np.any(np.asarray(result) != np.asarray(turned))


def test_count_penalty_counts_drawn_tokens():
    result = processed(CountPenalty(frequency=0.5, presence=2.0))
    expected = LOGITS.copy()
    for row, start in enumerate(PROMPT_LENGTHS):
        drawn = IDS[row, start:COLUMN].tolist()
        for token in set(drawn):
            expected[row, token] -= 2.0 + 0.5 * drawn.count(token)
    assert np.any(expected != LOGITS)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_min_steps_exclude_end_tokens():
    result = processed(MinSteps(num_steps=4, eos_ids=(1, 5)))
    expected = LOGITS.copy()
    # Drawn so far: 8, 6, 4, 2, 1, 0.
    expected[3:, [1, 5]] = -np.inf
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("processor", "field", "token"),
    [
        (BannedIds(ids=(11,)), "ids", 11),
        (LogitBias(biases=((-1, 2.0),)), "biases", -1),
        (MinSteps(num_steps=1, eos_ids=(99,)), "eos_ids", 99),
    ],
    ids=["BannedIds", "LogitBias", "MinSteps"],
)
def test_id_outside_of_the_vocabulary_raises(raises, processor, field, token):
    with raises(ConfigError, owner=type(processor).__name__, field=field, value=token):
        processed(processor)
