"""Cached decoding: steps of `extend_step` equal `fprop`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.base_layer import CACHE, PARAMS
from layerkit.base.sharding import BoundSharding
from layerkit.errors import ConfigError
from layerkit.layers.attention.base_attention import HeadProjection
from layerkit.layers.attention.biases import Alibi, RelativeBias
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.basic.normalizations import RmsNorm
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.recurrent.mixer_parts import CausalConvolution
from layerkit.ops.attention.masks import AttentionMask

BATCH, LENGTH, SLOTS, DIMS, HEADS = 2, 6, 8, 8, 4
ROTARY = RotaryPositionalEmbedding.HParams.config()
RMS_NORM = RmsNorm.HParams.config()
CONV = CausalConvolution.HParams.config(width=3)
RELATIVE_BIAS = RelativeBias.HParams.config(num_buckets=4, max_distance=4)


def make(**fields):
    return MultiHeadAttention(**{"input_dims": DIMS, "num_heads": HEADS, **fields})


def drawn_weights(layer):
    """Return weights without zeros, since weights that start at 0 would hide errors."""
    random, shapes = np.random.default_rng(0), jax.eval_shape(layer.init, jax.random.key(0))
    return jax.tree.map(lambda w: random.normal(0.0, 0.5, w.shape).astype(np.float32), shapes)


def inputs(batch=BATCH, length=LENGTH, seed=2):
    return jax.random.normal(jax.random.key(seed), (batch, length, DIMS))


def positions(batch, start, stop):
    return jnp.broadcast_to(jnp.arange(start, stop, dtype=jnp.int32), (batch, stop - start))


@functools.partial(jax.jit, static_argnames="layer")
def whole(layer, weights, x, bias=None):
    batch, length = x.shape[:2]
    mask = AttentionMask.causal_mask(batch, length)
    return layer.apply(weights, x, mask=mask, positions=positions(batch, 0, length), bias=bias)


@functools.partial(jax.jit, static_argnames=("layer", "batch", "slots"))
def empty_cache(layer, weights, batch=BATCH, slots=SLOTS):
    return layer.apply(weights, batch, slots, method="init_cache", mutable=[CACHE])[1]


@functools.partial(jax.jit, static_argnames="layer")
def extend(layer, weights, cache, x, step, **options):
    """Return the outputs and the new cache of tokens `x` from position `step` on."""
    start = jnp.asarray(step, jnp.int32)
    places = start + positions(x.shape[0], 0, x.shape[1])
    return layer.apply(
        {**weights, **cache},
        x,
        time_step=start,
        positions=places,
        method="extend_step",
        mutable=[CACHE],
        **options,
    )


def in_chunks(layer, weights, x, chunks, *, cache=None):
    cache = empty_cache(layer, weights, batch=x.shape[0]) if cache is None else cache
    outs, start = [], 0
    for size in chunks:
        out, cache = extend(layer, weights, cache, x[:, start : start + size], start)
        outs.append(out)
        start += size
    return jnp.concatenate(outs, axis=1)


@pytest.mark.parametrize(
    ("kv_heads", "rotary"),
    [
        (2, ROTARY),
        *(
            pytest.param(kv_heads, rotary, marks=pytest.mark.slow)
            for kv_heads, rotary in ((1, None), (1, ROTARY), (2, None), (4, None), (4, ROTARY))
        ),
    ],
)
def test_steps_equal_fprop(kv_heads, rotary):
    layer = make(num_kv_heads=kv_heads, rotary_tpl=rotary)
    weights, x = drawn_weights(layer), inputs()
    expected = whole(layer, weights, x)
    for chunks in ([1] * LENGTH, [3, 1, 2], [LENGTH]):
        np.testing.assert_allclose(in_chunks(layer, weights, x, chunks), expected, atol=1e-5)


# One of each kind of difference that a cache could make; then the others.
OPTIONS = [
    {"window": 3, "chunk": 4, "query_growth": 0.5, "query_growth_step": 2},
    {"combined_qkv": True, "use_bias": True},
    {"relative_bias_tpl": RELATIVE_BIAS},
    {"qk_norm_tpl": RMS_NORM, "qk_norm_before_rotary": True, "qk_norm_over": "projection"}
    | {"output_gate_tpl": HeadProjection.HParams.config()},
    {"use_sinks": True},
    {"values_are_keys": True, "value_norm_tpl": RMS_NORM, "use_bias": True},
    {"use_bias": True},
    {"use_bias": True, "use_output_bias": False},
    {"per_dim_scale": True},
    {"logit_cap": 0.5},
    {"logit_scale": 1.0},
    {"dim_per_head": 6},
    {"zero_fully_masked_rows": True},
    {"backend": "xla"},
    {"window": 1},
    {"relative_bias_tpl": Alibi.HParams.config()},
    {"qk_norm_tpl": RMS_NORM},
    {"qk_norm_tpl": RMS_NORM, "qk_norm_before_rotary": True},
]
CASES = [{"num_kv_heads": 2, "rotary_tpl": ROTARY, **option} for option in OPTIONS]


def combinations(number):
    """Half of the options at once, drawn with a fixed seed, with every number of key heads."""
    random = np.random.default_rng(11)
    for i in range(number):
        merged = {"num_kv_heads": (1, 2, 4)[i % 3], "rotary_tpl": (ROTARY, None)[i % 2]}
        for option in random.permutation(len(OPTIONS))[: len(OPTIONS) // 2]:
            merged.update(OPTIONS[option])
        if merged["rotary_tpl"] is None:
            merged.pop("qk_norm_before_rotary", None)  # without a rotary embedding an error
        if merged.get("combined_qkv"):
            merged.pop("values_are_keys", None)
        yield merged


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, marks=[pytest.mark.slow] * (i >= ordinary))
        for cases, ordinary in ((CASES, 4), (combinations(6), 1))
        for i, fields in enumerate(cases)
    ],
    ids=lambda fields: "-".join(sorted(fields)[:9]),
)
def test_steps_equal_fprop_for_every_option(fields):
    layer = make(**fields)

    @jax.jit
    def both_ways(weights, x):
        cache = empty_cache(layer, weights)
        filled, cache = extend(layer, weights, cache, x[:, :5], 0)
        last, _ = extend(layer, weights, cache, x[:, 5:], 5)
        return jnp.concatenate([filled, last], axis=1), whole(layer, weights, x)

    actual, expected = both_ways(drawn_weights(layer), inputs())
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_steps_equal_fprop_with_a_bias_argument():
    layer = make(num_kv_heads=2, relative_bias_tpl=Alibi.HParams.config())
    weights, x = drawn_weights(layer), inputs()
    bias = jax.random.normal(jax.random.key(5), (1, HEADS, SLOTS, SLOTS))
    expected = whole(layer, weights, x, bias=bias[:, :, :LENGTH, :LENGTH])
    cache, outs = empty_cache(layer, weights), []
    for start, stop in ((0, 4), (4, 5), (5, 6)):
        own = bias[:, :, start:stop]
        out, cache = extend(layer, weights, cache, x[:, start:stop], start, bias=own)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), expected, atol=1e-5)


def test_cache_holds_values_of_children_with_another_compute_dtype():
    norm = RMS_NORM.clone().set(fprop_dtype="float32")
    layer = make(num_kv_heads=2, rotary_tpl=ROTARY, qk_norm_tpl=norm, fprop_dtype="bfloat16")
    weights, x = drawn_weights(layer), inputs()
    expected = whole(layer, weights, x)
    np.testing.assert_allclose(in_chunks(layer, weights, x, [7, 1]), expected, atol=0.05)


def test_cache_holds_rotated_keys_and_values_in_the_compute_dtype():
    layer = make(num_kv_heads=2, rotary_tpl=ROTARY, fprop_dtype="bfloat16")
    weights = drawn_weights(layer)
    cache = empty_cache(layer, weights)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), cache)
    each = ((BATCH, 2, SLOTS, DIMS // HEADS), "bfloat16")
    assert shapes == {CACHE: {"key": each, "value": each}}
    out, after = extend(layer, weights, cache, inputs(length=2), 3)
    assert out.dtype == jnp.bfloat16

    @jax.jit
    def projected(weights, x):
        bound = layer.bind(weights)
        return bound.rotary(bound.key(x), positions(2, 3, 5)), bound.value(x)

    key, value = projected(weights, inputs(length=2))
    for name, new in (("key", key), ("value", value)):
        slots = np.swapaxes(after[CACHE][name], 1, 2)
        np.testing.assert_array_equal(slots[:, 3:5], new)
        np.testing.assert_array_equal(np.delete(slots, [3, 4], axis=1), 0.0)


def test_unwritten_slots_have_no_effect():
    layer = make(num_kv_heads=2, rotary_tpl=ROTARY)
    weights, x = drawn_weights(layer), inputs()
    poisoned = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e4), empty_cache(layer, weights))
    expected = whole(layer, weights, x)
    actual = in_chunks(layer, weights, x, [2, 1, 1, 1, 1], cache=poisoned)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("chunks", "fields"),
    [
        ([3, 1, 2], {"window": 3, "relative_bias_tpl": RELATIVE_BIAS, "qkv_conv_tpl": CONV}),
        ([2, 2, 2], {"window": 4, "look_ahead": 2, "relative_bias_tpl": RELATIVE_BIAS}),
        pytest.param([1, 4, 1], {"window": 1}, marks=pytest.mark.slow),
        pytest.param([5, 1], {"window": 3, "chunk": 4}, marks=pytest.mark.slow),
    ],
)
def test_streaming_with_a_rolling_cache_equals_fprop(chunks, fields):
    layer = make(num_kv_heads=2, rotary_tpl=ROTARY, has_rolling_cache=True, **fields)
    weights, x = drawn_weights(layer), inputs()
    # A bias of slots hides a token, as paddings do.
    bias = jnp.zeros((BATCH, 1, LENGTH, LENGTH)).at[1, :, 2:, 1].set(-1e9)
    cache = empty_cache(layer, weights, slots=1000)
    assert cache[CACHE]["key"].shape == (BATCH, 2, fields["window"] - 1, DIMS // HEADS)
    outs, start = [], 0
    for size in chunks:
        end = start + size
        options = {"bias": bias[:, :, start:end]}
        out, cache = extend(layer, weights, cache, x[:, start:end], start, **options)
        outs, start = [*outs, out], end
    actual = jnp.concatenate(outs, axis=1)
    np.testing.assert_allclose(actual, whole(layer, weights, x, bias), atol=1e-5)


def test_step_behind_the_bias_of_a_rolling_cache_is_nan():
    layer = make(window=3, has_rolling_cache=True)
    weights, bias = drawn_weights(layer), jnp.zeros((BATCH, 1, 2, LENGTH))
    cache, x = empty_cache(layer, weights), inputs()[:, :2]
    assert jnp.isfinite(extend(layer, weights, cache, x, LENGTH - 2, bias=bias)[0]).all()
    assert jnp.isnan(extend(layer, weights, cache, x, LENGTH - 1, bias=bias)[0]).all()


def test_rolling_cache_rejects_a_prefix(raises):
    layer = make(window=3, has_rolling_cache=True)
    weights = drawn_weights(layer)
    cache = empty_cache(layer, weights)
    ends = jnp.full((BATCH, LENGTH), 2)
    with raises(ConfigError, field="query_ends"):
        extend(layer, weights, cache, inputs(), 0, query_ends=ends)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"window": 2, "relative_bias_tpl": Alibi.HParams.config()},
    ],
)
def test_prompts_of_unequal_length_are_written_in_one_step(fields):
    layer = make(num_kv_heads=2, rotary_tpl=ROTARY, **fields)
    weights, x = drawn_weights(layer), inputs(batch=3)
    prompt_lengths = np.array([2, 4, 3])
    width = 4
    # Beyond its prompt a row holds surplus, whose keys the first pass writes into the cache.
    surplus = np.arange(width)[None, :] >= prompt_lengths[:, None]
    prompts = jnp.where(surplus[..., None], 77.0, x[:, :width])
    expected = whole(layer, weights, x)
    cache = empty_cache(layer, weights, batch=3)
    filled, cache = extend(layer, weights, cache, prompts, 0)
    np.testing.assert_allclose(filled[~surplus], expected[:, :width][~surplus], atol=1e-5)
    for start in range(int(prompt_lengths.min()), LENGTH):
        out, cache = extend(layer, weights, cache, x[:, start : start + 1], start)
        np.testing.assert_allclose(out[:, 0], expected[:, start], atol=1e-5)


# With a context axis, rows are split and single tokens are not.
@pytest.mark.parametrize(
    ("axis", "fields", "shard"),
    [
        pytest.param("fsdp", {"num_kv_heads": 2}, (1, 1, SLOTS), marks=pytest.mark.slow),
        ("fsdp", {"num_kv_heads": 2, "combined_qkv": True}, (1, 1, SLOTS)),
        ("context", {"num_kv_heads": 1, "relative_bias_tpl": RELATIVE_BIAS}, (2, 1, SLOTS // 2)),
        (
            "context",
            {"num_kv_heads": 2, "qkv_conv_tpl": CONV, "window": 3, "has_rolling_cache": True},
            (2, 1, 2),
        ),
    ],
)
def test_on_a_mesh_equals_one_device(axis, fields, shard):
    mesh = Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", axis, "tensor"))
    layer = make(rotary_tpl=ROTARY, **fields)
    weights, x = drawn_weights(layer), inputs(batch=4)
    bound = layer.clone(sharding=BoundSharding(mesh))
    cache = empty_cache(bound, weights, batch=4)
    key = cache[CACHE]["key"]
    assert key.sharding.shard_shape(key.shape) == (*shard, DIMS // HEADS)
    actual = in_chunks(bound, weights, x, [4, 1, 1], cache=cache)
    np.testing.assert_allclose(actual, whole(layer, weights, x), atol=1e-5)


def test_step_beyond_the_end_of_the_cache_returns_nan():
    layer = make()
    weights = drawn_weights(layer)
    cache = empty_cache(layer, weights)
    x = inputs(length=2)
    assert np.isfinite(extend(layer, weights, cache, x, SLOTS - 2)[0]).all()
    assert np.isnan(extend(layer, weights, cache, x, SLOTS - 1)[0]).all()


def test_fprop_creates_no_cache():
    layer = make()
    weights = drawn_weights(layer)
    mask, places = AttentionMask.causal_mask(BATCH, LENGTH), positions(BATCH, 0, LENGTH)
    _, state = jax.eval_shape(
        lambda x: layer.apply(weights, x, mask=mask, positions=places, mutable=[CACHE]), inputs()
    )
    assert not state
    assert set(weights) == {PARAMS}


@pytest.mark.parametrize("sizes", [{"batch": 3}, {"length": 9}])
def test_tokens_that_do_not_fit_the_cache_raise(raises, sizes):
    layer = make()
    weights = drawn_weights(layer)
    x = inputs(**sizes)
    with raises(ConfigError, field="shape of inputs", value=list(x.shape[:2])):
        extend(layer, weights, empty_cache(layer, weights), x, 0)


@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 2, "combined_qkv": True}])
def test_cache_in_int8_holds_rounded_keys_and_values(fields):
    exact = make(rotary_tpl=ROTARY, **fields)
    layer = exact.clone(cache_format="int8")
    weights, x = drawn_weights(exact), inputs()
    caches = []
    for each in (exact, layer):
        cache = empty_cache(each, weights)
        _, cache = extend(each, weights, cache, x[:, :4], 0)
        _, cache = extend(each, weights, cache, x[:, 4:5], 4)
        caches.append({name: np.asarray(leaf) for name, leaf in cache[CACHE].items()})
    for name in ("key", "value"):
        value = caches[0][name][:, :, :5]
        scale = np.abs(value).max(axis=-1, keepdims=True) / np.float32(127)
        result = caches[1][name]
        assert (result.dtype, result.shape) == (np.int8, caches[0][name].shape)
        np.testing.assert_allclose(caches[1][f"{name}_scale"][:, :, :5], scale, rtol=1e-5)
        np.testing.assert_allclose(result[:, :, :5] * scale, value, atol=0.51 * scale.max())
        assert not np.any(result[:, :, 5:])


def test_steps_with_a_cache_in_int8_are_near_whole_rows():
    layer = make(rotary_tpl=ROTARY, cache_format="int8")
    weights, x = drawn_weights(layer), inputs()
    expected = np.asarray(whole(layer, weights, x))
    result = np.asarray(in_chunks(layer, weights, x, [3, 1, 1, 1]))
    assert 0 < np.abs(result - expected).max() < 0.02 * np.abs(expected).max()
