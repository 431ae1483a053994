"""MultiHeadAttention over whole rows: against loops in NumPy, invariances, fields, layouts."""

from __future__ import annotations

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from layerkit.base_layer import RANDOM
from layerkit.layers.attention.backends import BackendRefusal
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.attention.projections import HeadProjection
from layerkit.layers.masks import AttentionMask
from layerkit.layers.positions import RotaryPositionalEmbedding
from layerkit.sharding import BoundSharding
from layerkit.weights import logical_axes

BATCH, LENGTH, DIMS, HEADS, HEAD_DIM = 2, 6, 8, 4, 2
ROTARY = RotaryPositionalEmbedding.HParams.config()
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]], np.int32)


def make(**fields):
    return MultiHeadAttention(**{"input_dims": DIMS, "num_heads": HEADS, **fields})


def drawn_weights(layer, seed=0):
    """Weights without zeros: those that start at 0 would hide a fault."""
    leaves, structure = jax.tree.flatten(layer.init(jax.random.key(0)))
    streams = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [0.5 * jax.random.normal(s, w.shape) for s, w in zip(streams, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def inputs(batch=BATCH, length=LENGTH, seed=1):
    return jax.random.normal(jax.random.key(seed), (batch, length, DIMS))


def rows(batch=BATCH, length=LENGTH):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


def run(layer, weights, x, *, segments=None, positions=None, **options):
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


def by_loops(weights, x, *, kv_heads, segments=None, rotary, cap=None, learned_scale=False):
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), weights["params"])
    x = np.asarray(x, np.float64)

    def project(name):
        return np.einsum("bld,dnh->blnh", x, params[name]["w"]) + params[name].get("b", 0.0)

    query, key, value = project("query"), project("key"), project("value")
    if rotary:
        for heads in (query, key):
            for b, i, h in np.ndindex(*heads.shape[:3]):
                heads[b, i, h] = turned(heads[b, i, h], i)
    scale = np.full(HEAD_DIM, 1 / math.sqrt(HEAD_DIM))
    if learned_scale:
        scale *= 1.442695041 * np.log1p(np.exp(params["scale"]))
    read = np.zeros(query.shape)
    for b, i, h in np.ndindex(*query.shape[:3]):
        group = HEADS // kv_heads
        seen = [j for j in range(i + 1) if segments is None or segments[b, i] == segments[b, j]]
        logits = np.array([(query[b, i, h] * scale) @ key[b, j, h // group] for j in seen])
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        weights_of_keys = np.exp(logits) / np.exp(logits).sum()
        read[b, i, h] = sum(
            w * value[b, j, h // group] for w, j in zip(weights_of_keys, seen, strict=True)
        )
    output = np.einsum("blnh,nhd->bld", read, params["output"]["w"])
    return output + params["output"].get("b", 0.0)


@pytest.mark.parametrize(
    ("fields", "reference"),
    [
        ({}, {}),
        ({"use_bias": True}, {}),
        ({"rotary_tpl": ROTARY}, {"rotary": True}),
        ({"logit_cap": 0.5}, {"cap": 0.5}),
        ({"per_dim_scale": True}, {"learned_scale": True}),
        (
            {"rotary_tpl": ROTARY, "use_bias": True, "per_dim_scale": True, "logit_cap": 1.5},
            {"rotary": True, "learned_scale": True, "cap": 1.5},
        ),
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
def test_equals_loops(fields, reference, kv_heads):
    layer = make(num_kv_heads=kv_heads, **fields)
    weights = drawn_weights(layer)
    x = inputs()
    for segments in (None, SEGMENTS):
        given = None if segments is None else jnp.asarray(segments)
        expected = by_loops(
            weights, x, kv_heads=kv_heads, segments=segments, **{"rotary": False, **reference}
        )
        np.testing.assert_allclose(run(layer, weights, x, segments=given), expected, atol=1e-5)


def test_weights_and_their_axes():
    layer = make(num_kv_heads=2, use_bias=True, per_dim_scale=True, rotary_tpl=ROTARY)
    boxed = layer.init_boxed(jax.random.key(0))
    assert jax.tree.map(jnp.shape, layer.init(jax.random.key(0))) == {
        "params": {
            "query": {"w": (8, 4, 2), "b": (4, 2)},
            "key": {"w": (8, 2, 2), "b": (2, 2)},
            "value": {"w": (8, 2, 2), "b": (2, 2)},
            "output": {"w": (4, 2, 8), "b": (8,)},
            "scale": (2,),
        }
    }
    of_keys = {"w": ("embed", "kv_heads", "head_dim"), "b": ("kv_heads", "head_dim")}
    assert logical_axes(boxed)["params"] == {
        "query": {"w": ("embed", "heads", "head_dim"), "b": ("heads", "head_dim")},
        "key": of_keys,
        "value": of_keys,
        "output": {"w": ("heads", "head_dim", "embed"), "b": ("embed",)},
        "scale": ("head_dim",),
    }


def test_sizes_need_not_multiply_to_the_model_dimension():
    layer = make(num_heads=3, dim_per_head=5)
    weights = layer.init(jax.random.key(0))
    assert weights["params"]["query"]["w"].shape == (DIMS, 3, 5)
    assert run(layer, weights, inputs()).shape == (BATCH, LENGTH, DIMS)


def test_fans_of_grouped_keys_are_their_own():
    layer = MultiHeadAttention(input_dims=48, num_heads=8, num_kv_heads=2, dim_per_head=16)
    params = layer.init(jax.random.key(0))["params"]
    for name, fan_in, fan_out in [
        ("query", 48, 8 * 16),
        ("key", 48, 2 * 16),
        ("value", 48, 2 * 16),
        ("output", 8 * 16, 48),
    ]:
        bound = math.sqrt(6 / (fan_in + fan_out))
        assert 0.98 * bound < np.abs(params[name]["w"]).max() <= bound


def test_a_learned_scale_starts_as_no_learned_scale():
    x = inputs()
    plain, learned = make(), make(per_dim_scale=True)
    weights = learned.init(jax.random.key(0))
    without = {"params": {k: v for k, v in weights["params"].items() if k != "scale"}}
    np.testing.assert_allclose(run(learned, weights, x), run(plain, without, x), atol=1e-6)


def test_as_many_kv_heads_as_heads_is_multi_head_attention():
    layer = make(rotary_tpl=ROTARY)
    weights = layer.init(jax.random.key(0))
    grouped = make(rotary_tpl=ROTARY, num_kv_heads=HEADS)
    np.testing.assert_array_equal(run(grouped, weights, inputs()), run(layer, weights, inputs()))


def test_grouped_keys_are_keys_repeated():
    grouped = make(num_kv_heads=2, rotary_tpl=ROTARY)
    weights = drawn_weights(grouped)
    params = dict(weights["params"])
    for name in ("key", "value"):
        params[name] = {"w": jnp.repeat(params[name]["w"], HEADS // 2, axis=1)}
    repeated = run(make(rotary_tpl=ROTARY), {"params": params}, inputs())
    np.testing.assert_allclose(run(grouped, weights, inputs()), repeated, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_token_does_not_change_what_stands_before_it(dtype):
    layer = make(num_kv_heads=2, rotary_tpl=ROTARY, fprop_dtype=dtype)
    weights = drawn_weights(layer)
    x = inputs()
    before = run(layer, weights, x)
    assert before.dtype == dtype
    for token in range(LENGTH):
        after = run(layer, weights, x.at[:, token].mul(-50.0))
        np.testing.assert_array_equal(after[:, :token], before[:, :token])
        assert (after[:, token] != before[:, token]).any()


def test_packed_documents_equal_documents_alone():
    layer = make(num_kv_heads=2, rotary_tpl=ROTARY, use_bias=True)
    weights = drawn_weights(layer)
    lengths = (3, 1, 2)
    documents = [inputs(1, n, seed=10 + n) for n in lengths]
    segments = jnp.asarray(np.repeat([1, 2, 3], lengths)[None], jnp.int32)
    positions = jnp.concatenate([rows(1, n) for n in lengths], axis=1)
    packed = run(
        layer,
        weights,
        jnp.concatenate(documents, axis=1),
        segments=segments,
        positions=positions,
    )
    alone = jnp.concatenate([run(layer, weights, x) for x in documents], axis=1)
    np.testing.assert_allclose(packed, alone, atol=1e-5)


def test_dropout_acts_in_training_only():
    layer = make(dropout_rate=0.5)
    weights = drawn_weights(layer)
    x = inputs()
    plain = run(make(), weights, x)
    np.testing.assert_array_equal(run(layer, weights, x), plain)
    training = layer.clone(train=True)
    first, again, other = (
        run(training, weights, x, rngs={RANDOM: jax.random.key(seed)}) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != plain).any() and (first != other).any()
    # Only probabilities are dropped: the first token sees one key, so it reads twice that or none.
    once = np.einsum("bd,dnh->bnh", x[:, 0], weights["params"]["value"]["w"])
    out = np.asarray(weights["params"]["output"]["w"])
    choices = np.stack(np.meshgrid(*[[0.0, 2.0]] * HEADS, indexing="ij"), -1).reshape(-1, HEADS)
    for b in range(BATCH):
        reads = np.einsum("cn,nh,nhd->cd", choices, once[b], out)
        assert np.abs(reads - first[b, 0]).max(axis=-1).min() < 1e-5


def masked_query():
    """Query 1 of every row belongs to a segment that no key has."""
    ones = jnp.ones((BATCH, LENGTH), jnp.int32)
    return AttentionMask(rows(), rows(), ones.at[:, 1].set(9), ones, causal=True)


def test_zero_fully_masked_rows():
    weights = drawn_weights(make())
    outs = {
        zero: make(zero_fully_masked_rows=zero).apply(
            weights, inputs(), mask=masked_query(), positions=rows()
        )
        for zero in (False, True)
    }
    np.testing.assert_array_equal(outs[True][:, 1], 0.0)
    assert np.abs(outs[False][:, 1]).min() > 0
    np.testing.assert_array_equal(outs[True][:, 2:], outs[False][:, 2:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [False, True])
def test_gradients_are_finite_with_fully_masked_rows(zero, dtype):
    layer = make(
        zero_fully_masked_rows=zero,
        rotary_tpl=ROTARY,
        per_dim_scale=True,
        logit_cap=5.0,
        fprop_dtype=dtype,
    )

    def total(weights):
        out = layer.apply(weights, inputs(), mask=masked_query(), positions=rows())
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradients = jax.grad(total)(drawn_weights(layer))
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path


@pytest.mark.parametrize("axes", [("data", "fsdp", "tensor"), ("data", "context", "tensor")])
def test_on_a_mesh_equals_one_device(axes):
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    layer = make(num_kv_heads=2, rotary_tpl=ROTARY, use_bias=True, per_dim_scale=True)
    weights, x = drawn_weights(layer), inputs(batch=4)

    def loss(layer, weights, x):
        out = run(layer, weights, x, segments=jnp.asarray(np.tile(SEGMENTS, (2, 1))))
        return jnp.sum(out**2), out

    def step(layer):
        return jax.jit(jax.value_and_grad(lambda *a: loss(layer, *a), argnums=(0, 1), has_aux=True))

    (expected_loss, expected), expected_gradients = step(layer)(weights, x)
    bound = layer.clone(sharding=BoundSharding(mesh))
    (actual_loss, actual), gradients = step(bound)(weights, x)
    split_rows, split_length = (4, 1) if axes[1] == "fsdp" else (2, 2)
    shard = (4 // split_rows, LENGTH // split_length, DIMS)
    assert actual.sharding.shard_shape(actual.shape) == shard
    np.testing.assert_allclose(actual_loss, expected_loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-5 * max(1.0, np.abs(b).max())
        ),
        (actual, gradients),
        (expected, expected_gradients),
    )


def test_heads_that_cannot_be_split_may_say_so():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    whole = HeadProjection.HParams.config(
        weight_axes=("embed", None, "head_dim"),
        activation_axes=("batch", "length", None, "head_dim"),
    )
    layer = make(num_kv_heads=1, key_tpl=whole, value_tpl=whole)
    weights, x = drawn_weights(layer), inputs(batch=4)
    bound = layer.clone(sharding=BoundSharding(mesh))
    actual = jax.jit(lambda w, x: run(bound, w, x))(weights, x)
    np.testing.assert_allclose(actual, run(layer, weights, x), atol=1e-5)


def test_backend_is_chosen_reported_and_refused(caplog):
    weights = drawn_weights(make())

    def reported(**fields):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="layerkit"):
            run(make(**fields), weights, inputs())
        return caplog.messages

    assert reported() == ["attention backend: xla (auto: cpu has no fused kernel)"]
    assert reported(backend="xla") == ["attention backend: xla (as asked)"]
    refusal = (
        "attention backend 'cudnn' cannot do what is asked: it needs a GPU, not cpu; it needs"
        " bfloat16 or float16, not float32; it needs heads of a multiple of 8 and at most 128, not"
        " 2. Use backend='xla' or 'auto'."
    )
    with pytest.raises(BackendRefusal) as error:
        run(make(backend="cudnn"), weights, inputs())
    assert str(error.value) == refusal


def test_dropout_is_an_obstacle_in_training_only():
    layer = make(backend="cudnn", dropout_rate=0.1, logit_cap=2.0)
    for train in (False, True):
        with pytest.raises(BackendRefusal) as error:
            run(layer.clone(train=train), drawn_weights(make()), inputs())
        assert ("our dropout" in str(error.value)) is train
        assert "a logit cap" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"num_heads": 3},
            "num_heads=3 does not divide input_dims=8; set dim_per_head, or num_heads=2",
        ),
        (
            {"num_kv_heads": 3},
            "num_kv_heads=3 does not divide num_heads=4; the nearest that does is 2",
        ),
        ({"num_kv_heads": 0}, "num_kv_heads=0, expected at least 1"),
        (
            {"num_kv_heads": 8},
            "num_kv_heads=8 does not divide num_heads=4; the nearest that does is 4",
        ),
        ({"num_heads": 0}, "num_heads=0, expected at least 1"),
        ({"dim_per_head": 0}, "dim_per_head=0, expected at least 1"),
        ({"logit_cap": 0.0}, "logit_cap=0.0 must be positive, or None for no cap"),
        (
            {"backend": "cuddn"},
            "backend='cuddn' is not an attention backend; did you mean 'cudnn'?"
            " Backends: auto, xla, cudnn.",
        ),
    ],
)
def test_wrong_fields_are_refused(fields, text):
    with pytest.raises(ValueError) as error:
        make(**fields).init(jax.random.key(0))
    assert str(error.value) == f"MultiHeadAttention(): {text}"
