"""Sequence parallelism: the numbers of one device, and residuals of a part of the positions."""

from __future__ import annotations

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.sharding import DEFAULT_RULES, BoundSharding
from layerkit.base.weights import is_box
from layerkit.errors import ConfigError
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.layers.transformer.transformer import (
    NormPolicy,
    Transformer,
    gather_positions,
    split_positions,
)
from layerkit.ops.attention.masks import AttentionMask, row_positions

KEY = jax.random.key(0)
LAYERS, BATCH, LENGTH, DIMS = 3, 4, 8, 24
SIZES = {"input_dims": DIMS, "hidden_dims": 12, "num_heads": 4, "num_layers": LAYERS}
X = np.asarray(jax.random.normal(KEY, (BATCH, LENGTH, DIMS)))
RULES = DEFAULT_RULES.replace(residual_length=("context", "tensor"))


def bound(rules=RULES, **sizes):
    sizes = sizes or {"data": 2, "tensor": 4}
    devices = np.reshape(jax.devices()[: math.prod(sizes.values())], tuple(sizes.values()))
    return BoundSharding(Mesh(devices, tuple(sizes)), rules)


def biased(**fields):
    layer = Transformer.HParams.config(**fields)
    layer.attention_tpl.use_bias = layer.feed_forward_tpl.has_bias = True
    return layer


def value_and_gradients(stack, extra):
    def loss(variables, x):
        mask = AttentionMask.causal_mask(*x.shape[:2])
        positions = row_positions(*x.shape[:2])
        output = stack.apply(
            variables, x, mask=mask, positions=positions, rngs={"random": KEY}, **extra
        )
        return jnp.sum(jnp.sin(output)), output

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def compiled_on(sharding, stack, extra, variables):
    boxed = jax.eval_shape(stack.init_boxed, KEY)
    places = jax.tree.map(
        lambda box: sharding.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    rows = sharding.sharding(("batch", "residual_length", None), shape=X.shape)
    run = jax.jit(
        value_and_gradients(stack.clone(sharding=sharding), extra),
        in_shardings=(places, rows),
        out_shardings=((None, rows), (places, rows)),
    )
    return run.lower(variables, X).compile(), places, rows


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        pytest.param(biased(norm_policy="pre", dropout_rate=0.2), {"data": 2, "tensor": 4}),
        *(
            pytest.param(biased(norm_policy=policy), sizes, marks=pytest.mark.slow)
            for policy in get_args(NormPolicy)
            for sizes in ({"tensor": 2, "context": 2}, {"fsdp": 2, "tensor": 2})
        ),
        pytest.param(
            biased(parallel=True, parallel_shares_norm=True), {"tensor": 4}, marks=pytest.mark.slow
        ),
    ],
)
def test_values_and_gradients_equal_one_device(layer, sizes):
    stack = StackedTransformerRepeated.HParams.config(
        **SIZES, layer_tpl=layer, remat="full", train=True
    ).Instantiate()
    check_equal(stack, {}, bound(**sizes))


@pytest.mark.slow
def test_values_and_gradients_with_cross_attention_equal_one_device():
    layer = biased(cross_attention_tpl=CrossAttention.HParams.config())
    stack = StackedTransformer.HParams.config(**SIZES, layer_tpl=layer).Instantiate()
    mask = AttentionMask(row_positions(BATCH, LENGTH), row_positions(BATCH, 3))
    memory = jax.random.normal(jax.random.key(1), (BATCH, 3, DIMS))
    check_equal(stack, {"memory": memory, "memory_mask": mask}, bound())


def check_equal(stack, extra, sharding):
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(stack.init, KEY)
    variables = jax.tree.map(lambda x: random.normal(0.0, 0.3, x.shape).astype(np.float32), shapes)
    expected = jax.jit(value_and_gradients(stack, extra))(variables, X)
    program, places, rows = compiled_on(sharding, stack, extra, variables)
    result = program(jax.device_put(variables, places), jax.device_put(X, rows))

    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=0.0, atol=2e-5 * max(1.0, np.abs(b).max()))

    jax.tree.map(check, result, expected)


@pytest.mark.parametrize("is_parallel", [False, True])
def test_saved_inputs_of_layers_have_a_part_of_the_positions(is_parallel):
    stack = StackedTransformerRepeated.HParams.config(**SIZES, remat="full").Instantiate()
    sharding = bound(RULES if is_parallel else DEFAULT_RULES)
    program = compiled_on(sharding, stack, {}, jax.eval_shape(stack.init, KEY))[0].as_text()
    saved = f"f32[{LAYERS},{BATCH // 2},{{}},{DIMS}]"
    assert (saved.format(LENGTH // 4) in program) == is_parallel
    assert (saved.format(LENGTH) in program) != is_parallel


def test_positions_that_cannot_be_split_evenly_raise(raises):
    layer = Transformer(input_dims=DIMS, hidden_dims=12, num_heads=4, sharding=bound())
    mask, positions = AttentionMask.causal_mask(BATCH, 6), row_positions(BATCH, 6)
    with raises(ConfigError, field="dimension 'residual_length'", value=6):
        jax.eval_shape(lambda x: layer.init(KEY, x, mask=mask, positions=positions), X[:, :6])


def test_layout_changes_only_if_residuals_are_split_further():
    for sharding in (None, bound(DEFAULT_RULES), bound(context=4)):
        layer = Transformer(input_dims=DIMS, hidden_dims=12, num_heads=4, sharding=sharding)
        x = jnp.asarray(X)
        assert layer.apply({}, x, method=gather_positions) is x
        assert layer.apply({}, x, method=split_positions) is x
