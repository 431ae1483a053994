"""Kernels with a bias by distance in interpret mode, compared with array code for drawn options."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.sharding import BoundSharding
from layerkit.ops.attention.distance_bias import DistanceBias
from layerkit.ops.attention.dot_product import AttentionOptions, dot_product_attention
from layerkit.ops.attention.masks import AttentionMask

BATCH = 2
# Smallest block of a kernel, and lengths and blocks that a draw selects from in this unit.
UNITS = {"gpu": 16, "tpu": 128}


def draw_call(platform, seed):
    """Return (inputs with a gradient, options) of a call whose options are random."""
    random = np.random.default_rng(seed)
    unit, few = UNITS[platform], seed == 0
    length = unit * (2 if few else int(random.integers(1, 4)))
    kv_heads, group = int(random.integers(1, 3)), int(random.integers(1, 3))
    head_dim, value_dim = (int(n) for n in random.choice([8, 20, 32], size=2))
    dtype = jnp.bfloat16 if random.random() < 0.3 and not few else jnp.float32
    segments = None
    if few or random.random() < 0.5:
        # Padding ends the first row.
        ends = np.sort(random.integers(1, length, size=(BATCH, 2)), axis=1)
        ids = 1 + (np.arange(length)[None, :, None] >= ends[:, None]).sum(axis=2)
        ids[0][ids[0] == 3] = 0
        segments = jnp.asarray(ids, jnp.int32)
    kind = AttentionMask.causal_mask if random.random() < 0.6 else AttentionMask.bidirectional_mask
    mask = kind(BATCH, length, segment_ids=segments)
    if random.random() < 0.4:
        mask = mask.within(int(random.integers(1, length)))

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape).astype(dtype))

    heads = kv_heads * group
    inputs = {
        "query": normal(BATCH, length, heads, head_dim),
        "key": normal(BATCH, length, kv_heads, head_dim),
        "value": normal(BATCH, length, kv_heads, value_dim),
        "bias": DistanceBias(normal(1, heads, 2 * length - 1).astype(jnp.float32)),
    }
    if random.random() < 0.5:
        inputs["sinks"] = normal(heads).astype(jnp.float32)
    options = {"mask": mask, "scale": 1 / math.sqrt(head_dim)}
    if random.random() < 0.5:
        options["logit_cap"] = 1.5
    blocks = tuple(int(n) for n in unit * random.choice([1, 2], size=2))
    return inputs, options, blocks, dtype


def attend(inputs, **options):
    """Return attention of a map of query, key, value and arrays that are options."""
    arrays = dict(inputs)
    query, key, value = (arrays.pop(name) for name in ("query", "key", "value"))
    return dot_product_attention(query, key, value, AttentionOptions(**arrays, **options))


def values_and_gradients(inputs, **options):
    def total(inputs):
        read = attend(inputs, **options)
        weights = jnp.cos(jnp.arange(read.size, dtype=jnp.float32)).reshape(read.shape)
        return jnp.sum(read.astype(jnp.float32) * weights), read

    return jax.jit(jax.grad(total, has_aux=True))(inputs)


@pytest.mark.parametrize(
    ("platform", "seed"),
    [
        ("gpu", 0),
        *(pytest.param("gpu", seed, marks=pytest.mark.slow) for seed in range(1, 9)),
        *(pytest.param("tpu", seed, marks=pytest.mark.slow) for seed in range(7)),
    ],
)
def test_values_and_gradients_equal_xla(platform, seed):
    inputs, options, blocks, dtype = draw_call(platform, seed)
    kernel = {"backend": "pallas", "platform": platform, "interpret": True}
    ours = values_and_gradients(inputs, **options, **kernel, kernel_blocks=blocks)
    expected = values_and_gradients(inputs, **options, backend="xla")
    eps = float(jnp.finfo(dtype).eps)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=32 * eps * max(1.0, np.abs(b).max()))


def test_kernel_for_tpus_equals_xla_without_gradients():
    inputs, options, blocks, _ = draw_call("tpu", 0)
    kernel = {"backend": "pallas", "platform": "tpu", "interpret": True, "kernel_blocks": blocks}
    ours = jax.jit(lambda inputs: attend(inputs, **options, **kernel))(inputs)
    expected = jax.jit(lambda inputs: attend(inputs, **options, backend="xla"))(inputs)
    np.testing.assert_allclose(ours, expected, atol=5e-6)


@pytest.mark.parametrize("platform", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_query_that_sees_no_key_gets_and_gives_zeros(platform):
    length, heads = UNITS[platform], 1
    random = np.random.default_rng(0)
    inputs = {
        name: jnp.asarray(random.normal(size=(1, length, heads, 8)), jnp.float32)
        for name in ("query", "key", "value")
    }
    inputs["bias"] = DistanceBias(jnp.zeros((1, heads, 2 * length - 1)), is_learned=False)
    segments = jnp.ones((1, length), jnp.int32)
    mask = AttentionMask.bidirectional_mask(1, length, segment_ids=segments)
    mask = dataclasses.replace(mask, query_segments=segments.at[0, 3].set(2))
    kernel = {"backend": "pallas", "platform": platform, "interpret": True}
    gradients, read = values_and_gradients(inputs, mask=mask, scale=0.4, **kernel)
    np.testing.assert_array_equal(read[0, 3], 0.0)
    expected, _ = values_and_gradients(
        inputs, mask=mask, scale=0.4, backend="xla", zero_fully_masked_rows=True
    )
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(gradients[name], expected[name], atol=2e-5)


def test_fixed_bias_has_no_kernel_of_its_gradient():
    inputs, options, _, _ = draw_call("gpu", 0)

    kernel = {"backend": "pallas", "platform": "gpu", "interpret": True}

    def kernels(*, is_learned):
        def total(by_distance):
            bias = DistanceBias(by_distance, is_learned=is_learned)
            given = {**inputs, "bias": bias}
            return jnp.sum(attend(given, **options, **kernel))

        return str(jax.make_jaxpr(jax.grad(total))(inputs["bias"].by_distance))

    name = "bias_gradient_kernel"
    assert name in kernels(is_learned=True) and name not in kernels(is_learned=False)


@pytest.mark.parametrize("platform", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_devices_of_a_mesh_have_the_bias_of_their_heads(platform):
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "tensor"))
    random = np.random.default_rng(0)
    length, heads = UNITS[platform], 4
    shapes = dict.fromkeys(("query", "key", "value"), (BATCH, length, heads, 8))
    inputs = {name: jnp.asarray(random.normal(size=s), jnp.float32) for name, s in shapes.items()}
    by_distance = jnp.asarray(random.normal(size=(1, heads, 2 * length - 1)), jnp.float32)
    inputs["bias"] = DistanceBias(by_distance)
    options = {"mask": AttentionMask.causal_mask(BATCH, length), "scale": 0.4}
    kernel = {"backend": "pallas", "platform": platform, "interpret": True}
    ours = values_and_gradients(inputs, **options, **kernel, sharding=BoundSharding(mesh))
    expected = values_and_gradients(inputs, **options, backend="xla")
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
