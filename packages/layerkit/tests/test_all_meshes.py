"""One language model on every mesh of eight devices has the loss and gradients of one device.

Eight is an ordered product of six sizes in 56 ways. The model uses each mesh axis: grouped queries
with rotary positions on packed rows (tensor, context), a mixture of experts with auxiliary losses
and a shared expert (expert), repeated layers (fsdp), logits in chunks, and a pipeline on meshes
with stages. A hybrid has layers with a gated delta net, with an LSTM and with attention.
`nox -s meshes` runs all meshes, those with tensor also under sequence parallelism. The default
tests run two, whose combinations of axes no other test of a whole model covers. Pipelines and
sequence parallelism have tests of their own in layers/transformer.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from layerkit.base.base_layer import AUX_LOSS, PARAMS
from layerkit.base.sharding import DEFAULT_RULES, STANDARD_MESH_AXES, BoundSharding
from layerkit.base.weights import is_box
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.recurrent.frnn import Frnn
from layerkit.layers.recurrent.linear_attention import GatedDeltaNet
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import Transformer
from layerkit.models.language_model import LanguageModel

KEY = jax.random.key(0)
VOCAB, BATCH, LENGTH, NUM_LAYERS = 16, 8, 16, 8
MESHES = [
    sizes
    for sizes in itertools.product((1, 2, 4, 8), repeat=len(STANDARD_MESH_AXES))
    if math.prod(sizes) == 8
]
# data, fsdp, tensor, stage, expert, context
SMOKE = [(1, 1, 2, 1, 2, 2)]
SEQUENCE_PARALLEL = DEFAULT_RULES.replace(residual_length=("context", "tensor"))
HYBRID_SMOKE = [(1, 2, 2, 1, 1, 2)]


def language_model(num_stages, capacity_factor):
    config = LanguageModel.HParams.config()
    config.lm_tpl.set(
        vocab_size=VOCAB,
        model_dims=16,
        hidden_dims=16,
        num_layers=NUM_LAYERS,
        num_heads=16,
        num_kv_heads=8,
        dim_per_head=4,
    )
    if num_stages == 1:
        stack = StackedTransformerRepeated.HParams.config()
    else:
        stack = PipelinedTransformer.HParams.config(
            num_stages=num_stages,
            num_microbatches=num_stages,
            gather_weights_once=capacity_factor is None,
        )
    stack.layer_tpl.attention_tpl.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    stack.layer_tpl.feed_forward_tpl = MoeFeedForward.HParams.config(
        num_experts=8, num_shared_experts=1, capacity_factor=capacity_factor
    )
    config.lm_tpl.stack_tpl = stack
    config.lm_tpl.softmax_tpl.chunk_size = 6
    return config.Instantiate().clone(train=True)


def hybrid(num_stages, _):
    """Return a model that repeats a gated delta net, an LSTM, and attention with a feed-forward."""
    config = LanguageModel.HParams.config()
    sizes = {"hidden_dims": 16, "num_heads": 8, "dim_per_head": 4}
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=16, num_layers=3 * num_stages, **sizes)
    heads = {
        "num_key_heads": 8,
        "num_value_heads": 8,
        "key_dim_per_head": 4,
        "value_dim_per_head": 4,
    }
    mixers = (GatedDeltaNet.HParams.config(**heads, tokens_per_chunk=8), Frnn.HParams.config())
    stack = StackedTransformerRepeated.HParams.config()
    if num_stages > 1:
        stages = {"num_stages": num_stages, "num_microbatches": num_stages}
        stack = PipelinedTransformer.HParams.config(**stages)
    stack.block_tpls = (
        *(Transformer.HParams.config(attention_tpl=tpl, feed_forward_tpl=None) for tpl in mixers),
        Transformer.HParams.config(),
    )
    config.lm_tpl.stack_tpl = stack
    return config.Instantiate().clone(train=True)


def packed_batch():
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    segments = np.sort(random.integers(1, 4, (BATCH, LENGTH)), axis=1).astype(np.int32)
    segments[::3, -3:] = 0
    starts = np.maximum.accumulate(
        np.where(np.diff(segments, prepend=-1) != 0, np.arange(LENGTH), 0), axis=1
    )
    return NestedMap(
        ids=ids[:, :-1],
        labels=ids[:, 1:],
        weights=(segments > 0).astype(np.float32) * random.random((BATCH, LENGTH)).round(1),
        segment_ids=segments,
        segment_pos=(np.arange(LENGTH) - starts).astype(np.int32),
    )


def loss_and_gradients(model, params, batch):
    def loss(params):
        (metrics, _), updates = model.apply({PARAMS: params}, batch, mutable=[AUX_LOSS])
        aux = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(updates.get(AUX_LOSS, {})))
        return metrics["loss"].value + aux, aux

    return jax.value_and_grad(loss, has_aux=True)(params)


@functools.cache
def unsharded(build, num_stages, capacity_factor):
    model = build(num_stages, capacity_factor)
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(model.init, KEY)[PARAMS]
    params = jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), shapes)
    result = jax.jit(functools.partial(loss_and_gradients, model))(params, packed_batch())
    return model, params, jax.device_get(result)


def name(sizes):
    axes = zip(sizes, STANDARD_MESH_AXES, strict=True)
    return "x".join(f"{size}{axis}" for size, axis in axes if size > 1)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(s, marks=() if s in SMOKE else pytest.mark.meshes, id=name(s)) for s in MESHES],
)
def test_loss_and_gradients_equal_those_of_one_device(sizes):
    check_mesh(sizes, DEFAULT_RULES)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(s, marks=pytest.mark.meshes, id=name(s))
        for s in MESHES
        if s[STANDARD_MESH_AXES.index("tensor")] > 1
    ],
)
def test_sequence_parallel_loss_and_gradients_equal_those_of_one_device(sizes):
    check_mesh(sizes, SEQUENCE_PARALLEL)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(s, marks=() if s in HYBRID_SMOKE else pytest.mark.meshes, id=name(s))
        for s in MESHES
    ],
)
def test_loss_and_gradients_of_a_hybrid_equal_those_of_one_device(sizes):
    # Half a unit in the last place of the weights changes gradients of 12 layers by 1e-4.
    is_deep = sizes[STANDARD_MESH_AXES.index("stage")] > 2
    check_mesh(sizes, DEFAULT_RULES, build=hybrid, rtol=1e-4 if is_deep else 1e-5)


def check_mesh(sizes, rules, *, build=language_model, rtol=1e-5):
    # Neighboring meshes alternate between the two dispatch methods, and between pipeline weights
    # that are gathered once and at each tick.
    capacity_factor = (None, 1.5)[MESHES.index(sizes) % 2] if build is language_model else None
    num_stages = sizes[STANDARD_MESH_AXES.index("stage")]
    model, params, expected = unsharded(build, num_stages, capacity_factor)
    bound = BoundSharding(Mesh(np.reshape(jax.devices(), sizes), STANDARD_MESH_AXES), rules)
    boxed = jax.eval_shape(model.init_boxed, KEY)[PARAMS]
    layouts = jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    rows = NamedSharding(bound.mesh, bound.spec(("batch", "length")))
    step = jax.jit(
        functools.partial(loss_and_gradients, model.clone(sharding=bound)),
        out_shardings=((None, None), layouts),
    )
    with jax.set_mesh(bound.mesh):
        batch = jax.tree.map(lambda x: jax.device_put(x, rows), packed_batch())
        actual = jax.device_get(step(jax.device_put(params, layouts), batch))
    close = functools.partial(assert_close, rtol=rtol)
    jax.tree_util.tree_map_with_path(close, actual, expected)


def assert_close(path, actual, expected, *, rtol):
    where = jax.tree_util.keystr(path)
    assert np.isfinite(expected).all(), where
    bound = rtol * max(1.0, np.abs(expected).max())
    assert np.abs(actual - expected).max() <= bound, where


def test_all_meshes_of_eight_devices_are_listed():
    assert len(MESHES) == 56
    assert {*SMOKE, *HYBRID_SMOKE} <= set(MESHES)
