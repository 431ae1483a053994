"""Causal attention by blocks of queries equals attention with all keys."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.sharding import BoundSharding
from layerkit.ops.attention.dot_product import (
    AttentionOptions,
    describe_call,
    dot_product_attention,
    uses_causal_blocks,
    xla_attention,
)
from layerkit.ops.attention.masks import AttentionMask

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 4, 2, 8
ONE_CPU = BoundSharding(jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,)))
POSITIONS = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
SEGMENTS = jnp.asarray(np.where(POSITIONS < 250, 1 + (POSITIONS > 99), 0), jnp.int32)
MASK = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS)


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


QUERY = draw(0, BATCH, LENGTH, HEADS, HEAD_DIM)
KEY, VALUE = (draw(seed, BATCH, LENGTH, KV_HEADS, HEAD_DIM) for seed in (1, 2))
CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "everything": {
        "mask": AttentionMask.causal_mask(BATCH, LENGTH).within(100),
        "bias": draw(3, 1, HEADS, LENGTH, LENGTH),
        "sinks": draw(4, HEADS),
        "logit_cap": 5.0,
        "zero_fully_masked_rows": True,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_attention_with_all_keys(case):
    options = {"mask": MASK, "scale": 0.3, "sharding": ONE_CPU, **CASES[case]}

    def run(attend):
        def loss(*inputs):
            outputs = attend(*inputs, AttentionOptions(**options))
            return jnp.sum(jnp.sin(outputs)), outputs

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(QUERY, KEY, VALUE)

    result = run(dot_product_attention)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, result, run(xla_attention))


def test_no_products_with_keys_after_a_block_are_computed():
    """Four blocks of 64 queries see 64, 128, 192 and 256 keys."""

    def attend(*inputs):
        return dot_product_attention(
            *inputs, AttentionOptions(mask=MASK, scale=1.0, sharding=ONE_CPU)
        )

    program = str(jax.make_jaxpr(attend)(QUERY, KEY, VALUE))
    shape = rf"f32\[{BATCH},{KV_HEADS},{HEADS // KV_HEADS},(\d+),(\d+)\] = dot_general"
    logits = {(int(q), int(k)) for q, k in re.findall(shape, program) if int(k) != HEAD_DIM}
    assert logits == {(64, 64), (64, 128), (64, 192), (64, 256)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"platform": "gpu"}, False),
        ({"dropout": lambda p: p}, False),
        ({"mask": AttentionMask.bidirectional_mask(BATCH, LENGTH)}, False),
        ({"mask": AttentionMask.decoding_mask(BATCH, LENGTH, LENGTH, time_step=0)}, False),
        ({"mask": MASK.replace(key_in_prefix=SEGMENTS == 1)}, False),
        ({"sharding": None}, len(jax.devices()) == 1),
    ],
)
def test_blocks_are_for_causal_rows_on_a_single_cpu(change, expected):
    options = {"mask": MASK, "platform": "cpu", "sharding": ONE_CPU, **change}
    call = describe_call(QUERY, KEY, VALUE, AttentionOptions(**options))
    assert uses_causal_blocks(call, options["sharding"]) is expected


def test_short_rows_are_not_cut():
    inputs = (x[:, :128] for x in (QUERY, KEY, VALUE))
    call = describe_call(
        *inputs, AttentionOptions(mask=AttentionMask.causal_mask(BATCH, 128), platform="cpu")
    )
    assert not uses_causal_blocks(call, ONE_CPU)
