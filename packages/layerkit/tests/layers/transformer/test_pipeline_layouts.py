"""Tests of pipeline gradients for layers without sharding constraints on their outputs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.sharding import DEFAULT_RULES, BoundSharding
from layerkit.base.weights import is_box, unbox
from layerkit.errors import ConfigError
from layerkit.layers.basic.linears import Linear
from layerkit.layers.transformer.pipeline import Pipeline

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(16, 4, 16)).astype(np.float32)


def gradients(layer, variables, x):
    return jax.grad(lambda v: jnp.mean(jnp.square(layer.apply(v, x) - 2 * x)))(variables)


FEATURES_SPLIT = DEFAULT_RULES.replace(act_embed="tensor")


def sharded(first_axis, rules):
    """A pipeline on eight devices, and the same layer without them."""
    linear = Linear.HParams.config(input_dims=16, output_dims=16)
    layer = Pipeline(stage_tpl=linear, num_stages=2, num_microbatches=2)
    mesh = Mesh(np.reshape(jax.devices(), (2, 2, 2)), (first_axis, "fsdp", "tensor"))
    return layer.clone(sharding=BoundSharding(mesh, rules)), layer


@pytest.mark.parametrize(
    ("first_axis", "rules"),
    [
        ("data", DEFAULT_RULES),
        ("stage", DEFAULT_RULES),
        pytest.param("stage", FEATURES_SPLIT, marks=pytest.mark.slow),
    ],
)
def test_gradients_on_a_mesh_equal_one_device(first_axis, rules):
    split, layer = sharded(first_axis, rules)
    boxed = layer.init_boxed(KEY)
    variables, bound = unbox(boxed), split.sharding
    layouts = jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    rows = bound.sharding(("batch", None, None), shape=X.shape)
    result = jax.jit(
        functools.partial(gradients, split), in_shardings=(layouts, rows), out_shardings=layouts
    )(variables, X)
    expected = jax.jit(functools.partial(gradients, layer))(variables, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), result, expected)


def test_init_raises_for_split_features_without_split_stages(raises):
    """The gradients of the first of the meshes above would be wrong."""
    split, _ = sharded("data", FEATURES_SPLIT)
    with raises(ConfigError, field="mesh axes of act_embed", value=("tensor",)):
        split.init(KEY)
