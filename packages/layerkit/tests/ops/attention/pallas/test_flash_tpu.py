"""The TPU kernel in interpret mode on the CPU, compared with array code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.sharding import BoundSharding
from layerkit.ops.attention.dot_product import AttentionOptions, dot_product_attention
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.attention.pallas.flash_tpu import SplashAttention

BATCH, LENGTH, HEADS, KV_HEADS = 2, 256, 4, 2
DOCUMENT = np.array([[100, 190], [30, 256]])


def segments():
    position = np.arange(LENGTH)
    ids = 1 + (position[None, :, None] >= DOCUMENT[:, None, :]).sum(axis=-1)
    return jnp.asarray(np.where(ids > 2, 0, ids), jnp.int32)


def draw():
    streams = jax.random.split(jax.random.key(0), 3)
    shapes = (HEADS, 8), (KV_HEADS, 8), (KV_HEADS, 6)
    return tuple(
        jax.random.normal(stream, (BATCH, LENGTH, *shape))
        for stream, shape in zip(streams, shapes, strict=True)
    )


def values_and_gradients(sinks, **options):
    def total(inputs, sinks):
        read = dot_product_attention(
            *inputs,
            AttentionOptions(sinks=sinks, scale=0.4, platform="tpu", interpret=True, **options),
        )
        weights = jnp.cos(jnp.arange(read.size, dtype=jnp.float32)).reshape(read.shape)
        return jnp.sum(read * weights), read

    program = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    gradients, read = program(draw(), sinks)
    return read, gradients


def check_equal(ours, expected):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6 * max(1.0, np.abs(b).max()))


def test_largest_blocks_determine_the_blocks_of_the_kernel():
    array = jax.ShapeDtypeStruct((BATCH, 1024, HEADS, 8), jnp.float32)
    for largest, blocks in ((None, (512, 512)), ((256, 2048), (256, 1024))):
        kernel = SplashAttention(1.0, blocks=largest).kernel(array, array, None)
        sizes = kernel.kwargs["block_sizes"]
        assert (sizes.block_q, sizes.block_kv_dkv) == blocks


MESH = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "tensor", "context"))


# Without a backend, auto selects the kernel.
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param({}, id="auto", marks=pytest.mark.slow),
        pytest.param({"sharding": BoundSharding(MESH), "backend": "pallas"}, id="mesh"),
    ],
)
def test_all_options_together_equal_xla_on_one_device_and_on_a_mesh(chosen):
    mask = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=segments()).within(150)
    options = {"mask": mask, "logit_cap": 1.5}
    sinks = jnp.array([1.0, -1.0, 0.0, 2.0])
    ours = values_and_gradients(sinks, **chosen, **options)
    check_equal(ours, values_and_gradients(sinks, backend="xla", **options))
