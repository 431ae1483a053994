"""The router: chosen experts, weights, padding, noise and groups of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import InvalidRngError

from layerkit.base.base_layer import NON_TRAINABLE, BaseLayer
from layerkit.config import sub_config_field
from layerkit.layers.moe.routing import TopKRouter

DIMS, EXPERTS, TOKENS = 4, 8, 32
X = np.random.default_rng(1).normal(size=(2, TOKENS // 2, DIMS)).astype(np.float32)
SIZES = {"input_dims": DIMS, "num_experts": EXPERTS}


class Inside(BaseLayer):
    """A router in a layer that computes in another dtype."""

    router_tpl: Any = sub_config_field(
        TopKRouter.HParams, input_dims=1, num_experts=2, num_experts_per_token=1
    )

    def setup(self):
        self.create_child("router", self.router_tpl)

    def fprop(self, x):
        return self.router(x)


def make(**fields):
    layer = TopKRouter(**{**SIZES, **fields})
    random = np.random.default_rng(3)
    shapes = jax.eval_shape(layer.init, jax.random.key(0))
    return layer, jax.tree.map(lambda w: random.normal(0.0, 1.0, w.shape).astype(w.dtype), shapes)


def route(layer, variables, x=X, **options):
    return jax.jit(lambda v: layer.apply(v, x, **options))(variables)


def by_hand(scores, *, k, bias=0.0, groups=None, best=2, renormalize=True, scale=1.0):
    """Return the choice of one token by sorting in NumPy."""
    for_choice = scores + bias
    if groups is not None:
        num_groups, num_chosen = groups
        grouped = for_choice.reshape(num_groups, -1)
        group_scores = np.sort(grouped, axis=1)[:, -best:].sum(axis=1)
        hidden = np.argsort(-group_scores, kind="stable")[num_chosen:]
        grouped[hidden] = -np.inf
    chosen = np.argsort(-for_choice, kind="stable")[:k]
    weights = scores[chosen]
    return chosen, scale * (weights / weights.sum() if renormalize else weights)


@pytest.mark.parametrize(
    ("fields", "reference"),
    [
        ({"num_experts_per_token": 1}, {"k": 1}),
        ({}, {"k": 2}),
        ({"num_experts_per_token": EXPERTS}, {"k": EXPERTS}),
        ({"renormalize": False}, {"k": 2, "renormalize": False}),
        (
            {
                "score": "sigmoid",
                "num_experts_per_token": 3,
                "use_score_bias": True,
                "num_expert_groups": 4,
                "num_chosen_groups": 2,
                "weight_scale": 2.5,
            },
            {"k": 3, "groups": (4, 2), "scale": 2.5},
        ),
        (
            {
                "renormalize": False,
                "num_expert_groups": 2,
                "num_chosen_groups": 1,
                "num_group_scores": 1,
                "weight_scale": 16.0,
            },
            {"k": 2, "groups": (2, 1), "best": 1, "renormalize": False, "scale": 16.0},
        ),
    ],
)
def test_choices_and_weights_equal_sorting(fields, reference):
    layer, variables = make(**fields)
    routing = route(layer, variables)
    logits = np.asarray(X, np.float64) @ np.asarray(variables["params"]["w"], np.float64)
    if fields.get("score") == "sigmoid":
        scores = 1.0 / (1.0 + np.exp(-logits))
        reference = {**reference, "bias": variables[NON_TRAINABLE]["score_bias"]}
    else:
        scores = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    for place in np.ndindex(X.shape[:2]):
        chosen, weights = by_hand(scores[place].copy(), **reference)
        np.testing.assert_array_equal(routing.experts[place], chosen)
        np.testing.assert_allclose(routing.weights[place], weights, rtol=1e-4)
    np.testing.assert_allclose(routing.logits, logits, atol=1e-5)
    np.testing.assert_allclose(
        routing.probs, scores / scores.sum(axis=-1, keepdims=True), rtol=1e-4
    )


def test_padding_has_no_expert():
    layer, variables = make()
    is_token = np.arange(TOKENS // 2) < np.array([[5], [0]])
    whole, padded = route(layer, variables), route(layer, variables, is_token=is_token)
    assert np.all(padded.experts[~is_token] == EXPERTS) and np.all(padded.weights[~is_token] == 0)
    np.testing.assert_array_equal(padded.experts[is_token], whole.experts[is_token])
    np.testing.assert_array_equal(padded.weights[is_token], whole.weights[is_token])


def test_scores_are_float32_for_every_compute_dtype():
    # In bfloat16 the weights of both experts are 1, and the first would be chosen.
    layer = Inside(fprop_dtype=jnp.bfloat16)
    variables = {"params": {"router": {"w": jnp.array([[1.0, 1.0 + 2.0**-20]])}}}
    routing = route(layer, variables, jnp.array([[256.0]], jnp.bfloat16))
    assert routing.experts.item() == 1
    assert {a.dtype for a in (routing.logits, routing.probs, routing.weights)} == {
        jnp.dtype("float32")
    }


def test_products_have_the_highest_precision():
    layer, variables = make(use_noise=True, train=True)
    rngs = {"random": jax.random.key(0)}
    text = jax.jit(lambda v: layer.apply(v, X, rngs=rngs)).lower(variables).as_text()
    # Of the router, the noise and the choice of weights.
    assert text.count("precision = [HIGHEST, HIGHEST]") == 3


def test_zero_scores_give_finite_weights():
    layer = TopKRouter(input_dims=1, num_experts=3, num_experts_per_token=1, score="sigmoid")
    routing = route(layer, {"params": {"w": jnp.full((1, 3), -200.0)}}, np.ones((2, 1)))
    np.testing.assert_array_equal(routing.probs, 0.0)
    np.testing.assert_array_equal(routing.weights, 0.0)


@pytest.mark.parametrize("fields", [{"use_noise": True}, {"jitter": 0.3}])
def test_noise_applies_in_training_only(fields):
    layer, variables = make(**fields)
    plain = route(TopKRouter(**SIZES), {"params": {"w": variables["params"]["w"]}})
    jax.tree.map(np.testing.assert_array_equal, route(layer, variables), plain)
    trained = layer.clone(train=True)
    run = jax.jit(lambda key: trained.apply(variables, X, rngs={"random": key}))
    first, again, other = (run(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.probs, again.probs)
    assert np.all(np.any(first.probs != other.probs, axis=-1))
    with pytest.raises(InvalidRngError):
        trained.apply(variables, X)


def test_noise_has_the_learned_standard_deviation():
    # softplus(x·noise_w) is softplus(0) = ln 2 for one expert and nearly 0 for the other.
    layer = TopKRouter(
        input_dims=1, num_experts=2, num_experts_per_token=1, use_noise=True, train=True
    )
    variables = {"params": {"w": jnp.zeros((1, 2)), "noise_w": jnp.array([[0.0, -30.0]])}}
    x = jnp.ones((20_000, 1))
    routing = route(layer, variables, x, rngs={"random": jax.random.key(0)})
    noise = np.log(routing.probs[:, 0] / routing.probs[:, 1])
    assert abs(np.std(noise) - np.log(2.0)) < 0.01 and abs(np.mean(noise)) < 0.02
    np.testing.assert_array_equal(routing.logits, 0.0)


def test_jitter_scales_inputs_within_its_bounds():
    layer = TopKRouter(
        input_dims=1, num_experts=2, num_experts_per_token=1, jitter=0.25, train=True
    )
    variables = {"params": {"w": jnp.array([[1.0, 0.0]])}}
    logits = route(layer, variables, np.ones((5000, 1)), rngs={"random": jax.random.key(0)}).logits
    assert 0.75 <= logits[:, 0].min() < 0.76 and 1.24 < logits[:, 0].max() <= 1.25


def test_score_bias_decreases_for_overloaded_experts():
    layer, variables = make(
        num_experts_per_token=1, use_score_bias=True, score_bias_rate=0.125, train=True
    )
    variables[NON_TRAINABLE]["score_bias"] = np.zeros(EXPERTS, np.float32)
    routing, updates = route(layer, variables, mutable=[NON_TRAINABLE])
    load = np.bincount(np.asarray(routing.experts).ravel(), minlength=EXPERTS)
    expected = 0.125 * np.sign(TOKENS / EXPERTS - load)
    np.testing.assert_array_equal(updates[NON_TRAINABLE]["score_bias"], expected)
    assert len(set(expected)) > 1
    _, updates = route(layer.clone(train=False), variables, mutable=[NON_TRAINABLE])
    np.testing.assert_array_equal(updates[NON_TRAINABLE]["score_bias"], 0.0)


def test_gradients_reach_the_router_through_the_weights():
    layer, variables = make(use_score_bias=True, train=True, use_noise=True)
    probe = np.random.default_rng(2).normal(size=(*X.shape[:2], 2))

    def loss(params):
        variables_ = {**variables, "params": params}
        routing = layer.apply(variables_, X, rngs={"random": jax.random.key(5)})
        return jnp.sum(routing.weights * probe)

    gradients = jax.jit(jax.grad(loss))(variables["params"])
    assert all(np.abs(g).max() > 1e-3 for g in jax.tree.leaves(gradients))
