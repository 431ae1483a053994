"""Tests of a pipelined stack, compared with a repeated stack."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import AUX_LOSS, CACHE, PARAMS, SUMMARIES, BaseLayer
from layerkit.config import sub_config_field
from layerkit.layers.attention.biases import RelativeBias
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import Transformer, TransformerFeedForward
from layerkit.models.transformer_lm import TransformerLm
from layerkit.ops.attention.masks import AttentionMask

KEY = jax.random.key(0)
BATCH, LENGTH, MEMORY_LENGTH, DIMS, HEADS = 8, 6, 3, 8, 4
SIZES = {"input_dims": DIMS, "hidden_dims": 12, "num_heads": HEADS}
# One document, two, and two with padding.
SEGMENTS = np.tile(np.array([[1] * 6, [1, 1, 2, 2, 2, 2], [1, 1, 1, 2, 0, 0]], np.int32), (3, 1))
POSITIONS = np.tile(
    np.array([[*range(6)], [0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 0, 0]], np.int32), (3, 1)
)
SEGMENTS, POSITIONS = SEGMENTS[:BATCH], POSITIONS[:BATCH]


class Balanced(BaseLayer):
    """A feed-forward block with an auxiliary loss, as a mixture of experts has."""

    input_dims: int = 0
    hidden_dims: int = 0
    feed_forward_tpl: Any = sub_config_field(TransformerFeedForward.HParams)

    def setup(self):
        sizes = {"input_dims": self.input_dims, "hidden_dims": self.hidden_dims}
        self.create_child("experts", self.feed_forward_tpl, **sizes)

    def fprop(self, x, *, is_token):
        self.add_aux_loss("balance", jnp.mean(jnp.where(is_token[..., None], x, 0.0) ** 2))
        return self.experts(x)


def layer_config(**attention):
    config = Transformer.HParams.config()
    config.attention_tpl.set(rotary_tpl=RotaryPositionalEmbedding.HParams.config(), **attention)
    return config


LOCAL = layer_config(window=2)
EXPERTS = layer_config(num_kv_heads=2).set(feed_forward_tpl=Balanced.HParams.config())
CROSS = Transformer.HParams.config(cross_attention_tpl=CrossAttention.HParams.config())

# Fields of both stacks; fields of the pipeline; whether there is a memory.
KINDS = {
    "gpipe": (
        {"layer_tpl": CROSS, "num_layers": 4, "relative_bias_tpl": RelativeBias.HParams.config()},
        {"num_stages": 2, "num_microbatches": 4},
        True,
    ),
    "circular": (
        {
            "first_tpls": (LOCAL,),
            "block_tpls": (LOCAL, EXPERTS),
            "num_layers": 9,
            "remat": "dots",
        },
        {"num_stages": 2, "microbatch_size": 2, "circular_repeats": 2},
        False,
    ),
}


def make(stack, **fields):
    return stack.HParams.config(**{**SIZES, **fields}).Instantiate()


def random_weights(layer):
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(layer.init, KEY)
    return jax.tree.map(lambda x: random.normal(0.0, 0.3, x.shape).astype(np.float32), shapes)


def layer_of(stack, tree, layer):
    """The leaves of one layer, by `locate_layer`."""
    path, indices = stack.locate_layer(layer)
    for name in path:
        tree = tree[name]
    return jax.tree.map(lambda leaf: leaf[indices], tree)


def moved(tree, source, target):
    """`tree` of the stack `source` as that of the stack `target`, layer by layer."""
    result = jax.tree.map(
        lambda leaf: np.full(leaf.shape, np.nan, np.float32),
        jax.eval_shape(target.init, KEY)[PARAMS],
    )
    for layer in range(source.num_layers):
        path, indices = target.locate_layer(layer)
        place = result
        for name in path:
            place = place[name]

        def put(leaf, value, indices=indices):
            leaf[indices] = value

        jax.tree.map(put, place, layer_of(source, tree, layer))
    shared = {name: leaf for name, leaf in tree.items() if name == "relative_bias"}
    return {**result, **shared}


def check_close(actual, expected):
    atol = 1e-5 * max(1.0, np.max(np.abs(expected)))
    np.testing.assert_allclose(actual, expected, rtol=0.0, atol=atol)


def loss_and_gradients(stack, *, has_memory):
    stack = stack.clone(train=False)
    mask = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS)
    queries, keys = np.zeros((BATCH, LENGTH), np.int32), np.zeros((BATCH, MEMORY_LENGTH), np.int32)
    to_memory = {"memory_mask": AttentionMask(queries, keys)} if has_memory else {}

    def loss(params, x, memory):
        extra = {"memory": memory, **to_memory} if has_memory else {}
        outputs, updates = stack.apply(
            {PARAMS: params}, x, mask=mask, positions=POSITIONS, mutable=[AUX_LOSS], **extra
        )
        aux = sum(jnp.sum(value) for value in jax.tree.leaves(updates))
        return jnp.sum(jnp.sin(outputs)) + aux, (outputs, aux)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@pytest.mark.parametrize("kind", ["gpipe", pytest.param("circular", marks=pytest.mark.slow)])
def test_outputs_equal_those_of_the_repeated_stack_on_packed_rows(kind):
    fields, of_pipeline, has_memory = KINDS[kind]
    pipelined = make(PipelinedTransformer, **fields, **of_pipeline)
    repeated = make(StackedTransformerRepeated, **fields)
    params = random_weights(pipelined)[PARAMS]
    random = np.random.default_rng(3)
    x = random.normal(size=(BATCH, LENGTH, DIMS)).astype(np.float32)
    memory = random.normal(size=(BATCH, MEMORY_LENGTH, DIMS)).astype(np.float32)

    run, run_repeated = (
        loss_and_gradients(stack, has_memory=has_memory) for stack in (pipelined, repeated)
    )
    actual, gradients = run(params, x, memory)
    expected, others = run_repeated(moved(params, pipelined, repeated), x, memory)
    jax.tree.map(check_close, actual, expected)
    jax.tree.map(check_close, moved(gradients[0], pipelined, repeated), others[0])
    jax.tree.map(check_close, gradients[1:], others[1:])
    assert has_memory == bool(np.any(gradients[2]))
    assert (kind == "circular") == bool(actual[1][1] > 0)  # the auxiliary loss


@pytest.mark.parametrize(
    ("policy", "kept", "space"),
    [
        ("full", (5, 2, 2), "device"),
        ("residual", (5, 3, 2, 2), "device"),
        ("offload:stage_input", (5, 2, 2), "host"),
    ],
)
def test_stage_remat_saves_inputs_of_stages_or_layers(policy, kept, space):
    """`kept`: ticks, the layers of a run, stages, rows of a microbatch."""
    fields = {"num_stages": 2, "num_microbatches": 2, "circular_repeats": 2}
    stack = make(PipelinedTransformer, num_layers=12, stage_remat=policy, **fields)
    x, mask = jnp.zeros((4, LENGTH, DIMS)), AttentionMask.causal_mask(4, LENGTH)

    def loss(variables):
        return jnp.sum(stack.apply(variables, x, mask=mask, positions=mask.query_positions))

    traced = jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(stack.init, KEY))
    ticks = next(e for e in traced.eqns if e.primitive.name == "scan" and e.params["length"] == 5)
    saved = [out.aval for out in ticks.outvars if out.aval.shape[-2:] == (LENGTH, DIMS)]
    saved = [(aval.shape, aval.memory_space.name) for aval in saved if aval.shape[0] == 5]
    assert saved == [((*kept, LENGTH, DIMS), space.title())]


class Report(BaseLayer):
    """A layer that says what it was given."""

    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0

    def fprop(self, x, *, mask, positions, droppath_rate):
        self.add_summary("rate", droppath_rate)
        return x


def test_droppath_rate_of_a_layer_depends_on_its_depth():
    stack = make(
        PipelinedTransformer,
        layer_tpl=Report.HParams.config(),
        num_layers=8,
        droppath_rate=0.4,
        num_stages=2,
        num_microbatches=2,
        circular_repeats=2,
        train=True,
    )
    mask = AttentionMask.causal_mask(2, 1)
    x, positions = jnp.zeros((2, 1, DIMS)), mask.query_positions

    @jax.jit
    def run(x):
        return stack.apply({}, x, mask=mask, positions=positions, mutable=[SUMMARIES])

    _, updates = run(x)
    rates = [layer_of(stack, updates[SUMMARIES], layer)["rate"][0] for layer in range(8)]
    np.testing.assert_allclose(rates, 0.4 * np.arange(1, 9) / 8, rtol=1e-6)


def language_model(**fields):
    layer = layer_config(num_kv_heads=2)
    layer.set(dropout_rate=0.2)
    stack = PipelinedTransformer.HParams.config(layer_tpl=layer, **fields)
    sizes = {"vocab_size": 16, "model_dims": DIMS, "hidden_dims": 12, "num_heads": HEADS}
    return TransformerLm.HParams.config(stack_tpl=stack, num_layers=4, **sizes).Instantiate()


@pytest.mark.parametrize("repeats", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_cached_steps_equal_the_logits_of_whole_rows(repeats):
    model = language_model(num_stages=2, num_microbatches=2, circular_repeats=repeats)
    variables = random_weights(model)
    ids = np.random.default_rng(1).integers(1, 16, (2, 5)).astype(np.int32)
    logits = jax.jit(lambda v, ids: model.apply(v, ids, method="logits"))
    expected = logits(variables, ids)
    check_close(logits(variables, ids[:1]), expected[:1])  # one row, which is no two microbatches
    init = lambda v: model.apply(v, 2, 5, method="init_cache", mutable=[CACHE])[1]  # noqa: E731
    cache = jax.jit(init)(variables)

    @jax.jit
    def step(state, ids, time_step):
        return model.apply(
            {**variables, **state}, ids, time_step=time_step, method="extend_step", mutable=[CACHE]
        )

    for start, end in itertools.pairwise([0, 3, 4, 5]):
        logits, cache = step(cache, ids[:, start:end], start)
        check_close(logits, expected[:, start:end])
