"""Stacks of layers with experts: repeated and unrolled stacks, and the sum of their losses."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base.base_layer import AUX_LOSS, NON_TRAINABLE, PARAMS, SUMMARIES
from layerkit.layers import AttentionMask, Pipeline, Repeat, Transformer
from layerkit.layers.moe.routing import TopKRouter
from layerkit.layers.moe.token_choice import MoeFeedForward

BATCH, LENGTH, DIMS, LAYERS = 2, 6, 8, 2
X = np.random.default_rng(1).normal(size=(BATCH, LENGTH, DIMS)).astype(np.float32)
KINDS = (AUX_LOSS, SUMMARIES, NON_TRAINABLE)


def drawn_weights(layer):
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(layer.init, jax.random.key(0))
    return jax.tree.map(lambda w: random.normal(0.0, 0.5, w.shape).astype(w.dtype), shapes)


def test_repeated_experts_equal_unrolled_experts():
    router = TopKRouter.HParams.config(use_score_bias=True, score_bias_rate=0.01)
    config = MoeFeedForward.HParams.config(
        input_dims=DIMS, hidden_dims=6, num_experts=4, router_tpl=router, train=True
    )
    single, loop = config.Instantiate(), Repeat(sub_tpl=config, num_repeats=LAYERS, train=True)
    variables = drawn_weights(loop)

    def in_a_loop(given):
        output, updates = loop.apply(given, X, mutable=KINDS)
        return output, {kind: updates[kind]["sub"] for kind in KINDS}

    def unrolled(given):
        x, all_updates = X, []
        for i in range(LAYERS):
            own = {kind: jax.tree.map(lambda w, i=i: w[i], given[kind]["sub"]) for kind in given}
            x, updates = single.apply(own, x, mutable=KINDS)
            all_updates.append({kind: updates[kind] for kind in KINDS})
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_updates)

    def results_and_gradients(run):
        def loss(params):
            output, updates = run({**variables, PARAMS: params})
            aux = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(updates[AUX_LOSS]))
            return jnp.sum(jnp.sin(output)) + aux, (output, updates)

        return jax.jit(jax.grad(loss, has_aux=True))(variables[PARAMS])

    expected = results_and_gradients(unrolled)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
    jax.tree.map(close, results_and_gradients(in_a_loop), expected)
    _, (_, updates) = expected
    shapes = {name: loss[0].shape for name, loss in updates[AUX_LOSS].items()}
    assert shapes == {"load_balance_loss": (LAYERS,), "router_z_loss": (LAYERS,)}


def test_pipelined_losses_and_biases_equal_those_of_the_whole_batch():
    router = TopKRouter.HParams.config(use_score_bias=True, score_bias_rate=0.01)
    config = MoeFeedForward.HParams.config(
        input_dims=DIMS, hidden_dims=6, num_experts=4, router_tpl=router, train=True
    )
    loop = Repeat(sub_tpl=config, num_repeats=LAYERS, train=True)
    pipeline = Pipeline(
        stage_tpl=config, num_stages=LAYERS, num_microbatches=2, stream_inputs=False, train=True
    )
    variables = drawn_weights(loop)
    is_token = jnp.arange(LENGTH) < jnp.array([[6], [2]])

    def results(layer, child):
        def loss(params):
            given = {**variables, PARAMS: params}
            given = {kind: {child: tree["sub"]} for kind, tree in given.items()}
            _, updates = layer.apply(given, X, is_token=is_token, mutable=KINDS)
            aux, state = (updates[kind][child] for kind in (AUX_LOSS, NON_TRAINABLE))
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(aux)), (aux, state)

        return jax.jit(jax.grad(loss, has_aux=True))(variables[PARAMS])

    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, results(pipeline, "stage"), results(loop, "sub"))


def test_transformer_passes_padding_to_the_router():
    config = Transformer.HParams.config(input_dims=DIMS, hidden_dims=6, num_heads=2)
    config.feed_forward_tpl = MoeFeedForward.HParams.config(num_experts=4)
    layer = config.Instantiate()
    segments = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]], np.int32)
    mask = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=jnp.asarray(segments))
    row = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, LENGTH))
    run = jax.jit(lambda v: layer.apply(v, X, mask=mask, positions=row, mutable=[SUMMARIES])[1])
    summaries = run(drawn_weights(layer))[SUMMARIES]["feed_forward"]
    load = np.array([summaries[f"expert_load/{expert}"][0] for expert in range(4)])
    # 10 tokens with 2 choices each, over 4 experts.
    choices = load * (10 * 2 / 4)
    np.testing.assert_allclose(choices, np.round(choices), atol=1e-5)
    assert abs(np.sum(choices) - 20.0) < 1e-4
