"""Kernels are lowered, and where the compilers are installed compiled, for hardware not here.

What is lowered or compiled is a step forward and backward, on a mesh of two by two devices. The
compilers come with `pip install libtpu` and `pip install jax-cuda12-plugin jax-cuda12-pjrt`. With
the extra `layerkit[kernels]` GPUs run Tokamax where they run own kernels in Triton without it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, use_abstract_mesh

from layerkit.base.sharding import BoundSharding
from layerkit.ops.attention import cudnn
from layerkit.ops.attention.distance_bias import DistanceBias
from layerkit.ops.attention.dot_product import AttentionOptions, dot_product_attention
from layerkit.ops.attention.masks import AttentionMask

BATCH, LENGTH = 4, 256


def packed(segments):
    return AttentionMask.causal_mask(*segments.shape, segment_ids=segments)


CALLS = {
    "causal": lambda segments: {"mask": AttentionMask.causal_mask(*segments.shape)},
    "window": lambda segments: {"mask": AttentionMask.causal_mask(*segments.shape).within(100)},
    "packed": lambda segments: {"mask": packed(segments)},
    "everything": lambda segments: {
        "mask": packed(segments).within(100),
        "logit_cap": 30.0,
        "sinks": jnp.zeros(4),
    },
}
DEVICES = {
    "cuda": AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "tpu": AbstractDevice("TPU v5", num_cores=1, platform="tpu"),
}
TRITON = "__gpu$xla.gpu.triton"
CUDNN = "__cudnn$fmhaSoftmax"
# Targets of the kernels that `auto` selects where cuDNN does not support the call.
HAS_TOKAMAX = importlib.util.find_spec("tokamax") is not None
NO_CUDNN = "mosaic_gpu" if HAS_TOKAMAX else TRITON
FUSED = {"cuda": NO_CUDNN, "b200": NO_CUDNN, "tpu": "tpu_custom_call"}
KERNELS = [
    ("cudnn", "cuda", "causal", CUDNN),
    ("cudnn", "cuda", "window", CUDNN),
    ("pallas", "cuda", "everything", TRITON),
    ("pallas", "tpu", "everything", FUSED["tpu"]),
]


def gradients(call, **options):
    def total(query, key, value, segments):
        read = dot_product_attention(
            query, key, value, AttentionOptions(scale=0.1, **CALLS[call](segments), **options)
        )
        return jnp.sum(read.astype(jnp.float32))

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))


def abstract(sharding=None, head_dim=64, value_dim=None, length=LENGTH):
    def array(shape, axes, dtype=jnp.bfloat16):
        layout = None if sharding is None else sharding.sharding(axes, shape=shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)

    query = array((BATCH, length, 4, head_dim), ("batch", "length", "act_heads", None))
    key, value = (
        array((BATCH, length, 2, dim), ("batch", "length", "act_kv_heads", None))
        for dim in (head_dim, value_dim or head_dim)
    )
    return query, key, value, array((BATCH, length), ("batch", "length"), jnp.int32)


@pytest.fixture
def planned_devices(absent_devices):
    """Return a function from a platform to the sharding of a mesh of two by two absent devices."""

    def bind(platform):
        devices = absent_devices(platform)
        if platform != "tpu":
            stack.enter_context(jax.default_device(devices[0]))  # Tokamax asks for its kind.
        return BoundSharding(Mesh(np.array(devices).reshape(2, 2), ("data", "tensor")))

    with contextlib.ExitStack() as stack:
        yield bind


@pytest.fixture
def as_if_cudnn_were_here(monkeypatch):
    """Lets JAX lower for a cuDNN of version 9.10 that this machine lacks."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "find_missing_cudnn", lambda: "")


@pytest.mark.parametrize(("backend", "platform", "call", "target"), KERNELS)
@pytest.mark.usefixtures("as_if_cudnn_were_here")
def test_kernels_are_lowered_for_their_platform(backend, platform, call, target):
    program = gradients(call, backend=backend, platform=platform)
    # JAX 0.12 lowers kernels of Triton only for a GPU that it knows.
    mesh = AbstractMesh((), (), abstract_device=DEVICES[platform])
    with use_abstract_mesh(mesh):
        text = program.trace(*abstract()).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(target) >= 2  # forward and backward
    if (backend, call) == ("cudnn", "window"):
        assert re.search(r"sliding_window_length.{1,8} 100\D", text)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "platform", "call", "target"), KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.usefixtures("as_if_cudnn_were_here")
