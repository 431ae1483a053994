"""MoeFeedForward, compared with loops over tokens, with and without a capacity."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from layerkit.base.base_layer import AUX_LOSS, CACHE, NON_TRAINABLE, SUMMARIES
from layerkit.base.weights import logical_axes
from layerkit.errors import ConfigError
from layerkit.layers.basic.dots import Dot
from layerkit.layers.basic.elementwise import ReLU, SiLU
from layerkit.layers.moe.routing import TopKRouter
from layerkit.layers.moe.token_choice import MoeFeedForward

BATCH, LENGTH, DIMS, HIDDEN, EXPERTS = 3, 6, 4, 5, 4
SIZES = {"input_dims": DIMS, "hidden_dims": HIDDEN, "num_experts": EXPERTS}
X = np.random.default_rng(1).normal(size=(BATCH, LENGTH, DIMS)).astype(np.float32)
IS_TOKEN = np.arange(LENGTH) < np.array([[6], [4], [0]])
KEY = jax.random.key(0)
EVERYTHING = [AUX_LOSS, SUMMARIES, NON_TRAINABLE]


def make(**fields):
    return MoeFeedForward(**{**SIZES, **fields})


def drawn_weights(layer, seed=3):
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(layer.init, KEY)
    return jax.tree.map(lambda w: random.normal(0.0, 0.7, w.shape).astype(w.dtype), shapes)


def values_and_gradients(layer, variables):
    return next(all_values_and_gradients(layer, variables, X))


def all_values_and_gradients(layer, variables, *inputs, is_token=None):
    """Yield ((output, updates), gradients for weights and inputs) of a loss with everything."""

    def loss(params, x):
        given = {**variables, "params": params}
        output, updates = layer.apply(
            given, x, is_token=is_token, mutable=EVERYTHING, rngs={"random": KEY}
        )
        aux = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(updates.get(AUX_LOSS, {})))
        return jnp.sum(jnp.sin(output)) + aux, (output, updates)

    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    for x in inputs:
        gradients, results = run(variables["params"], x)
        yield results, gradients


def assert_close(first, second, *, rtol=1e-4, atol=2e-5):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), first, second)


def silu(x):
    return x / (1.0 + np.exp(-x))


def clamped(gate, up):
    """The hidden activations of gpt-oss."""
    gate, up = np.minimum(gate, 0.7), np.clip(up, -0.7, 0.7)
    return gate / (1.0 + np.exp(-1.702 * gate)) * (up + 1.0)


CLAMPED = {
    "use_bias": True,
    "gate_limit": 0.7,
    "up_offset": 1.0,
    "activation_tpl": SiLU.HParams.config(beta=1.702),
    "router_tpl": TopKRouter.HParams.config(use_bias=True),
}


LLAMA4 = {
    "weigh_inputs": True,
    "router_tpl": TopKRouter.HParams.config(score="sigmoid", renormalize=False),
}


def by_loops(
    params, x, *, k, activation=silu, use_gate=True, gated=None, slots=None, sigmoid=False
):
    """One token after the other in float64; with `slots`, choices beyond them are dropped.

    With `sigmoid`, sigmoids of the logits weigh the inputs.
    """
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    x = np.asarray(x, np.float64)

    def expert(token, weights):
        up = token @ weights["up"] + weights.get("up_bias", 0.0)
        if use_gate:
            gate = token @ weights["gate"] + weights.get("gate_bias", 0.0)
            hidden = activation(gate) * up if gated is None else gated(gate, up)
        else:
            hidden = activation(up)
        return hidden @ weights["down"] + weights.get("down_bias", 0.0)

    output = np.zeros_like(x)
    for row in range(x.shape[0]):
        logits = x[row] @ params["router"]["w"] + params["router"].get("b", 0.0)
        probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        chosen = np.argsort(-probs, axis=-1, kind="stable")[:, :k]
        taken = np.zeros(EXPERTS, int)
        for choice in range(k):
            for i, token in enumerate(x[row]):
                e = chosen[i, choice]
                taken[e] += 1
                if slots is None or taken[e] <= slots:
                    own = {n: w[e] for n, w in params.items() if n not in ("router", "shared")}
                    weight = probs[i, e] / probs[i, chosen[i]].sum()
                    if sigmoid:
                        scale = 1.0 / (1.0 + np.exp(-logits[i, e]))
                        output[row, i] += expert(scale * token, own)
                    else:
                        output[row, i] += weight * expert(token, own)
        if "shared" in params:
            shared = {n: w["w"] for n, w in params["shared"].items()}
            output[row] += np.array([expert(token, shared) for token in x[row]])
    return output


@pytest.mark.parametrize(
    ("fields", "reference"),
    [
        ({"num_experts_per_token": 1}, {"k": 1}),
        ({"num_experts_per_token": 3, "num_shared_experts": 2}, {"k": 3}),
        (
            {"use_gate": False, "activation_tpl": ReLU.HParams.config()},
            {"k": 2, "use_gate": False, "activation": lambda x: np.maximum(x, 0.0)},
        ),
        (CLAMPED, {"k": 2, "gated": clamped}),
        ({**LLAMA4, "num_experts_per_token": 1}, {"k": 1, "sigmoid": True}),
        ({**LLAMA4, "capacity_factor": float(EXPERTS)}, {"k": 2, "sigmoid": True}),
        ({**CLAMPED, "grouped_matmul": "ragged_dot"}, {"k": 2, "gated": clamped}),
        ({**CLAMPED, "capacity_factor": float(EXPERTS)}, {"k": 2, "gated": clamped}),
    ],
)
def test_outputs_equal_loops(fields, reference):
    layer = make(**fields)
    variables = drawn_weights(layer)
    result = jax.jit(layer.apply)(variables, X)
    np.testing.assert_allclose(result, by_loops(variables["params"], X, **reference), atol=1e-5)


def test_capacity_drops_the_same_choices_as_loops():
    layer = make(capacity_factor=1.0, train=True)  # int(6·1/4) = 1 → 4 slots
    variables = drawn_weights(layer)
    variables["params"]["router"]["w"][:, 0] += 2.0
    (output, updates), _ = values_and_gradients(layer, variables)
    expected = by_loops(variables["params"], X, k=2, slots=4)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert np.any(expected != by_loops(variables["params"], X, k=2))
    assert 0.0 < updates[SUMMARIES]["fraction_dropped"][0] < 0.5


def test_platform_of_the_products_is_that_of_a_surrounding_mesh(caplog):
    """A plan of data-parallel training traces the model in a `shard_map` over planned devices."""
    layer, gpu = make(), AbstractDevice("NVIDIA H100", num_cores=132, platform="gpu")
    weights = jax.eval_shape(layer.init, KEY)
    caplog.set_level("INFO", "layerkit")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        jax.eval_shape(layer.apply, weights, X)
    reason = "auto: pallas requires bfloat16 or float16 instead of float32"
    assert caplog.messages == [f"grouped matmul: blocks ({reason})"]


def test_dropless_equals_a_large_capacity_and_all_experts():
    def dense(params, x):
        """Compute all experts for all tokens, with weight 0 for those that are not chosen."""
        probs = jax.nn.softmax(x @ params["router"]["w"])
        kept = jnp.sum(jax.nn.one_hot(jax.lax.top_k(probs, 2)[1], EXPERTS), axis=-2) * probs
        kept = kept / jnp.sum(kept, axis=-1, keepdims=True)
        wide = [jnp.einsum("bld,edh->bleh", x, params[name]) for name in ("up", "gate")]
        outputs = jnp.einsum("bleh,ehd->bled", wide[0] * jax.nn.silu(wide[1]), params["down"])
        return jnp.einsum("bled,ble->bld", outputs, kept)

    quiet = {"load_balance_weight": 0.0, "router_z_weight": 0.0, "train": True}
    variables = drawn_weights(make())
    expected = jax.jit(dense)(variables["params"], X)
    expected_gradients = jax.jit(
        jax.grad(lambda p, x: jnp.sum(jnp.sin(dense(p, x))), argnums=(0, 1))
    )(variables["params"], X)
    for fields in (
        {"grouped_matmul": "blocks"},
        {"grouped_matmul": "ragged_dot"},
        {"capacity_factor": float(EXPERTS), "num_groups": 9},
    ):
        (output, updates), gradients = values_and_gradients(make(**quiet, **fields), variables)
        assert_close((output, gradients), (expected, expected_gradients))
        assert AUX_LOSS not in updates
        assert updates[SUMMARIES].get("fraction_dropped", (0.0,)) == (0.0,)


def test_evaluation_drops_no_choices():
    layer = make(capacity_factor=0.1)
    variables = drawn_weights(layer)
    evaluated = jax.jit(layer.apply)(variables, X)
    np.testing.assert_allclose(evaluated, by_loops(variables["params"], X, k=2), atol=1e-5)
    wrapped = make(capacity_factor=0.1, dot_tpl=Dot.HParams.config())
    assert_close(jax.jit(wrapped.apply)(variables, X), evaluated)
    # Groups are for training: a cached step may have fewer tokens than there are groups.
    for fields in ({}, {"balance_per_group": True}):
        grouped = wrapped.clone(num_groups=9, **fields)
        assert jax.eval_shape(grouped.apply, variables, X[:, :1]).shape == (3, 1, 4)


def test_capacity_in_evaluation_is_that_of_training_but_in_cached_steps():
    layer = make(capacity_factor=1.0, capacity_in_evaluation=True)
    variables = drawn_weights(layer)
    variables["params"]["router"]["w"][:, 0] += 2.0
    dropping, whole = (by_loops(variables["params"], X, k=2, slots=n) for n in (4, None))
    assert np.any(dropping != whole)
    np.testing.assert_allclose(jax.jit(layer.apply)(variables, X), dropping, atol=1e-5)
    cached, _ = jax.jit(partial(layer.apply, mutable=[CACHE]))(variables, X)
    np.testing.assert_allclose(cached, whole, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"capacity_factor": 1.0}])
def test_padding_reaches_no_expert_and_has_no_effect(fields):
    layer = make(**fields, train=True)
    variables = drawn_weights(layer)
    poisoned = np.where(IS_TOKEN[..., None], X, np.float32(1e3))
    results = list(all_values_and_gradients(layer, variables, X, poisoned, is_token=IS_TOKEN))
    for (output, _), (_, x_gradient) in results:
        np.testing.assert_array_equal(output[~IS_TOKEN], 0.0)
        np.testing.assert_array_equal(x_gradient[~IS_TOKEN], 0.0)
    assert_close(*results)
    if not fields:
        whole = jax.jit(layer.clone(train=False).apply)(variables, X)
        assert_close(results[0][0][0][IS_TOKEN], whole[IS_TOKEN])


def test_losses_are_added_with_weights_and_reported_without_weights():
    layer = make(load_balance_weight=0.25, router_z_weight=0.5, train=True)
    (_, updates), _ = values_and_gradients(layer, drawn_weights(layer))
    aux, summaries = updates[AUX_LOSS], updates[SUMMARIES]
    assert set(aux) == {"load_balance_loss", "router_z_loss"}
    for name, weight in (("load_balance_loss", 0.25), ("router_z_loss", 0.5)):
        np.testing.assert_allclose(aux[name][0], weight * summaries[name][0], rtol=1e-6)
    load = np.array([summaries[f"expert_load/{expert}"][0] for expert in range(EXPERTS)])
    assert abs(np.mean(load) - 1.0) < 1e-6 and np.ptp(load) > 0.1
    assert summaries["max_expert_load"][0] == load.max()
    assert summaries["min_expert_load"][0] == load.min()


def test_shared_gate_multiplies_the_shared_experts():
    layer = make(num_shared_experts=1, use_shared_gate=True)
    variables = drawn_weights(layer)
    params = variables["params"]
    whole = jax.jit(layer.apply)(variables, X)
    routed = jax.jit(make().apply)(
        {"params": {n: params[n] for n in ("router", "up", "gate", "down")}}, X
    )
    shared = {n: w["w"] for n, w in params["shared"].items()}
    output = (silu(X @ shared["gate"]) * (X @ shared["up"])) @ shared["down"]
    gate = 1.0 / (1.0 + np.exp(-(X @ params["shared_gate"]["w"])))
    np.testing.assert_allclose(whole, routed + gate * output, atol=1e-5)


def test_weights_have_the_fans_of_one_expert_and_axes():
    layer = make(input_dims=300, hidden_dims=200, num_shared_experts=1, use_shared_gate=True)
    boxed = jax.jit(layer.init_boxed)(KEY)
    axes = logical_axes(boxed)["params"]
    assert axes["up"] == axes["gate"] == ("expert", "embed", "mlp")
    assert axes["down"] == ("expert", "mlp", "embed")
    assert axes["router"] == {"w": ("embed", None)}
    assert axes["shared_gate"] == {"w": ("embed", None)}
    bound = np.sqrt(6.0 / 500.0)
    for name in ("up", "gate", "down"):
        assert 0.99 * bound < np.abs(boxed["params"][name].value).max() <= bound


def test_groups_that_do_not_divide_a_batch_raise(raises):
    layer = make(capacity_factor=1.0, num_groups=4, train=True)
    with raises(ConfigError, owner="MoeFeedForward()", field="tokens_per_batch", value=18):
        jax.eval_shape(lambda: layer.init(KEY, X))
