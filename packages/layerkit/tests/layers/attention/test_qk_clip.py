"""QK-clip against NumPy: the largest logit of each head, and the weights after scaling."""

from __future__ import annotations

import copy
from functools import partial

import jax
import numpy as np
import pytest

from layerkit.base.step_reports import STEP_MAXIMA, apply_maxima
from layerkit.errors import ConfigError
from layerkit.layers import MultiHeadAttention, MultiHeadLatentAttention
from layerkit.layers.quantization.lora import add_lora
from layerkit.ops.attention.masks import AttentionMask

LENGTH, DIMS, HEADS = 640, 16, 4  # two blocks of queries and of keys
RNG = np.random.default_rng(0)
SEGMENTS = np.repeat([[1, 2, 0], [1, 1, 1]], [200, 400, 40], axis=1)
X = RNG.normal(size=(2, LENGTH, DIMS)).astype(np.float32)
X[SEGMENTS == 0] *= 10  # Logits of padding do not count.
ALLOWED = np.tril(SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS[:, :, None] > 0)
SIZES = {"latent_dims": 8, "plain_dim_per_head": 4, "rotary_dim_per_head": 2}


def heads_of(weights):
    """Return (w `[dims, heads, head_dim]`, b) of queries and of keys, of any layer but latent."""
    qkv = weights.get("qkv")
    if qkv is None:
        pairs = [(weights[name]["w"], weights[name].get("b", 0.0)) for name in ("query", "key")]
        return [(w, np.zeros(w.shape[1:]) + b) for w, b in pairs]
    b = np.zeros(qkv["w"].shape[1:]) + qkv.get("b", 0.0)
    parts = slice(-2), slice(-2, -1)
    return [(qkv["w"][:, :, i].reshape(DIMS, -1, 4), b[:, i].reshape(-1, 4)) for i in parts]


def numpy_largest(weights):
    query, key = (np.einsum("bld,dhe->blhe", X, w) + b for w, b in heads_of(weights))
    key = np.repeat(key, HEADS // key.shape[2], axis=2)
    logits = np.einsum("bqhd,bkhd->hbqk", query, key) / np.sqrt(query.shape[-1])
    return np.where(ALLOWED, logits, -np.inf).max(axis=(1, 2, 3))


@pytest.mark.parametrize(
    ("cls", "fields", "scales_keys"),
    [
        (MultiHeadAttention, {"use_bias": True}, True),
        (MultiHeadAttention, {"num_kv_heads": 2, "logit_cap": 2.0}, False),
        (MultiHeadAttention, {"values_are_keys": True}, False),
        (MultiHeadAttention, {"kv": {}}, False),  # Other layers read the keys.
        (MultiHeadAttention, {"combined_qkv": True, "use_bias": True}, True),
        (MultiHeadAttention, {"combined_qkv": True, "num_kv_heads": 2}, False),
        (MultiHeadLatentAttention, {**SIZES, "value_dim_per_head": 4}, True),
    ],
)
def test_logits_of_each_head_are_clipped_by_its_weights(cls, fields, scales_keys):
    shared = {"kv": {}} if "kv" in fields else {}
    fields = {name: value for name, value in fields.items() if name not in shared}
    config = cls.HParams.config(input_dims=DIMS, num_heads=HEADS, train=True, **fields)
    weights = jax.eval_shape(config.Instantiate().init, jax.random.key(0))["params"]
    weights = jax.tree.map(lambda w: RNG.normal(size=w.shape).astype(np.float32), weights)

    @partial(jax.jit, static_argnums=1)
    def find_maxima(weights, threshold):
        mask = AttentionMask.causal_mask(2, LENGTH, segment_ids=SEGMENTS)
        layer, rows = config.clone().set(qk_clip=threshold).Instantiate(), mask.query_positions
        arguments = {"mask": mask, "positions": rows, "mutable": [STEP_MAXIMA]}
        _, updates = layer.apply({"params": weights}, X, **arguments, **copy.deepcopy(shared))
        return updates[STEP_MAXIMA]

    def report(weights, threshold):
        maxima = find_maxima(weights, threshold)
        return maxima, np.asarray(maxima["logits_of_qk_clip"][0].value)

    is_latent = cls is MultiHeadLatentAttention
    largest = report(weights, 1e9)[1] if is_latent else numpy_largest(weights)
    threshold = float(np.median(largest))
    maxima, reported = report(weights, threshold)
    np.testing.assert_allclose(reported, largest, rtol=1e-4)
    scaled = apply_maxima(weights, maxima)
    np.testing.assert_allclose(
        report(scaled, threshold)[1], np.minimum(largest, threshold), rtol=1e-4
    )
    gamma = np.minimum(1.0, threshold / largest)[:, None]
    query, key = (np.sqrt(gamma), np.sqrt(gamma)) if scales_keys else (gamma, 1.0)
    if is_latent:
        query = np.concatenate([np.repeat(query, 4, axis=1), np.repeat(gamma, 2, axis=1)], axis=1)
    for new, old, factor in zip(heads_of(scaled), heads_of(weights), (query, key), strict=True):
        for a, b in zip(new, old, strict=True):
            np.testing.assert_allclose(a, b * factor, rtol=1e-4)
    rest = [x["qkv"]["w"][:, :, -1] if "qkv" in x else x.get("value") for x in (scaled, weights)]
    jax.tree.map(np.testing.assert_array_equal, *rest)


@pytest.mark.parametrize(
    ("cls", "fields", "adapted"),
    [
        (MultiHeadAttention, {"use_bias": True, "use_key_bias": False}, None),
        (MultiHeadAttention, {}, "query_tpl"),
        (MultiHeadAttention, {"combined_qkv": True}, "qkv_tpl"),
        (MultiHeadLatentAttention, {**SIZES, "value_dim_per_head": 4}, "up_tpl"),
    ],
)
def test_keys_without_bias_and_adapters_of_logits_are_errors(cls, fields, adapted, raises):
    config = cls.HParams.config(input_dims=DIMS, num_heads=HEADS, qk_clip=1.0, **fields)

    def init(only, *, train=True):
        config.train = train
        layer = (config if only is None else add_lora(config, only=only)).Instantiate()
        jax.eval_shape(layer.init, jax.random.key(0))

    with raises(ConfigError, field="qk_clip", value=1.0):
        init(adapted)
    if adapted is not None:
        init("value_tpl|output_tpl|down_tpl")
        init(adapted, train=False)  # Only training clips.
