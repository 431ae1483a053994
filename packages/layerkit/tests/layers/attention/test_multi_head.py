"""MultiHeadAttention over whole rows: comparison with NumPy, invariances, fields, shardings."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.sharding import DEFAULT_RULES, BoundSharding
from layerkit.errors import ConfigError
from layerkit.layers.attention.base_attention import AttentionLayer, HeadProjection
from layerkit.layers.attention.biases import Alibi, RelativeBias
from layerkit.layers.attention.latent import MultiHeadLatentAttention
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.basic.normalizations import RmsNorm, RmsNormNoScale
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.ops.attention.masks import AttentionMask

BATCH, LENGTH, DIMS, HEADS, HEAD_DIM = 2, 6, 8, 4, 2
ROTARY = RotaryPositionalEmbedding.HParams.config()
RMS_NORM, NO_SCALE = RmsNorm.HParams.config(), RmsNormNoScale.HParams.config()
LATENT_SIZES = {
    "latent_dims": 4,
    "plain_dim_per_head": 2,
    "rotary_dim_per_head": 2,
    "value_dim_per_head": 2,
}
ALIBI = Alibi.HParams.config()
# Four heads have the slopes 1/4, 1/16, 1/64 and 1/256.
ALIBI_OF_HEADS = -np.array([0.25**h for h in (1, 2, 3, 4)])[:, None, None] * np.abs(
    np.arange(LENGTH)[:, None] - np.arange(LENGTH)
)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]], np.int32)


def make(**fields):
    return MultiHeadAttention(**{"input_dims": DIMS, "num_heads": HEADS, **fields})


def drawn_weights(layer):
    """Return weights without zeros, since weights that start at 0 would hide errors."""
    random, shapes = np.random.default_rng(0), jax.eval_shape(layer.init, jax.random.key(0))
    return jax.tree.map(lambda w: random.normal(0.0, 0.5, w.shape).astype(np.float32), shapes)


def inputs(batch=BATCH, length=LENGTH, seed=1):
    return jax.random.normal(jax.random.key(seed), (batch, length, DIMS))


def rows(batch=BATCH, length=LENGTH):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


@functools.partial(jax.jit, static_argnames="layer")
def run(layer, weights, x, *, segments=None, positions=None, **options):
    """Causal attention."""
    batch, length = x.shape[:2]
    mask = AttentionMask.causal_mask(batch, length, segment_ids=segments)
    positions = rows(batch, length) if positions is None else positions
    return layer.apply(weights, x, mask=mask, positions=positions, **options)


def turned(vector, position):
    """Rotary positions one pair at a time, as a product of complex numbers."""
    half = len(vector) // 2
    pairs = [
        complex(vector[i], vector[i + half])
        * np.exp(1j * position / 10_000.0 ** (2 * i / len(vector)))
        for i in range(half)
    ]
    return np.array([p.real for p in pairs] + [p.imag for p in pairs])


def rms(vectors, scale):
    return vectors / np.sqrt((vectors**2).mean(-1, keepdims=True) + 1e-6) * scale


def normed(heads, scale, over):
    if over == "head":
        return rms(heads, scale)
    return rms(heads.reshape(*heads.shape[:2], -1), scale).reshape(heads.shape)


def by_loops(
    theta,
    x,
    *,
    segments=None,
    rotary=False,
    norm=None,
    value_norm=False,
    cap=None,
    scale=None,
    window=None,
    bias=0.0,
    chunk=LENGTH,
    growth=(0.0, 1),
):
    """float64; `norm` is (whether before the rotation, extent)."""
    bias = np.broadcast_to(bias, (HEADS, LENGTH, LENGTH))
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), theta["params"])
    x = np.asarray(x, np.float64)

    def project(name):
        return np.einsum("bld,dnh->blnh", x, params[name]["w"]) + params[name].get("b", 0.0)

    def norm_both(query, key, *, first):
        if norm is None or norm[0] is not first:
            return query, key
        return (
            normed(query, params["query_norm"]["scale"], norm[1]),
            normed(key, params["key_norm"]["scale"], norm[1]),
        )

    query, key = norm_both(project("query"), project("key"), first=True)
    value = project("value" if "value" in params else "key")
    if value_norm:
        value = rms(value, params.get("value_norm", {"scale": 1.0})["scale"])
    if rotary:
        for heads in (query, key):
            for b, i, h in np.ndindex(*heads.shape[:3]):
                heads[b, i, h] = turned(heads[b, i, h], i)
    query, key = norm_both(query, key, first=False)
    factors = np.full(HEAD_DIM, 1 / math.sqrt(HEAD_DIM) if scale is None else scale)
    if "scale" in params:
        factors *= 1.442695041 * np.log1p(np.exp(params["scale"]))
    read = np.zeros(query.shape)
    for b, i, h in np.ndindex(*query.shape[:3]):
        first = 0 if window is None else max(0, i - window + 1)
        group = HEADS // key.shape[2]
        seen = [
            j
            for j in range(first, i + 1)
            if segments is None or segments[b, i] == segments[b, j]
            if i // chunk == j // chunk or (segments is not None and segments[b, i] == 0)
        ]
        grown = factors * (1.0 + growth[0] * np.log(1 + (i + 1) // growth[1]))
        logits = np.array([(query[b, i, h] * grown) @ key[b, j, h // group] for j in seen])
        logits += bias[h, i, seen]
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        exponentials = np.exp(logits)
        total = exponentials.sum() + (np.exp(params["sinks"][h]) if "sinks" in params else 0.0)
        read[b, i, h] = sum(
            e / total * value[b, j, h // group] for e, j in zip(exponentials, seen, strict=True)
        )
    if "gate" in params:
        read /= 1 + np.exp(-project("gate"))
    output = np.einsum("blnh,nhd->bld", read, params["output"]["w"])
    return output + params["output"].get("b", 0.0)


@pytest.mark.parametrize(
    ("fields", "reference"),
    [
        ({}, {}),
        ({"use_bias": True}, {}),
        ({"use_bias": True, "use_output_bias": False}, {}),
        ({"rotary_tpl": ROTARY}, {"rotary": True}),
        ({"logit_cap": 0.5}, {"cap": 0.5}),
        ({"logit_scale": 1.0}, {"scale": 1.0}),
        ({"per_dim_scale": True}, {}),
        ({"value_norm_tpl": RMS_NORM}, {"value_norm": True}),
        ({"output_gate_tpl": HeadProjection.HParams.config(), "use_bias": True}, {}),
        (
            {
                "values_are_keys": True,
                "value_norm_tpl": NO_SCALE,
                "qk_norm_tpl": RMS_NORM,
                "qk_norm_before_rotary": True,
                "rotary_tpl": ROTARY,
            },
            {"value_norm": True, "norm": (True, "head"), "rotary": True},
        ),
        ({"window": 2}, {"window": 2}),
        ({"chunk": 2}, {"chunk": 2}),
        ({"query_growth": 0.5, "query_growth_step": 2}, {"growth": (0.5, 2)}),
        ({"use_sinks": True}, {}),
        ({"relative_bias_tpl": ALIBI}, {"bias": ALIBI_OF_HEADS}),
        (
            {
                "rotary_tpl": ROTARY,
                "use_bias": True,
                "per_dim_scale": True,
                "logit_cap": 1.5,
                "window": 3,
                "use_sinks": True,
                "relative_bias_tpl": ALIBI,
            },
            {"rotary": True, "cap": 1.5, "window": 3, "bias": ALIBI_OF_HEADS},
        ),
    ],
)
def test_layer_equals_numpy_loops(fields, reference):
    cases = ((1, SEGMENTS), (2, SEGMENTS), (2, None), (HEADS, None))
    if len(fields) in (1, 2):  # other groups are tried without options and with all of them
        cases = cases[1:2]
    for kv_heads, segments in cases:
        layer = make(num_kv_heads=kv_heads, **fields)
        weights, x = drawn_weights(layer), inputs()
        expected = by_loops(weights, x, segments=segments, **reference)
        actual = run(layer, weights, x, segments=segments)
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("over", ["head", "projection"])
def test_norm_of_queries_and_keys_equals_loops(over, first):
    fields = {"qk_norm_tpl": RMS_NORM, "qk_norm_over": over, "qk_norm_before_rotary": first}
    layer = make(num_kv_heads=2, rotary_tpl=ROTARY, **fields)
    weights, x = drawn_weights(layer), inputs()
    dims = {"head": (HEAD_DIM, HEAD_DIM), "projection": (HEADS * HEAD_DIM, 2 * HEAD_DIM)}[over]
    params = weights["params"]
    assert (params["query_norm"]["scale"].size, params["key_norm"]["scale"].size) == dims
    expected = by_loops(weights, x, rotary=True, norm=(first, over))
    np.testing.assert_allclose(run(layer, weights, x), expected, atol=1e-5)
    elsewhere = by_loops(weights, x, rotary=True, norm=(not first, over))
    assert np.abs(elsewhere - expected).max() > 1e-2


def test_bias_argument_is_added_to_the_bias_of_the_layer():
    x = inputs()
    given = np.random.default_rng(3).normal(size=(1, HEADS, LENGTH, LENGTH)).astype(np.float32)
    weights = drawn_weights(make(num_kv_heads=2))
    for fields, total in (
        ({}, given[0]),
        ({"relative_bias_tpl": ALIBI}, given[0] + ALIBI_OF_HEADS),
    ):
        layer = make(num_kv_heads=2, **fields)
        expected = by_loops(weights, x, bias=total)
        np.testing.assert_allclose(run(layer, weights, x, bias=given), expected, atol=1e-5)


def test_window_without_causal_mask_is_two_sided():
    layer, x = make(window=2), inputs()
    weights = drawn_weights(layer)

    @jax.jit
    def read(x):
        mask = AttentionMask.bidirectional_mask(BATCH, LENGTH)
        return layer.apply(weights, x, mask=mask, positions=rows())

    changed = np.abs(read(x.at[:, 3].add(1.0)) - read(x)).max(axis=(0, 2)) > 1e-6
    np.testing.assert_array_equal(changed, [False, False, True, True, True, False])


def test_fans_of_grouped_keys_are_those_of_their_weight():
    layer = MultiHeadAttention(input_dims=48, num_heads=8, num_kv_heads=2, dim_per_head=16)
    params = jax.jit(layer.init)(jax.random.key(0))["params"]
    for name, fan_in, fan_out in [
        ("query", 48, 8 * 16),
        ("key", 48, 2 * 16),
        ("value", 48, 2 * 16),
        ("output", 8 * 16, 48),
    ]:
        bound = math.sqrt(6 / (fan_in + fan_out))
        assert 0.98 * bound < np.abs(params[name]["w"]).max() <= bound


def test_grouped_keys_equal_repeated_keys():
    grouped = make(num_kv_heads=2, rotary_tpl=ROTARY)
    weights = drawn_weights(grouped)
    params = dict(weights["params"])
    for name in ("key", "value"):
        params[name] = {"w": jnp.repeat(params[name]["w"], HEADS // 2, axis=1)}
    repeated = run(make(rotary_tpl=ROTARY), {"params": params}, inputs())
    np.testing.assert_allclose(run(grouped, weights, inputs()), repeated, atol=1e-6)


def test_single_key_head_is_replicated_and_other_numbers_need_a_rule(raises):
    mesh = Mesh(np.reshape(jax.devices(), (2, 1, 4)), ("data", "fsdp", "tensor"))
    x = inputs(batch=4)

    def on_the_mesh(kv_heads, rules):
        layer = make(num_kv_heads=kv_heads)
        weights = drawn_weights(layer)
        bound = layer.clone(sharding=BoundSharding(mesh, rules))
        actual = jax.jit(lambda w, x: run(bound, w, x))(weights, x)
        np.testing.assert_allclose(actual, run(layer, weights, x), atol=1e-5)

    on_the_mesh(1, DEFAULT_RULES)
    with raises(
        ConfigError, owner="HeadProjection(key)", field="dimension 'act_kv_heads'", value=2
    ):
        on_the_mesh(2, DEFAULT_RULES)
    on_the_mesh(2, DEFAULT_RULES.replace(kv_heads=None, act_kv_heads=None))


def weights_of(theirs):
    """Return the weights of Praxis' projections in the tree of this library."""
    weights = {name: {"w": theirs[name]["w"]} for name in ("query", "key", "value")}
    return {**weights, "output": {"w": theirs["post"]["w"].transpose(1, 2, 0)}}


