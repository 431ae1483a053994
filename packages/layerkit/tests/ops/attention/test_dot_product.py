"""The attention function, compared with loops in NumPy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import AbstractDevice, AbstractMesh

from layerkit.errors import ConfigError
from layerkit.ops.attention.dot_product import AttentionOptions, dot_product_attention
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.implementations import UnsupportedBackendError

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 5, 4, 3
SEGMENTS = np.array([[1, 1, 2, 2, 0], [1, 2, 2, 2, 2]], np.int32)


def draw(seed, *, queries=LENGTH, keys=LENGTH, heads=HEADS, kv_heads=HEADS, dtype=jnp.float32):
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads)
    streams = jax.random.split(jax.random.key(seed), 3)
    return [
        jax.random.normal(stream, (BATCH, length, n, HEAD_DIM)).astype(dtype)
        for stream, (length, n) in zip(streams, shapes, strict=True)
    ]


def by_loops(query, key, value, *, allowed, scale, cap=None, bias=None, sinks=None):
    """float64; `allowed` is `[batch, queries, keys]`."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, i, h in np.ndindex(*query.shape[:3]):
        total = 0.0 if sinks is None else math.exp(sinks[h])
        for j in np.flatnonzero(allowed[b, i]):
            logit = scale * float(query[b, i, h] @ key[b, j, h // group])
            if bias is not None:
                logit += bias[b % bias.shape[0], h % bias.shape[1], i, j]
            if cap is not None:
                logit = cap * math.tanh(logit / cap)
            out[b, i, h] += math.exp(logit) * value[b, j, h // group]
            total += math.exp(logit)
        out[b, i, h] /= total
    return out


MASKS = {
    "none": lambda: None,
    "causal": lambda: AttentionMask.causal_mask(BATCH, LENGTH),
    "packed": lambda: AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=jnp.asarray(SEGMENTS)),
    "padded": lambda: MASKS["packed"]().replace(causal=False),
}


def allowed_pairs(name):
    pairs = np.ones((BATCH, LENGTH, LENGTH), bool)
    for b, i, j in np.ndindex(*pairs.shape):
        if name in ("causal", "packed") and j > i:
            pairs[b, i, j] = False
        if name in ("packed", "padded") and SEGMENTS[b, i] != SEGMENTS[b, j]:
            pairs[b, i, j] = False
    return pairs


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
@pytest.mark.parametrize("mask", list(MASKS))
def test_attention_equals_numpy_loops(mask, kv_heads, cap):
    query, key, value = draw(0, kv_heads=kv_heads)
    expected = by_loops(query, key, value, allowed=allowed_pairs(mask), scale=0.6, cap=cap)
    actual = dot_product_attention(
        query, key, value, AttentionOptions(mask=MASKS[mask](), scale=0.6, logit_cap=cap)
    )
    np.testing.assert_allclose(actual, expected, atol=2e-6)


@pytest.mark.parametrize("cap", [None, 0.8])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("sizes", [None, (BATCH, HEADS), (1, HEADS), (BATCH, 1)])
def test_attention_with_a_bias_sinks_and_a_window_equals_numpy_loops(sizes, has_sinks, cap):
    query, key, value = draw(0, kv_heads=2)
    value = value[..., :2]  # smaller than queries and keys
    normal = np.random.default_rng(0).normal
    bias = None if sizes is None else normal(size=(*sizes, LENGTH, LENGTH)).astype(np.float32)
    learned = {"bias": bias, "sinks": normal(size=HEADS).astype(np.float32) if has_sinks else None}
    allowed = np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-3, dtype=bool)
    allowed = np.broadcast_to(allowed, (BATCH, LENGTH, LENGTH))
    expected = by_loops(query, key, value, allowed=allowed, scale=0.7, cap=cap, **learned)
    options = {"mask": MASKS["causal"]().within(3), "scale": 0.7, "logit_cap": cap}
    actual = dot_product_attention(
        query, key, value, AttentionOptions(**options, **jax.tree.map(jnp.array, learned))
    )
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_number_of_queries_and_keys_may_differ():
    query, key, value = draw(1, queries=2, keys=7)
    expected = by_loops(query, key, value, allowed=np.ones((BATCH, 2, 7), bool), scale=1.0)
    actual = dot_product_attention(query, key, value, AttentionOptions(scale=1.0))
    np.testing.assert_allclose(actual, expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_and_softmax_are_float32_for_low_precision_inputs(dtype):
    query, key, value = draw(2, dtype=dtype)
    actual = dot_product_attention(query, key, value, AttentionOptions(scale=1.0))
    assert actual.dtype == dtype
    expected = by_loops(query, key, value, allowed=allowed_pairs("none"), scale=1.0)
    # Probabilities and outputs are each rounded once to the inputs' dtype.
    atol = 2 * float(jnp.finfo(dtype).eps) * np.abs(value.astype(np.float32)).max()
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, atol=atol)
    programs = jax.make_jaxpr(lambda *x: dot_product_attention(*x, AttentionOptions(scale=1.0)))(
        query, key, value
    )
    exps = [eqn for eqn in walk(programs.jaxpr) if eqn.primitive.name == "exp"]
    assert [eqn.outvars[0].aval.dtype for eqn in exps] == [jnp.float32]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_causal_mask_hides_huge_later_keys(dtype):
    query, key, value = draw(3, dtype=dtype)
    mask = AttentionMask.causal_mask(BATCH, LENGTH)
    before = dot_product_attention(query, key, value, AttentionOptions(mask=mask, scale=1.0))
    for token in range(1, LENGTH):
        after = dot_product_attention(
            query,
            key.at[:, token].set(1e3),
            value.at[:, token].set(6e4),
            AttentionOptions(mask=mask, scale=1.0),
        )
        np.testing.assert_array_equal(after[:, :token], before[:, :token])
        assert not np.array_equal(after[:, token], before[:, token])


def mask_with_an_empty_row():
    """Query 1 of every row belongs to a segment that no key has."""
    row = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, LENGTH))
    ones = jnp.ones_like(row)
    return AttentionMask(row, row, ones.at[:, 1].set(9), ones)


