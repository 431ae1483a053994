"""Experts, compiled for hardware that is absent, where its compilers are installed."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.base_layer import AUX_LOSS, SUMMARIES
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import is_box
from layerkit.config import Config
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.quantization.current_scaling import Fp8CurrentDot
from layerkit.layers.quantization.lora import LoraDot
from layerkit.layers.transformer.pipeline import Pipeline

pytestmark = pytest.mark.slow

KERNEL = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
DEVICES, BATCH, LENGTH, DIMS, CHOICES = 8, 16, 128, 256, 2
EXPERTS = {
    "input_dims": DIMS,
    "hidden_dims": 512,
    "num_experts": 16,
    "num_experts_per_token": CHOICES,
    "fprop_dtype": jnp.bfloat16,
}


def compiled(layer, devices, axes):
    """Return the program of a forward and a backward pass on a mesh of absent devices."""
    grid = np.array(devices).reshape(tuple(axes.values()))
    sharding = BoundSharding(Mesh(grid, tuple(axes)))
    layer = layer.clone(sharding=sharding)
    boxed = jax.eval_shape(layer.init_boxed, jax.random.key(0))

    def placed(axes, leaf):
        layout = sharding.sharding(axes, shape=leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)

    variables = jax.tree.map(lambda box: placed(box.axes, box.value), boxed, is_leaf=is_box)
    x = placed(("batch", "length", None), jax.ShapeDtypeStruct((BATCH, LENGTH, DIMS), jnp.bfloat16))

    def loss(variables, x):
        output, _ = layer.apply(variables, x, mutable=[AUX_LOSS, SUMMARIES])
        return jnp.sum(jnp.square(output.astype(jnp.float32)))

    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(variables, x).compile()


def rows_of(program, opcode):
    """Return the shapes `[rows, dims]` of the results of collectives; TPUs split dims in two."""
    result = re.findall(rf"= .*?\w+\[(\d+),([\d,]+)\]\S*\)? {opcode}(?:-start)?\(", program)
    return [(int(rows), np.prod([int(d) for d in dims.split(",")])) for rows, dims in result]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_exchange_sends_rows_of_choices_and_counts_only(absent_devices, platform):
    layer = MoeFeedForward(**EXPERTS, train=True, exchange_buffer_factor=1.0)
    program = compiled(layer, absent_devices(platform, DEVICES), {"expert": DEVICES}).as_text()
    # To the experts and back, and so the gradients. A device has 256 tokens with 2 choices; the
    # GPU's blocks of rows need room for the ends of two groups.
    tokens = BATCH * LENGTH // DEVICES
    result = rows_of(program, "ragged-all-to-all")
    assert len(result) == 4
    assert all(dims == DIMS and tokens * CHOICES <= rows <= 640 for rows, dims in result), result
    assert KERNEL[platform] in program
    # Tokens are not gathered, and sums not scattered: only counts, and gradients of the router.
    assert "reduce-scatter" not in program and "all-reduce-scatter" not in program
    gathered = re.findall(r"= \(?(\w+)\[[\d,]*\]\S* all-gather(?:-start)?\(", program)
    assert set(gathered) <= {"s32"}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_adapters_of_rounded_products_compile(absent_devices, platform):
    dot = Config(LoraDot, dot_tpl=Config(Fp8CurrentDot))
    # Neither the rank nor the shards of hidden_dims are multiples of a tile.
    fields = {**EXPERTS, "hidden_dims": 360}
    layer = MoeFeedForward(**fields, train=True, dot_tpl=dot, use_bias=True)
    axes = {"expert": 4, "tensor": 2}
    program = compiled(layer, absent_devices(platform, DEVICES), axes).as_text()
    assert "ragged-all-to-all" in program and KERNEL[platform] in program


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_pipelined_experts_compile(absent_devices, platform):
    stage = MoeFeedForward.HParams.config(**EXPERTS)
    layer = Pipeline(
        stage_tpl=stage, num_stages=2, num_microbatches=2, train=True, fprop_dtype=jnp.bfloat16
    )
    axes = {"stage": 2, "expert": 4}
    program = compiled(layer, absent_devices(platform, DEVICES), axes).as_text()
    assert "ragged-all-to-all" in program and KERNEL[platform] in program