def test_logits_of_praxis_scaled_after_the_bias_equal_those_of_a_smaller_bias(praxis):
    case, dim = praxis("relative_bias"), 3
    weights = weights_of(case["weights"])
    wrb = case["weights"]["relative_bias"]["wrb"]
    weights["relative_bias"] = {"w": wrb.T / math.sqrt(dim)}
    bias = RelativeBias.HParams.config(num_buckets=4, max_distance=6)
    layer = MultiHeadAttention(input_dims=4, num_heads=2, dim_per_head=dim, relative_bias_tpl=bias)
    result = run(layer, {"params": weights}, jnp.array(case["x"]))
    np.testing.assert_allclose(result, case["outputs"], rtol=1e-4, atol=1e-5)


def test_fixed_sink_without_a_scale_equals_the_extra_logit_of_praxis(praxis):
    case = praxis("extra_logit")
    variables, x = {"params": weights_of(case["weights"])}, jnp.array(case["x"])
    sizes = {"input_dims": 4, "num_heads": 2, "dim_per_head": 3}
    layer = MultiHeadAttention(**sizes, logit_scale=1.0, sink_logit=0.5)
    result = run(layer, variables, x)
    np.testing.assert_allclose(result, case["outputs"], rtol=1e-4, atol=1e-5)
    without = run(layer.clone(sink_logit=None), variables, x)
    assert np.abs(result - without).max() > 0.01