def test_kernels_compile_for_their_hardware(
    planned_devices, backend, platform, call, target, head_dim
):
    sharding = planned_devices(platform)
    program = gradients(call, backend=backend, sharding=sharding)
    text = program.lower(*abstract(sharding, head_dim)).compile().as_text()
    assert target in text
    assert "all-gather" not in text  # each device keeps its own rows and heads


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "b200", "tpu"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("as_if_cudnn_were_here")
def test_auto_compiles_a_fused_kernel_in_each_training_case(planned_devices, platform, call):
    sharding = planned_devices(platform)
    program = gradients(call, sharding=sharding)
    text = program.lower(*abstract(sharding)).compile().as_text()
    is_cudnn = platform != "tpu" and call in ("causal", "window")
    assert (CUDNN if is_cudnn else FUSED[platform]) in text
    assert "all-gather" not in text
    assert f"{LENGTH},{LENGTH}]" not in text  # no logits


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TOKAMAX, reason="needs layerkit[kernels]")
@pytest.mark.parametrize("platform", ["cuda", "b200"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tokamax_compiles_masks_both_ways_and_biases(planned_devices, platform, has_bias):
    sharding = planned_devices(platform)

    def total(query, key, value, segments):
        bias = DistanceBias(jnp.zeros((1, 4, 2 * LENGTH - 1))) if has_bias else None
        mask = AttentionMask.bidirectional_mask(BATCH, LENGTH, segment_ids=segments)
        options = AttentionOptions(mask=mask, bias=bias, sharding=sharding, backend="tokamax")
        return jnp.sum(dot_product_attention(query, key, value, options).astype(jnp.float32))

    program = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    assert NO_CUDNN in program.lower(*abstract(sharding)).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "b200", "tpu"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(256, 256), (192, 128)])
@pytest.mark.usefixtures("as_if_cudnn_were_here")
def test_auto_compiles_a_fused_kernel_for_large_and_unequal_heads(
    planned_devices, platform, head_dim, value_dim
):
    """Heads of 192 and 128 are those of latent attention in DeepSeek-V3."""
    sharding = planned_devices(platform)
    program = gradients("everything", sharding=sharding)
    text = program.lower(*abstract(sharding, head_dim, value_dim)).compile().as_text()
    # The kernels of Tokamax for Blackwell hold no heads of 256.
    assert (TRITON if (platform, head_dim) == ("b200", 256) else FUSED[platform]) in text
    assert "all-gather" not in text


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(
    ("way", "collective"), [("ring", "collective-permute"), ("ulysses", "all-to-all")]
)
@pytest.mark.usefixtures("as_if_cudnn_were_here")
def test_split_packed_rows_compile_a_fused_kernel(planned_devices, platform, way, collective):
    devices = planned_devices(platform).mesh.devices
    sharding = BoundSharding(Mesh(devices, ("data", "context")))
    program = gradients("packed", sharding=sharding, context_parallel=way)
    text = program.lower(*abstract(sharding, length=1024)).compile().as_text()
    # A ring needs a kernel that returns the sums of a part.
    assert (TRITON if (platform, way) == ("cuda", "ring") else FUSED[platform]) in text
    assert collective in text
    gathered = re.findall(r"= (\w+)\S* all-gather(?:-start)?\(", text)
    assert set(gathered) <= {"s32"}  # the segments, for whole rows


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.usefixtures("as_if_cudnn_were_here")
def test_auto_compiles_a_fused_kernel_for_a_learned_bias(planned_devices, platform):
    """No array holds a number for each pair of query and key."""
    sharding = planned_devices(platform)
    length, heads = 2048, 4
    query = jax.ShapeDtypeStruct(
        (BATCH, length, heads, 64),
        jnp.bfloat16,
        sharding=sharding.sharding(("batch", "length", "act_heads", None)),
    )
    bias = jax.ShapeDtypeStruct(
        (1, heads, 2 * length - 1),
        jnp.float32,
        sharding=sharding.sharding((None, "act_heads", None)),
    )

    def total(query, key, value, by_distance, backend):
        read = dot_product_attention(
            query,
            key,
            value,
            AttentionOptions(
                mask=AttentionMask.causal_mask(BATCH, length),
                bias=DistanceBias(by_distance),
                scale=0.1,
                sharding=sharding,
                backend=backend,
            ),
        )
        return jnp.sum(read.astype(jnp.float32))

    def compiled(backend):
        gradients = jax.grad(functools.partial(total, backend=backend), argnums=(0, 1, 2, 3))
        return jax.jit(gradients).lower(query, query, query, bias).compile()

    programs = {backend: compiled(backend) for backend in ("auto", "xla")}
    pairs = f"{length},{length}]"
    fused = programs["auto"].as_text()
    assert {"cuda": TRITON}.get(platform, FUSED[platform]) in fused
    assert pairs not in fused and pairs in programs["xla"].as_text()
    temporary = {
        backend: program.memory_analysis().temp_size_in_bytes / 2**20
        for backend, program in programs.items()
    }
    print(platform, *(f"{backend}: {size:.1f} MiB" for backend, size in temporary.items()))
    assert temporary["auto"] < temporary["xla"] / 8
