"""Quantized products and adapters of dropless experts, compared with those of a full capacity."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.base_layer import OVERWRITE_WITH_GRADIENT, PARAMS
from layerkit.base.sharding import BoundSharding
from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit.layers.basic.dots import Dot
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.quantization.current_scaling import Fp8CurrentDot, Int8Dot
from layerkit.layers.quantization.fp8 import Fp8Dot, accumulate_by_max
from layerkit.layers.quantization.lora import LoraDot
from layerkit.layers.transformer.pipeline import Pipeline

BATCH, LENGTH, DIMS, EXPERTS = 8, 6, 8, 8
X = np.random.default_rng(1).normal(size=(BATCH, LENGTH, DIMS)).astype(np.float32)
SIZES = {"input_dims": DIMS, "hidden_dims": 12, "num_experts": EXPERTS}
LOSSES = {"load_balance_weight": 0.0, "router_z_weight": 0.0}
FP8 = Config(Fp8Dot, amax_history_length=2)
DOTS = {
    "plain": Config(Dot),
    "fp8": FP8,
    "fp8_current": Config(Fp8CurrentDot),
    "int8": Config(Int8Dot),
    "lora": Config(LoraDot, rank=4, alpha=1.0),
    "lora_fp8": Config(LoraDot, rank=4, alpha=1.0, dot_tpl=FP8),
}


class SquaredDot(Dot):
    """A product that knows no groups."""

    def fprop(self, x, w):
        return (x @ w) ** 2


def make(**fields):
    layer = MoeFeedForward(**SIZES, **LOSSES, train=True, **fields)
    return layer, *drawn(layer)


def drawn(layer):
    """Weights and the state of products."""
    random = np.random.default_rng(3)
    variables = jax.eval_shape(layer.init, jax.random.key(0))
    params = jax.tree.map(
        lambda w: random.normal(0.0, 0.5, w.shape).astype(w.dtype), variables[PARAMS]
    )
    # Scales that are not 1, as after some steps.
    state = jax.tree.map(
        lambda x: np.full(x.shape, 0.01, np.float32), variables.get(OVERWRITE_WITH_GRADIENT, {})
    )
    return params, state


def results(layer, params, state):
    """((output), gradients of weights, of the state and of the inputs)."""

    def loss(params, state, x):
        variables = {PARAMS: params, OVERWRITE_WITH_GRADIENT: accumulate_by_max(state)}
        output, _ = layer.apply(variables, x, mutable=["summaries"])
        return jnp.sum(jnp.sin(output)), output

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(params, state, X)


def assert_close(result, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=3e-5), result, expected)


# Scales of fp8 and adapters in the ordinary tests, and both together on a mesh.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("fp8", "lora") else pytest.mark.slow)
        for name in DOTS
    ],
)
def test_products_of_dropless_experts_equal_those_of_a_full_capacity(name):
    layer, params, state = make(dot_tpl=DOTS[name])
    result = results(layer, params, state)
    full = layer.clone(capacity_factor=float(EXPERTS))
    assert_close(result, results(full, params, state))
    if name.endswith("fp8"):
        changed = jax.tree.map(lambda a, b: np.any(a != b), result[0][1], state)
        assert all(jax.tree.leaves(changed))


@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        ("lora_fp8", "all_gather"),
        pytest.param("lora_fp8", "ragged_all_to_all", marks=pytest.mark.slow),
        pytest.param("fp8_current", "all_gather", marks=pytest.mark.slow),
        pytest.param("fp8_current", "ragged_all_to_all", marks=pytest.mark.slow),
    ],
)
def test_products_on_a_mesh_equal_one_device(name, exchange):
    layer, params, state = make(dot_tpl=DOTS[name])
    mesh = Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("fsdp", "expert", "tensor"))
    on_mesh = layer.clone(sharding=BoundSharding(mesh), expert_exchange=exchange)
    assert_close(results(on_mesh, params, state), results(layer, params, state))


@pytest.mark.slow
def test_pipelined_products_on_a_mesh_equal_one_device():
    stage = Config(MoeFeedForward, **SIZES, **LOSSES, dot_tpl=FP8)
    layer = Pipeline(stage_tpl=stage, num_stages=2, num_microbatches=2, train=True)
    mesh = Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "stage", "expert"))
    on_mesh = layer.clone(sharding=BoundSharding(mesh))
    weights = drawn(layer)
    assert_close(results(on_mesh, *weights), results(layer, *weights))


def test_product_without_groups_raises(raises):
    layer, params, _ = make(dot_tpl=Config(SquaredDot))
    with raises(ConfigError, field="dot_tpl", value="SquaredDot"):
        jax.eval_shape(layer.apply, {PARAMS: params}, X)