@pytest.mark.parametrize(
    ("layer_class", "fields"),
    [
        (MultiHeadAttention, {"value_norm_tpl": RMS_NORM}),
        (MultiHeadAttention, {"qk_norm_tpl": RMS_NORM, "rotary_tpl": ROTARY}),
        (MultiHeadLatentAttention, {"up_tpl": HeadProjection.HParams.config(), **LATENT_SIZES}),
    ],
)
def test_attention_runs_in_the_compute_dtype_whatever_that_of_a_child(
    monkeypatch, layer_class, fields
):
    dtypes = set()

    def attend(layer, query, key, value, options):
        dtypes.update(x.dtype for x in (query, key, value))
        return value

    monkeypatch.setattr(AttentionLayer, "attend", attend)
    templates = {name: value for name, value in fields.items() if name.endswith("_tpl")}
    templates = {name: tpl.clone().set(fprop_dtype="float32") for name, tpl in templates.items()}
    layer = layer_class(
        **{"input_dims": DIMS, "num_heads": HEADS, **fields, **templates}, fprop_dtype="bfloat16"
    )
    run(layer, drawn_weights(layer), inputs())
    assert dtypes == {jnp.dtype("bfloat16")}


class LinearAttention(MultiHeadAttention):
    """Attention whose logits are the weights."""

    used_only_if = {"logit_cap": "never"}

    def attend(self, query, key, value, options):
        logits = options.scale * jnp.einsum("bqhd,bkhd->bhqk", query, key)
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(options.mask.dense(), logits, 0.0), value)


def test_an_override_of_attend_computes_rows_and_steps_and_refuses_unused_fields():
    layer = LinearAttention(input_dims=DIMS, num_heads=HEADS)
    weights, x = drawn_weights(layer), inputs()
    whole = run(layer, weights, x)
    cache = layer.apply(weights, BATCH, LENGTH, method="init_cache", mutable=["cache"])[1]
    step = {"time_step": jnp.int32(0), "positions": rows()}
    steps = layer.apply({**weights, **cache}, x, **step, method="extend_step", mutable=["cache"])[0]
    np.testing.assert_allclose(steps, whole, atol=1e-5)
    with pytest.raises(ConfigError, match=r"logit_cap=2.0.*no effect in LinearAttention"):
        LinearAttention(input_dims=DIMS, num_heads=HEADS, logit_cap=2.0).init(jax.random.key(0))