def test_fully_masked_rows_are_zero_or_a_mean():
    query, key, value = draw(4)
    mask = mask_with_an_empty_row()
    zeroed = dot_product_attention(
        query, key, value, AttentionOptions(mask=mask, scale=1.0, zero_fully_masked_rows=True)
    )
    plain = dot_product_attention(query, key, value, AttentionOptions(mask=mask, scale=1.0))
    np.testing.assert_array_equal(zeroed[:, 1], 0.0)
    np.testing.assert_allclose(plain[:, 1], value.mean(axis=1), atol=1e-6)
    others = np.array([0, 2, 3, 4])
    np.testing.assert_array_equal(zeroed[:, others], plain[:, others])


def test_fully_masked_rows_with_sinks_are_zero():
    mask, sinks = mask_with_an_empty_row(), jnp.full((HEADS,), -50.0)
    for zero in (False, True):
        read = dot_product_attention(
            *draw(4),
            AttentionOptions(mask=mask, scale=1.0, sinks=sinks, zero_fully_masked_rows=zero),
        )
        np.testing.assert_array_equal(read[:, 1], 0.0)
        assert np.abs(read[:, 0]).max() > 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_gradients_are_finite_with_fully_masked_rows(zero, cap, dtype):
    inputs = draw(5, dtype=dtype)

    def total(inputs):
        options = {"logit_cap": cap, "zero_fully_masked_rows": zero}
        out = dot_product_attention(
            *inputs, AttentionOptions(mask=mask_with_an_empty_row(), scale=30.0, **options)
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradients = jax.jit(jax.grad(total))(inputs)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    query_gradient = gradients[0]
    np.testing.assert_array_equal(query_gradient[:, 1], 0.0)
    assert np.abs(query_gradient[:, 2]).max() > 0


def test_dropout_applies_to_probabilities():
    query, key, value = draw(6)
    seen = []

    def drop_all_but_the_first_key(probabilities):
        seen.append(probabilities)
        return probabilities.at[..., 1:].set(0.0)

    out = dot_product_attention(
        query, key, value, AttentionOptions(scale=1.0, dropout=drop_all_but_the_first_key)
    )
    (probabilities,) = seen
    np.testing.assert_allclose(probabilities.sum(axis=-1), 1.0, rtol=1e-6)
    first = probabilities.reshape(BATCH, HEADS, LENGTH, LENGTH)[..., 0].swapaxes(1, 2)
    np.testing.assert_allclose(out, first[..., None] * value[:, :1], rtol=1e-6)


def walk(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from walk(inner)


def test_grouped_keys_are_not_repeated_in_memory():
    keys, heads = 64, 8
    inputs = draw(7, queries=1, keys=keys, heads=heads, kv_heads=1)
    program = jax.make_jaxpr(lambda *x: dot_product_attention(*x, AttentionOptions(scale=1.0)))(
        *inputs
    )
    sizes = [var.aval.size for eqn in walk(program.jaxpr) for var in eqn.outvars]
    assert max(sizes) < BATCH * keys * heads * HEAD_DIM


@pytest.mark.parametrize(("mask", "scope"), [("causal", "causal_attention"), ("none", "attention")])
def test_both_products_are_in_the_scope_of_the_flop_count(mask, scope):
    program = jax.make_jaxpr(
        lambda *x: dot_product_attention(*x, AttentionOptions(mask=MASKS[mask](), scale=1.0))
    )(*draw(8))
    contractions = [eqn for eqn in walk(program.jaxpr) if eqn.primitive.name == "dot_general"]
    stacks = [str(eqn.source_info.name_stack).split("/") for eqn in contractions]
    assert len(stacks) == 2
    assert all(scope in stack for stack in stacks)


def test_platform_is_that_of_a_surrounding_mesh(caplog):
    """A plan of data-parallel training traces the model in a `shard_map` over planned devices."""
    array = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.bfloat16)
    mask = AttentionMask.causal_mask(2, 64, segment_ids=jnp.ones((2, 64), jnp.int32))
    attend = lambda x: dot_product_attention(x, x, x, AttentionOptions(mask=mask))  # noqa: E731
    gpu = AbstractDevice("NVIDIA H100", num_cores=132, platform="gpu")
    with caplog.at_level("INFO", "layerkit"):
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
            jax.eval_shape(attend, array)
        jax.eval_shape(attend, array)
    assert ["pallas" in line for line in caplog.messages] == [True, False]


@pytest.mark.parametrize("other", range(3))
def test_kernels_require_one_dtype(raises, other):
    dtypes = [jnp.float32 if i == other else jnp.bfloat16 for i in range(3)]
    inputs = [jax.ShapeDtypeStruct((2, 64, 2, 16), dtype) for dtype in dtypes]
    options = AttentionOptions(backend="pallas", platform="gpu")
    with raises(UnsupportedBackendError, field="backend", value="pallas"):
        jax.eval_shape(lambda *x: dot_product_attention(*x, options), *inputs)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"query": (2, 5, 4, 2)}, "shape of key", [2, 5, 4, 3]),
        ({"key": (2, 5, 3, 3)}, "shape of key", [2, 5, 3, 3]),
        ({"value": (2, 2, 4, 3)}, "shape of value", [2, 2, 4, 3]),
        ({"mask": (2, 1)}, "shape of mask.query_positions", [2, 1]),
        ({"mask": (3, 5)}, "shape of mask.query_positions", [3, 5]),
        ({"bias": (2, 3, 5, 5)}, "shape of bias", [2, 3, 5, 5]),
        ({"sinks": (3,)}, "shape of sinks", [3]),
    ],
)
def test_shapes_that_do_not_fit_raise(raises, change, field, value):
    shape = (BATCH, LENGTH, 4, 3)
    inputs = [jnp.zeros(change.get(name, shape)) for name in ("query", "key", "value")]
    options = {name: jnp.zeros(change[name]) for name in ("bias", "sinks") if name in change}
    if "mask" in change:
        options["mask"] = AttentionMask.causal_mask(*change["mask"])
    with raises(ConfigError, field=field, value=value):
        dot_product_attention(*inputs, AttentionOptions(**options))
