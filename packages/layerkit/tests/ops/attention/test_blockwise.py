"""Attention by blocks, compared with array code that holds all logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.ops.attention.blockwise import BlockwiseAttention
from layerkit.ops.attention.dot_product import AttentionOptions, xla_attention
from layerkit.ops.attention.masks import AttentionMask


# 1021 is a prime number: one block.
@pytest.mark.parametrize(("length", "block"), [(640, 320), (1021, 1021)])
def test_several_blocks_equal_array_code(length, block):
    segments = jnp.asarray(1 + np.arange(length) // 200, jnp.int32)[None]
    mask = AttentionMask.causal_mask(1, length, segment_ids=segments).within(150)
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, given = (
        jax.random.normal(stream, (1, length, heads, 8))
        for stream, heads in zip(keys, (2, 1, 1, 2), strict=True)
    )
    ours = BlockwiseAttention(scale=0.4, logit_cap=2.0)

    @jax.jit
    def blockwise(*inputs):
        read, log_sum = ours.forward(*inputs, mask)
        common = (read * given).sum(axis=-1)
        return read, *ours.gradients(*inputs, given, log_sum, common, mask)

    @jax.jit
    def whole(*inputs):
        read, pull = jax.vjp(
            lambda *x: xla_attention(*x, AttentionOptions(mask=mask, scale=0.4, logit_cap=2.0)),
            *inputs,
        )
        return read, *pull(given)

    inputs = query, key, value
    for ours_, expected in zip(blockwise(*inputs), whole(*inputs), strict=True):
        np.testing.assert_allclose(ours_, expected, atol=2e-5)
    assert f"f32[1,1,2,{block},{block}]" in str(jax.make_jaxpr(blockwise)(*inputs))
