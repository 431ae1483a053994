"""Attention by local blocks equals attention with all keys, in linear time and memory."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.sharding import BoundSharding
from layerkit.ops.attention.distance_bias import DistanceBias
from layerkit.ops.attention.dot_product import (
    AttentionOptions,
    describe_call,
    dot_product_attention,
    xla_attention,
)
from layerkit.ops.attention.local_blocks import find_local_block
from layerkit.ops.attention.masks import AttentionMask

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 401, 4, 2, 4
POSITIONS = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
SEGMENTS = jnp.asarray(np.where(POSITIONS < 390, 1 + (POSITIONS > 99), 0), jnp.int32)
CAUSAL = AttentionMask.causal_mask(BATCH, LENGTH)
BOTH = AttentionMask.bidirectional_mask(BATCH, LENGTH)
PACKED = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS)


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


QUERY = draw(0, BATCH, LENGTH, HEADS, HEAD_DIM)
KEY, VALUE = (draw(seed, BATCH, LENGTH, KV_HEADS, HEAD_DIM) for seed in (1, 2))
BIAS = DistanceBias(draw(3, 1, HEADS, 2 * LENGTH - 1))
SLOW = pytest.mark.slow
CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": CAUSAL.within(5)},
    "one_position": {"mask": CAUSAL.within(1)},
    "both_sides": {"mask": BOTH.within(20), "bias": BIAS},
    "packed": {
        "mask": PACKED.within(70),
        "bias": BIAS,
        "sinks": draw(4, HEADS),
        "logit_cap": 5.0,
        "zero_fully_masked_rows": True,
    },
    "chunks": {"mask": PACKED.split_chunks(48)},
    "look_ahead": {"mask": PACKED.within(50).look_ahead(12)},
    "images": {
        "mask": dataclasses.replace(
            PACKED.within(20), query_ends=jnp.asarray(POSITIONS // 10 * 10 + 9, jnp.int32)
        )
    },
    "prefix": {"mask": CAUSAL.within(20).replace(key_in_prefix=jnp.asarray(POSITIONS < 40))},
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name == "packed" else SLOW) for name in CASES]
)
def test_values_and_gradients_equal_attention_with_all_keys(case):
    def run(attend):
        def loss(inputs, learned):
            outputs = attend(*inputs, AttentionOptions(scale=0.3, **{**CASES[case], **learned}))
            return jnp.sum(jnp.sin(outputs)), outputs

        learned = {name: CASES[case][name] for name in ("bias", "sinks") if name in CASES[case]}
        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))((QUERY, KEY, VALUE), learned)

    options = AttentionOptions(**CASES[case])
    assert find_local_block(describe_call(QUERY, KEY, VALUE, options))
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, run(dot_product_attention), run(xla_attention))


def test_compiled_flops_and_memory_grow_with_the_length():
    def cost(length):
        mask = AttentionMask.causal_mask(1, length).within(16)

        def loss(*inputs):
            return jnp.sum(dot_product_attention(*inputs, AttentionOptions(mask=mask)))

        inputs = [jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)] * 3
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*inputs).compile()
        analysis = compiled.cost_analysis()
        memory = compiled.memory_analysis().temp_size_in_bytes
        return np.array([analysis["flops"], analysis["bytes accessed"], memory])

    growth = cost(4096) / cost(1024)
    np.testing.assert_array_less(growth, 4.2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 64),
        ({"mask": BOTH.within(5)}, 65),  # a multiple of the 5 positions up to the last visible
        ({"mask": CAUSAL.within(100)}, 100),
        ({"mask": CAUSAL.within(101)}, None),  # blocks of 101 queries and 201 of 401 keys
        ({"mask": CAUSAL}, None),
        ({"mask": CAUSAL.within(5).part(slice(None), slice(None))}, None),
        ({"bias": jnp.zeros((1, 1, LENGTH, LENGTH))}, None),
    ],
)
def test_blocks_are_for_rows_that_are_long_for_their_window(change, expected):
    options = AttentionOptions(**{"mask": CAUSAL.within(5), **change})
    assert find_local_block(describe_call(QUERY, KEY, VALUE, options)) == expected


def test_a_mask_of_one_row_applies_to_all_rows(caplog):
    caplog.set_level("INFO", "layerkit")
    mask = AttentionMask.causal_mask(1, LENGTH, segment_ids=SEGMENTS[:1])
    options = AttentionOptions(mask=mask.split_chunks(48).within(5))
    result, expected = (
        jax.jit(lambda *x, attend=attend: attend(*x, options))(QUERY, KEY, VALUE)
        for attend in (dot_product_attention, xla_attention)
    )
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert caplog.messages[-1] == "attention by local blocks of 64 queries and 68 keys"


@pytest.mark.slow
def test_blocks_of_rows_and_heads_stay_on_their_devices():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    axes = ("batch", "length", "act_heads", "head_dim")
    bound = BoundSharding(mesh)

    def run(sharding):
        def loss(*inputs):
            if sharding is not None:
                inputs = [sharding.constrain(x, axes) for x in inputs]
            options = AttentionOptions(mask=PACKED.within(20), sharding=sharding)
            return jnp.sum(jnp.sin(dot_product_attention(*inputs, options)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))

    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, run(bound)(QUERY, KEY, VALUE), run(None)(QUERY, KEY, VALUE))
    compiled = run(bound).lower(QUERY, KEY, VALUE).compile().as_text()
    assert "all-to-all" not in compiled and "collective-permute" not in compiled
