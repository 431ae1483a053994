"""CrossAttention with and without its cache, compared with NumPy."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import CACHE
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.basic.normalizations import RmsNorm
from layerkit.ops.attention.masks import AttentionMask

BATCH, LENGTH, MEMORY, DIMS, MEMORY_DIMS, HEADS = 2, 4, 6, 8, 6, 4
PADDED = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], np.int32)


def make(**fields):
    return CrossAttention(
        **{"input_dims": DIMS, "memory_dims": MEMORY_DIMS, "num_heads": HEADS, **fields}
    )


def drawn_weights(layer):
    """Return weights without zeros, since weights that start at 0 would hide errors."""
    random, shapes = np.random.default_rng(0), jax.eval_shape(layer.init, jax.random.key(0))
    return jax.tree.map(lambda w: random.normal(0.0, 0.5, w.shape).astype(np.float32), shapes)


def arrays(batch=BATCH):
    x, memory = jax.random.split(jax.random.key(2))
    return (
        jax.random.normal(x, (batch, LENGTH, DIMS)),
        jax.random.normal(memory, (batch, MEMORY, MEMORY_DIMS)),
    )


@functools.partial(jax.jit, static_argnames="layer")
def at_once(layer, weights, x, memory, mask, bias=None):
    return layer.apply(weights, x, memory=memory, mask=mask, bias=bias)


@functools.partial(jax.jit, static_argnames="layer")
def cache_of(layer, weights, memory):
    return layer.apply(weights, memory, method="init_cache", mutable=[CACHE])[1]


@functools.partial(jax.jit, static_argnames="layer")
def extend(layer, weights, cache, x, mask, bias=None):
    return layer.apply({**weights, **cache}, x, mask=mask, bias=bias, method="extend_step")


def mask_of(segments=PADDED, queries=LENGTH):
    batch, keys = segments.shape
    return AttentionMask.cross_mask(batch, queries, keys, key_segments=jnp.asarray(segments))


def by_numpy(weights, x, memory, *, segments, bias=0.0, scale=None, norm=False):
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), weights["params"])

    def project(name, inputs):
        return np.einsum("bld,dnh->blnh", inputs, params[name]["w"]) + params[name].get("b", 0.0)

    query, key, value = project("query", x), project("key", memory), project("value", memory)
    if norm:
        for heads, name in ((query, "query_norm"), (key, "key_norm")):
            heads *= params[name]["scale"] / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6)
    key, value = (np.repeat(heads, HEADS // heads.shape[2], axis=2) for heads in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * np.einsum("bqnh,bknh->bnqk", query, key) + bias
    logits = np.where(segments[:, None, None] == 1, logits, -np.inf)
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    read = np.einsum("bnqk,bknh->bqnh", probabilities, value)
    return np.einsum("bqnh,nhd->bqd", read, params["output"]["w"]) + params["output"].get("b", 0.0)


BIAS = np.random.default_rng(3).normal(size=(1, HEADS, LENGTH, MEMORY)).astype(np.float32)


CASES = [
    ({}, {}),
    ({"use_bias": True, "logit_scale": 1.0}, {"scale": 1.0}),
    ({"qk_norm_tpl": RmsNorm.HParams.config()}, {"norm": True}),
    ({}, {"bias": BIAS}),
]


@pytest.mark.parametrize(
    ("kv_heads", "fields", "reference"),
    [
        pytest.param(kv_heads, *case, marks=() if i == ordinary else pytest.mark.slow)
        for kv_heads, ordinary in ((1, 1), (2, 2), (4, 3))
        for i, case in enumerate(CASES)
    ],
)
def test_outputs_equal_numpy_whole_and_cached(kv_heads, fields, reference):
    layer = make(num_kv_heads=kv_heads, **fields)
    weights, (x, memory) = drawn_weights(layer), arrays()
    expected = by_numpy(weights, x, memory, segments=PADDED, **reference)
    bias = reference.get("bias")
    actual = at_once(layer, weights, x, memory, mask_of(), bias)
    np.testing.assert_allclose(actual, expected, atol=1e-5)

    cache, outs = cache_of(layer, weights, memory), []
    for start, stop in ((0, 3), (3, 4)):
        own = None if bias is None else bias[:, :, start:stop]
        mask = mask_of(queries=stop - start)
        outs.append(extend(layer, weights, cache, x[:, start:stop], mask, own))
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), expected, atol=1e-5)


def test_weights_and_cache_have_the_documented_shapes():
    layer = make(num_kv_heads=2, fprop_dtype="bfloat16")
    weights, (_, memory) = drawn_weights(layer), arrays()
    assert jax.tree.map(jnp.shape, weights) == {
        "params": {
            "query": {"w": (8, 4, 2)},
            "key": {"w": (6, 2, 2)},
            "value": {"w": (6, 2, 2)},
            "output": {"w": (4, 2, 8)},
        }
    }
    cache = cache_of(layer, weights, memory)
    each = ((BATCH, MEMORY, 2, 2), "bfloat16")
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), cache)
    assert shapes == {CACHE: {"key": each, "value": each}}


def test_padding_of_the_memory_has_no_effect_and_memory_of_padding_reads_zero():
    layer = make()
    weights, (x, memory) = drawn_weights(layer), arrays()
    read = at_once(layer, weights, x, memory, mask_of())
    changed = memory.at[0, 4:].set(1e3)
    np.testing.assert_array_equal(at_once(layer, weights, x, changed, mask_of()), read)
    zeroing, nothing = make(zero_fully_masked_rows=True), np.zeros((BATCH, MEMORY), np.int32)
    read = at_once(zeroing, weights, x, memory, mask_of(nothing))
    np.testing.assert_array_equal(read, 0.0)


def test_cached_steps_never_run_kernels(caplog):
    """A step that happens to have the sizes of a kernel could not be split over devices."""
    layer = make(backend="pallas")
    weights, (x, memory) = drawn_weights(layer), arrays()
    cache = cache_of(layer, weights, memory)
    with caplog.at_level(logging.INFO, logger="layerkit"):
        extend(layer, weights, cache, x, mask_of())
    assert caplog.messages == ["attention backend: xla (as requested)"]
