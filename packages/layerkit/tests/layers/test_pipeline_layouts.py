"""Gradients of a pipeline whose layers say nothing about the layout of what they hand on."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers.linears import Linear
from layerkit.layers.pipeline import Pipeline
from layerkit.sharding import BoundSharding
from layerkit.weights import logical_axes, unbox

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(16, 4, 16)).astype(np.float32)


def gradients(layer, variables, x):
    return jax.grad(lambda v: jnp.mean(jnp.square(layer.apply(v, x) - 2 * x)))(variables)


@pytest.mark.parametrize("first_axis", ["data", "stage"])
def test_a_mesh_does_not_change_gradients(first_axis):
    linear = Linear.HParams.config(input_dims=16, output_dims=16)
    layer = Pipeline(stage_tpl=linear, num_stages=2, num_microbatches=2)
    boxed = layer.init_boxed(KEY)
    variables = unbox(boxed)
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), (first_axis, "fsdp", "tensor"), axis_types=auto)
    bound = BoundSharding(mesh)
    layouts = jax.tree.map(
        lambda axes, weight: bound.sharding(axes, shape=weight.shape),
        logical_axes(boxed),
        variables,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    rows = bound.sharding(("batch", None, None), shape=X.shape)
    found = jax.jit(
        functools.partial(gradients, layer.clone(sharding=bound)),
        in_shardings=(layouts, rows),
        out_shardings=layouts,
    )(variables, X)
    expected = jax.jit(functools.partial(gradients, layer))(variables, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
