"""Tests of stacks on eight devices, compared with one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import is_box
from layerkit.layers.attention.biases import RelativeBias
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.layers.transformer.transformer import Transformer
from layerkit.ops.attention.masks import AttentionMask, row_positions

KEY = jax.random.key(0)
BATCH, LENGTH, DIMS = 8, 4, 8
SIZES = {"input_dims": DIMS, "hidden_dims": 12, "num_heads": 4}
X = np.asarray(jax.random.normal(KEY, (BATCH, LENGTH, DIMS)))
MEMORY = np.asarray(jax.random.normal(jax.random.key(1), (BATCH, 3, DIMS)))
SEGMENTS = np.tile(np.array([1, 1, 2, 2], np.int32), (BATCH, 1))


def sandwiched_and_parallel():
    """A pattern in a loop, one table of biases, and everything kept on the host."""
    sandwiched = Transformer.HParams.config(norm_policy="pre_post")
    sandwiched.attention_tpl.window = 2
    parallel = Transformer.HParams.config(parallel=True, parallel_shares_norm=True)
    return StackedTransformerRepeated.HParams.config(
        **SIZES,
        block_tpls=(sandwiched, parallel),
        num_layers=4,
        relative_bias_tpl=RelativeBias.HParams.config(num_buckets=4, max_distance=8),
        remat="offload_projections",
    )


def crossing():
    """A decoder whose norms follow its branches, and that drops whole branches."""
    layer = Transformer.HParams.config(
        norm_policy="branch", cross_attention_tpl=CrossAttention.HParams.config()
    )
    return StackedTransformer.HParams.config(
        **SIZES, layer_tpl=layer, num_layers=1, droppath_rate=0.5, train=True
    )


def value_and_gradients(layer, extra):
    def loss(variables, x):
        output = layer.apply(
            variables,
            x,
            mask=AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS),
            positions=row_positions(BATCH, LENGTH),
            rngs={"random": KEY},
            **extra,
        )
        return jnp.sum(jnp.sin(output)), output

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


@pytest.fixture(
    scope="module", params=[sandwiched_and_parallel, pytest.param(crossing, marks=pytest.mark.slow)]
)
def case(request):
    """A stack, its weights, what it is called with, and its results on one device."""
    layer = request.param().Instantiate()
    extra = {}
    if request.param is crossing:
        mask = AttentionMask(row_positions(BATCH, LENGTH), row_positions(BATCH, 3))
        extra = {"memory": MEMORY, "memory_mask": mask}
    random, shapes = np.random.default_rng(7), jax.eval_shape(layer.init, KEY)
    variables = jax.tree.map(lambda x: random.normal(0.0, 0.3, x.shape).astype(np.float32), shapes)
    return layer, variables, extra, jax.jit(value_and_gradients(layer, extra))(variables, X)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2, 2, 2), ("data", "fsdp", "tensor")),
        pytest.param((2, 4), ("fsdp", "tensor"), marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_equal_one_device(case, shape, axes):
    layer, variables, extra, expected = case
    bound = BoundSharding(Mesh(np.reshape(jax.devices(), shape), axes))
    boxed = jax.eval_shape(layer.init_boxed, KEY)
    places = jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    rows = NamedSharding(bound.mesh, PartitionSpec(tuple(a for a in axes if a != "tensor")))
    run = jax.jit(
        value_and_gradients(layer.clone(sharding=bound), extra),
        in_shardings=(places, rows),
        out_shardings=((None, rows), (places, rows)),
    )
    result = run(variables, X)

    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=0.0, atol=1e-5 * max(1.0, np.max(np.abs(b))))

    jax.tree.map(check, result, expected)
    whole, part = (
        sum(size(leaf) for leaf in jax.tree.leaves(result[1][0]))
        for size in (lambda leaf: leaf.size, lambda leaf: leaf.addressable_shards[0].data.size)
    )
    assert part < 0.4 * whole
