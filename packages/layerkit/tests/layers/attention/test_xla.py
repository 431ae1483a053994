"""Attention by array code: bias, sinks, windows, prefixes, and sizes of values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers.attention.xla import xla_attention
from layerkit.layers.masks import AttentionMask, first_tokens

BATCH, LENGTH, HEADS, HEAD_DIM, VALUE_DIM = 2, 5, 4, 3, 2
RANDOM = np.random.default_rng(0)


def draw(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


QUERY = draw(BATCH, LENGTH, HEADS, HEAD_DIM)
BIASES = {
    "none": None,
    "of each row and head": draw(BATCH, HEADS, LENGTH, LENGTH),
    "of heads": draw(1, HEADS, LENGTH, LENGTH),
    "of rows": draw(BATCH, 1, LENGTH, LENGTH),
}


def by_loops(query, key, value, *, allowed, bias, sinks, cap):
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    group = query.shape[2] // key.shape[2]
    for b, i, h in np.ndindex(*query.shape[:3]):
        total = 0.0 if sinks is None else math.exp(sinks[h])
        for j in np.flatnonzero(allowed[b, i]):
            logit = 0.7 * float(query[b, i, h] @ key[b, j, h // group])
            if bias is not None:
                logit += bias[b % bias.shape[0], h % bias.shape[1], i, j]
            if cap is not None:
                logit = cap * math.tanh(logit / cap)
            out[b, i, h] += math.exp(logit) * value[b, j, h // group]
            total += math.exp(logit)
        out[b, i, h] /= total
    return out


@pytest.mark.parametrize("cap", [None, 0.8])
@pytest.mark.parametrize("sinks", [None, draw(HEADS)], ids=["plain", "sinks"])
@pytest.mark.parametrize("bias", list(BIASES))
def test_attention_equals_numpy_loops(bias, sinks, cap):
    key, value = draw(BATCH, LENGTH, 2, HEAD_DIM), draw(BATCH, LENGTH, 2, VALUE_DIM)
    mask = AttentionMask.causal_mask(BATCH, LENGTH).within(3)
    allowed = np.broadcast_to(
        np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-3, dtype=bool), (BATCH, LENGTH, LENGTH)
    )
    options = {"bias": BIASES[bias], "sinks": sinks}
    expected = by_loops(QUERY, key, value, allowed=allowed, cap=cap, **options)
    options = {name: None if x is None else jnp.asarray(x) for name, x in options.items()}
    actual = xla_attention(QUERY, key, value, mask=mask, scale=0.7, logit_cap=cap, **options)
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_prefix_is_visible_to_queries_before_its_end():
    value = draw(1, 4, 1, VALUE_DIM)
    mask = AttentionMask.causal_mask(1, 4, in_prefix=first_tokens(jnp.array([2]), 4))
    zeros = jnp.zeros((1, 4, 1, HEAD_DIM))  # so that each query reads the mean of what it sees
    actual = xla_attention(zeros, zeros, value, mask=mask, scale=1.0)[0, :, 0]
    expected = [value[0, :n, 0].mean(0) for n in (2, 2, 3, 4)]
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_huge_sink_takes_all_probability_and_tiny_sink_none():
    key, value = draw(BATCH, LENGTH, HEADS, HEAD_DIM), draw(BATCH, LENGTH, HEADS, VALUE_DIM)
    plain = xla_attention(QUERY, key, value, mask=None, scale=1.0)

    def with_sink(logit):
        sinks = jnp.full((HEADS,), logit)
        return xla_attention(QUERY, key, value, mask=None, scale=1.0, sinks=sinks)

    np.testing.assert_allclose(with_sink(100.0), 0.0, atol=1e-30)
    np.testing.assert_allclose(with_sink(-100.0), plain, atol=1e-6)


def test_sinks_of_fully_masked_rows_take_all_probability():
    key, value = draw(1, 3, 1, HEAD_DIM), draw(1, 3, 1, VALUE_DIM)
    nobody = AttentionMask.cross_mask(1, 2, 3, key_segments=jnp.zeros((1, 3), jnp.int32))
    query = QUERY[:1, :2, :1]
    read = xla_attention(query, key, value, mask=nobody, scale=1.0, sinks=jnp.zeros(1))
    np.testing.assert_array_equal(read, 0.0)


def test_gradients_reach_bias_and_sinks():
    key, value = draw(BATCH, LENGTH, 2, HEAD_DIM), draw(BATCH, LENGTH, 2, VALUE_DIM)
    mask = AttentionMask.causal_mask(BATCH, LENGTH)

    @jax.jit
    def total(bias, sinks):
        read = xla_attention(QUERY, key, value, mask=mask, scale=1.0, bias=bias, sinks=sinks)
        return jnp.sum(read**2)

    bias, sinks = jnp.asarray(BIASES["of heads"]), jnp.zeros(HEADS)
    of_bias, of_sinks = jax.jit(jax.grad(total, argnums=(0, 1)))(bias, sinks)
    hidden = ~np.tri(LENGTH, dtype=bool)
    np.testing.assert_array_equal(of_bias[:, :, hidden], 0.0)
    assert (np.abs(of_bias[:, :, ~hidden]) > 0).all()
    step = 1e-2
    for h in range(HEADS):
        nudge = jnp.zeros(HEADS).at[h].set(step)
        slope = (total(bias, sinks + nudge) - total(bias, sinks - nudge)) / (2 * step)
        np.testing.assert_allclose(of_sinks[h], slope, rtol=1e-2, atol=1e-3)
