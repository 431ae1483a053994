"""Attention over split rows, compared with whole rows in values and gradients."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend import core
from jax.sharding import Mesh

from layerkit.base.sharding import DEFAULT_RULES, BoundSharding
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.models.language_model import LanguageModel
from layerkit.ops.attention.dot_product import AttentionOptions, dot_product_attention
from layerkit.ops.attention.masks import AttentionMask, first_tokens
from layerkit.ops.implementations import UnsupportedBackendError

BATCH, LENGTH, HEADS, KV_HEADS = 2, 16, 4, 2
SEGMENTS = jnp.asarray(np.repeat([[1, 1, 2, 0], [1, 2, 2, 3]], 4, axis=1), jnp.int32)
GPU_KERNEL = {"backend": "pallas", "platform": "gpu", "interpret": True}
SINKS = jnp.array([1.0, -1.0, 0.0, 2.0])

MASKS = {
    "none": lambda: None,
    "causal": lambda: AttentionMask.causal_mask(BATCH, LENGTH),
    "packed": lambda: AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS),
    "packed_window": lambda: MASKS["packed"]().within(7),
    "packed_chunks": lambda: MASKS["packed"]().split_chunks(3),
    "chunks": lambda: MASKS["causal"]().split_chunks(5),
    "causal_window": lambda: AttentionMask.causal_mask(BATCH, LENGTH).within(3),
    "window_both_ways": lambda: AttentionMask.bidirectional_mask(BATCH, LENGTH).within(3),
    "prefix": lambda: AttentionMask.causal_mask(
        BATCH, LENGTH, in_prefix=first_tokens(jnp.array([9, 2]), LENGTH)
    ).within(6),
}


def bound(**sizes):
    devices = np.reshape(jax.devices()[: math.prod(sizes.values())], tuple(sizes.values()))
    return BoundSharding(Mesh(devices, tuple(sizes)))


def draw(
    *, dtype=jnp.float32, queries=LENGTH, keys=LENGTH, heads=HEADS, kv_heads=KV_HEADS, value_dim=6
):
    streams = jax.random.split(jax.random.key(0), 3)
    shapes = (queries, heads, 8), (keys, kv_heads, 8), (keys, kv_heads, value_dim)
    return tuple(
        jax.random.normal(stream, (BATCH, *shape)).astype(dtype)
        for stream, shape in zip(streams, shapes, strict=True)
    )


def values_and_gradients(inputs, learned=None, **options):
    """Return the outputs, and the gradients of a weighted sum of them."""

    def total(inputs, learned):
        read = dot_product_attention(*inputs, AttentionOptions(scale=0.4, **learned, **options))
        read = read.astype(jnp.float32)
        weights = jnp.cos(jnp.arange(read.size, dtype=jnp.float32)).reshape(read.shape)
        return jnp.sum(read * weights), read

    program = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    gradients, read = program(inputs, learned or {})
    return read, gradients


def check_equal(ours, expected, atol=3e-6):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=atol)


def check_split(inputs, learned=None, *, way, sharding, atol=3e-6, **options):
    """Compare split rows with whole rows; return the results of split rows."""
    expected = values_and_gradients(inputs, learned, **options)
    split = {"sharding": sharding, "context_parallel": way}
    ours = values_and_gradients(inputs, learned, **split, **options)
    check_equal(ours, expected, atol)
    return ours


@pytest.mark.parametrize(
    ("way", "mask", "sizes"),
    [
        ("ring", "packed_window", {"data": 2, "tensor": 2, "context": 2}),
        pytest.param(
            "all_gather",
            "packed_window",
            {"data": 2, "tensor": 2, "context": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param("ring", "causal_window", {"context": 8}, marks=pytest.mark.slow),
        ("ulysses", "packed_window", {"data": 2, "tensor": 2, "context": 2}),
    ],
)
def test_split_rows_equal_whole_rows(way, mask, sizes):
    options = {"mask": MASKS[mask](), "logit_cap": 1.5}
    inputs = draw(kv_heads=HEADS if way == "ulysses" else KV_HEADS)
    check_split(inputs, {"sinks": SINKS}, way=way, sharding=bound(**sizes), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"context": 2}, {"context": 8}, {"fsdp": 2, "tensor": 2, "context": 2}]
)
@pytest.mark.parametrize("way", ["all_gather", "ring", "ulysses"])
@pytest.mark.parametrize("mask", list(MASKS))
def test_every_mask_on_every_mesh_equals_whole_rows(mask, way, sizes):
    inputs = draw(heads=8, kv_heads=8) if way == "ulysses" else draw()
    check_split(inputs, way=way, sharding=bound(**sizes), mask=MASKS[mask]())


@st.composite
def drawn_calls(draw_from):
    """Return (mask, inputs, learned arrays, options, sharding) of rows over 2, 4 or 8 devices."""
    count = draw_from(st.sampled_from([2, 4, 8]))
    length = count * draw_from(st.integers(1, 6))
    random = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    segments = None
    if draw_from(st.booleans()):
        breaks = random.random((BATCH, length)) < 0.2
        segments = jnp.asarray(1 + np.cumsum(breaks, axis=1), jnp.int32)
        segments = jnp.where(np.arange(length) < length - 1, segments, 0)
    is_causal = draw_from(st.booleans())
    make = AttentionMask.causal_mask if is_causal else AttentionMask.bidirectional_mask
    mask = make(BATCH, length, segment_ids=segments)
    mask = mask.within(draw_from(st.none() | st.integers(1, length)))
    sizes = {"queries": length, "keys": length, "kv_heads": draw_from(st.sampled_from([1, 2, 4]))}
    inputs = draw(dtype=draw_from(st.sampled_from([jnp.float32, jnp.bfloat16])), **sizes)
    learned = {"sinks": SINKS} if draw_from(st.booleans()) else {}
    options = {"logit_cap": draw_from(st.sampled_from([None, 1.5]))}
    return mask, inputs, learned, options, bound(context=count)


@pytest.mark.slow
@given(call=drawn_calls())
def test_ring_equals_whole_rows_for_every_call(call):
    mask, inputs, learned, options, sharding = call
    options |= {"mask": mask}
    ours = values_and_gradients(
        inputs, learned, sharding=sharding, context_parallel="ring", **options
    )
    exact = [x.astype(jnp.float32) for x in inputs]
    expected = values_and_gradients(exact, learned, **options)
    eps = float(jnp.finfo(inputs[0].dtype).eps)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        # The tolerance is a few roundings of the largest number.
        atol = 16 * eps * max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_length_may_be_split_over_several_mesh_axes(way):
    rules = DEFAULT_RULES.replace(
        **dict.fromkeys(("length", "residual_length"), ("context", "tensor")),
        act_heads=None,
        act_kv_heads=None,
    )
    sharding = BoundSharding(bound(tensor=2, context=2).mesh, rules)
    check_split(draw(kv_heads=HEADS), way=way, sharding=sharding, mask=MASKS["packed"]())


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("all_gather", marks=pytest.mark.slow),
        "ring",
        pytest.param("ulysses", marks=pytest.mark.slow),
    ],
)
def test_single_key_head_is_replicated_over_tensor(way):
    sharding = bound(tensor=2, context=2)
    check_split(draw(kv_heads=1), way=way, sharding=sharding, mask=MASKS["causal"]())


@pytest.mark.parametrize(
    ("way", "sizes", "kernel"),
    [
        ("all_gather", {"data": 2, "tensor": 4}, GPU_KERNEL),
        ("all_gather", {"tensor": 2}, GPU_KERNEL),
        ("all_gather", {"tensor": 4}, {}),
        ("ring", {"tensor": 4, "context": 2}, {}),
    ],
)
def test_devices_that_split_query_heads_alone_have_the_key_heads_of_these(way, sizes, kernel):
    rules = DEFAULT_RULES.replace(act_kv_heads=None)
    options = {"mask": MASKS["packed"](), "logit_cap": 1.5}
    expected = values_and_gradients(draw(), {"sinks": SINKS}, **options)
    options |= {"sharding": BoundSharding(bound(**sizes).mesh, rules), "context_parallel": way}
    ours = values_and_gradients(draw(), {"sinks": SINKS}, **options, **kernel)
    check_equal(ours, expected)


@pytest.mark.slow
def test_ring_supports_low_precision_and_other_lengths_of_keys():
    inputs = draw(dtype=jnp.bfloat16, keys=2 * LENGTH)
    ours = check_split(inputs, way="ring", sharding=bound(context=4), atol=0.04)
    assert ours[1][0][0].dtype == jnp.bfloat16


@pytest.mark.slow
def test_query_without_a_key_reads_0_in_a_ring():
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, LENGTH))
    ones = jnp.ones_like(positions)
    mask = AttentionMask(positions, positions, ones.at[:, 3].set(9), ones)
    options = {"mask": mask, "zero_fully_masked_rows": True}
    ours = check_split(draw(), way="ring", sharding=bound(context=4), **options)
    np.testing.assert_array_equal(ours[0][:, 3], 0.0)


@pytest.mark.parametrize("way", ["all_gather", "ulysses"])
def test_whole_rows_support_bias_and_dropout(way):
    def drop_odd_keys(probabilities):
        return probabilities * (jnp.arange(LENGTH) % 2 == 0)

    bias = jax.random.normal(jax.random.key(5), (1, HEADS, LENGTH, LENGTH))
    options = {"mask": MASKS["causal"](), "dropout": drop_odd_keys}
    sharding = bound(data=2, context=4)
    check_split(draw(kv_heads=HEADS), {"bias": bias}, way=way, sharding=sharding, **options)


def test_single_query_is_replicated_and_raises_in_a_ring(raises):
    query, key, value = draw()
    sharding, options = bound(context=4), {"scale": 0.4}
    expected = dot_product_attention(query[:, :1], key, value, AttentionOptions(**options))
    ours = jax.jit(
        lambda *x: dot_product_attention(
            *x, AttentionOptions(sharding=sharding, platform="gpu", **options)
        )
    )(query[:, :1], key, value)
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    with raises(UnsupportedBackendError, field="context_parallel", value="ring"):
        dot_product_attention(
            query[:, :1],
            key,
            value,
            AttentionOptions(sharding=sharding, context_parallel="ring", **options),
        )


@pytest.mark.parametrize(
    ("way", "collective"),
    [("all_gather", "all-gather"), ("ring", "collective-permute"), ("ulysses", "all-to-all")],
)
def test_each_way_uses_its_collective_and_no_other(way, collective):
    sharding = bound(tensor=2, context=2)
    text = compiled(
        draw(kv_heads=HEADS), mask=MASKS["causal"](), sharding=sharding, context_parallel=way
    )
    result = set(re.findall(r"(all-gather|collective-permute|all-to-all)(?:-start)?\(", text))
    assert result == {collective}


@pytest.mark.parametrize("way", ["all_gather", "ring", "ulysses"])
def test_no_device_holds_the_logits_of_all_queries(way):
    """With 4 devices and 4 heads, a device has 2048 queries, or one head."""
    length = 4 * 2048
    inputs = [x[:1] for x in draw(queries=length, keys=length, kv_heads=HEADS, value_dim=8)]
    mask = AttentionMask.causal_mask(1, length)
    text = compiled(inputs, mask=mask, sharding=bound(context=4), context_parallel=way)
    shapes = [
        tuple(map(int, dims.split(",")))
        for dims in re.findall(r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", text)
    ]
    if way == "ring":
        # A ring holds a block of at most 512 by 512 at a time, not the logits of two parts.
        assert max(map(math.prod, shapes)) <= max(HEADS * 512 * 512, math.prod(inputs[0].shape))
    else:
        assert max(map(math.prod, shapes)) == HEADS * length * length // 4


def compiled(inputs, **options):
    """Return the compiled program of values and gradients for split inputs."""
    axes = ("act_heads", "act_kv_heads", "act_kv_heads")
    inputs = [
        jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=options["sharding"].sharding(("batch", "length", name, None))
        )
        for x, name in zip(inputs, axes, strict=True)
    ]

    def total(inputs):
        return jnp.sum(
            jnp.square(dot_product_attention(*inputs, AttentionOptions(scale=1.0, **options)))
        )

    text: str = jax.jit(jax.value_and_grad(total)).lower(inputs).compile().as_text()
    return text


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        ("none", 1.0),
        # Each device multiplies 3 pairs of chunks of its own shard, and 2 for each of 7 others, of
        # the 4 · 8 pairs of its 2 chunks with all 16.
        ("packed", 17 / 32),
        # With shards of 2 tokens, a window of 3 reaches one shard back.
        ("causal_window", 2 / 8),
        ("packed_window", 4 / 8),
        ("window_both_ways", 1.0),
        ("prefix", 1.0),
    ],
)
def test_ring_computes_a_share_of_all_products(mask, share):
    """`shard_map` counts once: these are the FLOPs of each device, since all run one program."""

    def total(inputs):
        options = {"sharding": bound(context=8), "context_parallel": "ring"}
        return jnp.sum(
            dot_product_attention(
                *inputs, AttentionOptions(mask=MASKS[mask](), scale=1.0, **options)
            )
        )

    inputs = draw(value_dim=8)
    # The forward pass has 2 products of queries and keys, the backward pass 5.
    every = 7 * 2 * BATCH * HEADS * (LENGTH // 8) * LENGTH * 8
    assert product_flops(jax.make_jaxpr(jax.grad(total))(inputs).jaxpr) == share * every


def product_flops(jaxpr):
    """Return the FLOPs of the products of a program; a scan counts each of its steps."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            ((contracted, _), _) = eqn.params["dimension_numbers"]
            terms = [eqn.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * math.prod(terms) * math.prod(eqn.outvars[0].aval.shape)
        inner = sum(product_flops(each) for each in core.jaxprs_in_params(eqn.params))
        total += eqn.params.get("length", 1) * inner
    return total


def test_ring_runs_the_gpu_kernel():
    """A shard of 32 tokens is two chunks of 16, the smallest block of the kernel.

    test_backend_table.py compares the gradients.
    """
    segments = jnp.repeat(SEGMENTS, 4, axis=1)
    options = {"mask": AttentionMask.causal_mask(BATCH, 64, segment_ids=segments), "scale": 0.4}
    inputs = draw(queries=64, keys=64, kv_heads=1)
    ring = {"sharding": bound(context=2), "context_parallel": "ring"}
    ours = jax.jit(
        lambda *x: dot_product_attention(*x, AttentionOptions(**options, **ring, **GPU_KERNEL))
    )(*inputs)
    np.testing.assert_allclose(
        ours, dot_product_attention(*inputs, AttentionOptions(**options)), atol=3e-6
    )


@pytest.mark.slow
def test_gpu_kernel_of_split_rows_equals_that_of_whole_rows():
    segments = jnp.repeat(SEGMENTS, 3, axis=1)  # three blocks of 16, one for each shard
    options = {"mask": AttentionMask.causal_mask(BATCH, 48, segment_ids=segments)}
    options |= GPU_KERNEL
    inputs, sharding = draw(queries=48, keys=48), bound(data=2, context=3)
    check_split(inputs, {"sinks": SINKS}, way="all_gather", sharding=sharding, **options)


@pytest.mark.slow
def test_ring_runs_on_each_stage_of_a_pipeline():
    """Stages are a mapped axis on a separate mesh axis."""
    stages = [jnp.stack([x, 2 * x]) for x in draw()]
    sharding = bound(stage=2, context=2)

    def gradients(axis, **options):
        def total(inputs):
            attention = lambda *x: dot_product_attention(  # noqa: E731
                *x, AttentionOptions(mask=MASKS["causal"](), scale=0.4, **options)
            )
            return jnp.sum(jnp.sin(jax.vmap(attention, spmd_axis_name=axis)(*inputs)))

        return jax.jit(jax.grad(total))(stages)

    ours = gradients("stage", sharding=sharding, context_parallel="ring")
    check_equal(ours, gradients(None), atol=2e-5)


@pytest.mark.slow
def test_ring_without_a_split_length_equals_attention():
    check_split(draw(), way="ring", sharding=bound(data=2), mask=MASKS["causal"]())


@pytest.mark.parametrize(
    ("inputs", "count", "way", "kind", "data"),
    [
        ({}, 4, "ulysses", UnsupportedBackendError, {"value": "ulysses"}),  # two key heads
        ({}, 3, "all_gather", ConfigError, {"owner": "queries", "value": LENGTH}),
        ({}, 3, "ring", ConfigError, {"owner": "queries", "value": LENGTH}),
        ({"keys": 6}, 4, "ring", ConfigError, {"owner": "keys", "value": 6}),
    ],
)
def test_calls_that_cannot_be_split_raise(raises, inputs, count, way, kind, data):
    sharding = count and bound(context=count)
    with raises(kind, **data):
        dot_product_attention(
            *draw(**inputs), AttentionOptions(scale=1.0, sharding=sharding, context_parallel=way)
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["all_gather", "ring", "ulysses"])
def test_repeated_language_model_on_split_rows_equals_one_device(way):
    """Context parallelism needs one field and a mesh, and no change of other layers."""
    config = LanguageModel.HParams.config()
    config.lm_tpl.set(vocab_size=16, model_dims=8, hidden_dims=12, num_layers=2, num_heads=4)
    config.lm_tpl.stack_tpl = StackedTransformerRepeated.HParams.config(remat="full")
    attention = config.lm_tpl.stack_tpl.layer_tpl.attention_tpl
    attention.set(rotary_tpl=RotaryPositionalEmbedding.HParams.config(), context_parallel=way)
    model = config.Instantiate()
    random = np.random.default_rng(0)
    ids = random.integers(0, 16, (BATCH, LENGTH))
    batch = NestedMap(
        ids=ids,
        labels=np.roll(ids, -1, axis=1),
        weights=np.ones(ids.shape, np.float32),
        segment_ids=np.asarray(SEGMENTS),
        segment_pos=np.asarray(SEGMENTS * 0 + np.arange(LENGTH), np.int32),
    )
    weights = jax.tree.map(
        lambda x: random.normal(0.0, 0.5, x.shape).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0)),
    )

    def loss_and_gradients(model):
        def loss(weights):
            metrics, _ = model.apply(weights, batch)
            return metrics["loss"].value

        return jax.jit(jax.value_and_grad(loss))(weights)

    split = model.clone(sharding=bound(data=2, tensor=2, context=2))
    check_equal(loss_and_gradients(split), loss_and_gradients(model), atol=2e-5)
