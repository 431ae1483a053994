"""Options of rows: each row is decoded as by a decoder with its options; masks equal Praxis'."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.decoding.beam_search import BeamSearch
from layerkit.decoding.decoder import Prompts
from layerkit.decoding.logit_processors import OptionOfRows, RowOptions, RowsSoFar, TopP
from layerkit.decoding.loop import SampleDecoder, extend_prompts
from layerkit.errors import ConfigError

VOCAB, STEPS = 11, 12
TABLE = np.random.default_rng(3).normal(0.0, 2.0, (VOCAB, VOCAB)).astype(np.float32)
PROMPTS = np.array([[1, 2, 3], [5, 0, 0], [7, 1, 0], [9, 9, 9]], np.int32)
LENGTHS = np.array([3, 1, 2, 3], np.int32)
KEY = jax.random.key(8)


def extend(cache, ids, time_step):
    """One step of a model whose logits depend on the sum of the row's tokens so far."""
    cache = jax.lax.dynamic_update_slice_in_dim(cache, ids, time_step, axis=1)
    own = time_step + jnp.arange(ids.shape[1])
    visible = jnp.arange(cache.shape[1])[None, :] <= own[:, None]
    sums = jnp.sum(jnp.where(visible[None], cache[:, None], 0), axis=-1) % VOCAB
    return cache, jnp.asarray(TABLE)[sums]


@functools.partial(jax.jit, static_argnums=0)
def decode(decoder, rows, options=None):
    cache = jnp.zeros((len(rows), PROMPTS.shape[1] + STEPS), jnp.int32)
    ids, lengths = jnp.array(PROMPTS)[rows], jnp.array(LENGTHS)[rows]
    prompts = Prompts(ids, lengths, KEY, rows, options=options or RowOptions())
    return extend_prompts(decoder, extend, cache, prompts)


ALL_ROWS = np.arange(4)
OPTIONS = {
    "temperature": [0.0, 0.5, 2.0, 1.0],
    "top_k": [3, 2, 0, 100],
    "top_p": [1.0, 0.7, 0.4, 1.0],
}


@pytest.mark.parametrize(
    "names", [*(pytest.param((name,), marks=pytest.mark.slow) for name in OPTIONS), tuple(OPTIONS)]
)
def test_each_row_is_decoded_as_with_its_options(names):
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32}
    options = RowOptions(**{name: jnp.array(OPTIONS[name], kinds[name]) for name in names})
    # The fields hold for all rows unless the rows replace them.
    fields = {"temperature": 1.5, "top_k": 5}
    together = decode(SampleDecoder(max_decode_steps=STEPS, **fields), ALL_ROWS, options)
    for row in ALL_ROWS:
        own = fields | {name: OPTIONS[name][row] for name in names}
        own["top_k"] = own["top_k"] or None
        alone = decode(SampleDecoder(max_decode_steps=STEPS, **own), np.array([row]))
        np.testing.assert_array_equal(alone.ids[0], together.ids[row])
        np.testing.assert_allclose(alone.log_probs[0], together.log_probs[row], atol=1e-6)


def test_top_k_of_rows_equals_praxis(praxis):
    case = praxis("per_example_top_k")
    result = processed(
        OptionOfRows(option="top_k"), case["logits"], RowOptions(top_k=case["top_k"])
    )
    np.testing.assert_array_equal(np.isfinite(result)[:3], case["allowed"][:3])
    # Praxis also keeps no more than the 6 of its decoder.
    assert np.all(np.isfinite(result[3])) and case["allowed"][3].sum() == 6


def test_options_of_rows_draw_tokens_as_often_as_praxis(praxis):
    case = praxis("row_options")
    names = ("top_k", "top_p", "temperature")  # the order of Praxis
    options, logits = RowOptions(**{name: case[name] for name in names}), case["logits"]
    for name in names:
        logits = processed(OptionOfRows(option=name), logits, options)
    expected = np.asarray(jax.nn.softmax(logits)) * case["counts"].sum(axis=-1, keepdims=True)
    # Five standard deviations of Poisson's distribution.
    np.testing.assert_array_less(np.abs(case["counts"] - expected), 5 * np.sqrt(expected) + 1e-3)


def processed(processor, logits, options=None):
    rows = RowsSoFar(jnp.zeros((len(logits), 1), int), jnp.zeros(len(logits), int), 1, options)
    return np.asarray(processor(jnp.array(logits), rows))


def test_top_p_with_ties_equals_praxis(praxis):
    case = praxis("top_p")
    result = processed(TopP(p=float(case["p"]), keep_ties=True), case["logits"])
    np.testing.assert_array_equal(np.isfinite(result), case["allowed"])


def test_top_p_keeps_the_fewest_of_equal_tokens():
    # 0.5 + 0.2 reach 0.6, and so do three tokens of 0.25: no more are kept.
    logits = np.log(np.array([[0.2, 0.5, 0.1, 0.2], [0.25, 0.25, 0.25, 0.25]], np.float32))
    kept = np.isfinite(processed(TopP(p=0.6), logits))
    np.testing.assert_array_equal(kept, [[True, True, False, False], [True, True, True, False]])


@pytest.mark.parametrize("name", list(OPTIONS))
def test_beam_search_with_options_of_rows_raises(raises, name):
    decoder = BeamSearch(max_decode_steps=STEPS, eos_id=0)
    with raises(ConfigError, owner="BeamSearch", field=f"{name} of rows"):
        decode(decoder, ALL_ROWS, RowOptions(**{name: jnp.ones(4)}))
