"""Tokamax's kernels: their masks, values by Tokamax's array code, and programs for absent GPUs.

The last two need the extra `layerkit[kernels]`, and programs need JAX's CUDA plugin, too.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.ops.attention import tokamax
from layerkit.ops.attention.distance_bias import DistanceBias
from layerkit.ops.attention.dot_product import AttentionOptions, xla_attention
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.attention.tokamax import (
    TokamaxAttention,
    find_split_documents,
    key_ranges,
)

needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="needs layerkit[kernels]"
)
BATCH, LENGTH, HEADS, DIMS = 2, 64, 4, 16
SEGMENTS = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 1, 2, 3]], [20, 1, 33, 10], axis=1), jnp.int32)


def causal(**fields):
    return AttentionMask.causal_mask(BATCH, LENGTH, **fields)


def both_ways(**fields):
    return AttentionMask.bidirectional_mask(BATCH, LENGTH, **fields)


MASKS = {
    "none": None,
    "causal": causal(),
    "window": causal().within(5),
    "window both ways": both_ways().within(5),
    "packed": causal(segment_ids=SEGMENTS),
    "packed, window": causal(segment_ids=SEGMENTS).within(5),
    "packed, both ways": both_ways(segment_ids=SEGMENTS),
    "packed, chunks": causal(segment_ids=SEGMENTS).split_chunks(6),
}


@pytest.mark.skipif(tokamax.find_missing_tokamax() == "", reason="Tokamax is installed")
def test_command_that_installs_tokamax_has_the_version_of_the_extra():
    (version,) = re.findall("pip install tokamax==([0-9.]+),", tokamax.find_missing_tokamax())
    project = Path(__file__).parents[3] / "pyproject.toml"
    assert f'"tokamax>={version},<' in project.read_text()


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_ranges_of_keys_equal_the_mask(name):
    mask = MASKS[name]
    start, end = key_ranges(mask)
    keys, queries = np.arange(LENGTH), np.arange(LENGTH)[:, None]
    allowed = np.ones((BATCH, 1, LENGTH, LENGTH), bool)
    allowed &= start is None or keys >= np.asarray(start)[..., None]
    allowed &= end is None or keys < np.asarray(end)[..., None]
    if mask.causal:
        allowed &= keys <= queries
    np.testing.assert_array_equal(allowed, np.broadcast_to(mask.dense(), allowed.shape))


@pytest.mark.parametrize(
    ("segments", "window", "is_split"),
    [
        ([1, 1, 2, 2, 0, 0], None, False),
        ([0, 2, 2, 0, 1, 0], None, False),  # Padding in several places is no document.
        ([1, 1, 0, 1, 1, 0], None, True),
        ([1, 1, 2, 2, 1, 1], None, True),
        ([1, 1, 2, 2, 1, 1], 3, False),  # The window hides the first tokens.
        ([1, 1, 2, 2, 1, 1], 4, True),
    ],
)
def test_split_documents_are_those_whose_ranges_would_be_wrong(segments, window, is_split):
    ids = jnp.asarray([segments])
    assert find_split_documents(ids, window) == is_split
    mask = AttentionMask.causal_mask(1, 6, segment_ids=ids).within(window)
    start, _ = key_ranges(mask)
    ranges = (np.arange(6) >= np.asarray(start)[..., None]) & np.tri(6, dtype=bool)
    equal = (ranges == mask.dense()).all(axis=-1)
    assert equal[..., np.array(segments) != 0].all() != is_split


@needs_tokamax
@pytest.mark.usefixtures("array_code")
def test_rows_with_split_documents_are_nan():
    segments = SEGMENTS.at[1, 5].set(0)
    x = jnp.ones((BATCH, LENGTH, 2, DIMS))
    read = TokamaxAttention(1.0)(x, x, x, mask=causal(segment_ids=segments))
    assert np.isfinite(read[0]).all() and np.isnan(read[1]).all()


@pytest.fixture
def array_code(monkeypatch):
    """Let Tokamax run its array code forward, and what its kernels compute backward.

    The kernels read the softmax from the maximum and sum that the forward pass returned. The array
    code of Tokamax computes it again, without sinks.
    """
    from tokamax._src.ops.attention import base, pallas_mosaic_gpu

    class Gradients:
        heuristics_config = None

        def bind(self, *arguments, **keywords):
            return self

        def replace(self, config):
            return self

        def __call__(self, softmax, out, dout, q, k, v, *, logits_scale, mask, **rest):
            bias, cap, allowed = (
                rest["bias"],
                rest["logits_soft_cap"],
                mask.as_array(LENGTH, LENGTH),
            )
            group = q.shape[2] // k.shape[2]

            def logits(q, k, bias):
                products = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, group, 2)) * logits_scale
                products = products if bias is None else products + bias
                products = products if cap is None else cap * jnp.tanh(products / cap)
                return products if allowed is None else jnp.where(allowed, products, -1e9)

            largest, total = (x[..., None] for x in softmax)
            values, pull = jax.vjp(logits, q, k, bias)
            weights = jnp.exp(values - largest) / total
            products = jnp.einsum("bqhd,bkhd->bhqk", dout, jnp.repeat(v, group, 2))
            common = jnp.einsum("bqhd,bqhd->bhq", out, dout)[..., None]
            of_query, of_key, of_bias = pull(weights * (products - common))
            of_value = jnp.einsum("bhqk,bqhd->bkhd", weights, dout)
            of_value = of_value.reshape(*v.shape[:3], group, -1).sum(axis=3)
            return {"q": of_query, "k": of_key, "v": of_value, "bias": of_bias}

    def operation():
        return base.DotProductAttention(vjp=Gradients())

    monkeypatch.setattr(pallas_mosaic_gpu, "PallasMosaicGpuFlashAttention", operation)
    jax.clear_caches()


def drawn(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


VALUES = [
    *((name, ()) for name in MASKS),
    ("packed", ("sinks",)),
    ("packed", ("cap",)),
    ("causal", ("bias",)),
    ("packed, window", ("sinks", "cap", "bias by distance")),
]


@needs_tokamax
@pytest.mark.usefixtures("array_code")
@pytest.mark.parametrize(("mask", "extras"), VALUES)
def test_values_and_gradients_equal_array_code(mask, extras):
    q, k, v, probe, sinks, bias, by_distance = drawn(
        (BATCH, LENGTH, HEADS, DIMS),
        (BATCH, LENGTH, 2, DIMS),
        (BATCH, LENGTH, 2, 8),
        (BATCH, LENGTH, HEADS, 8),
        (HEADS,),
        (1, HEADS, LENGTH, LENGTH),
        (1, HEADS, 2 * LENGTH - 1),
    )
    learned = {"sinks": 4 * sinks} if "sinks" in extras else {}
    if "bias" in extras:
        learned["bias"] = bias
    if "bias by distance" in extras:
        learned["bias"] = DistanceBias(by_distance).dense()
    cap = 1.5 if "cap" in extras else None
    kernel = TokamaxAttention(0.3, cap)

    def ours(q, k, v, learned):
        return jnp.sum(probe * kernel(q, k, v, mask=MASKS[mask], **learned))

    def expected(q, k, v, learned):
        options = AttentionOptions(scale=0.3, mask=MASKS[mask], logit_cap=cap, **learned)
        return jnp.sum(probe * xla_attention(q, k, v, options))

    both = [
        jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))(q, k, v, learned) for f in (ours, expected)
    ]
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(1.0, np.abs(b).max()))
