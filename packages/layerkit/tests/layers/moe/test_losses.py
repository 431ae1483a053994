"""Load-balancing losses and loads: limits, formulas and padding."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from layerkit.layers.moe import losses
from layerkit.layers.moe.routing import Routing

EXPERTS = 4
load_balance_loss = jax.jit(losses.load_balance_loss, static_argnames="over_all_choices")
router_z_loss = jax.jit(losses.router_z_loss)
expert_load = jax.jit(losses.expert_load)


def routing_of(experts, probs, is_token=None):
    experts, probs = np.asarray(experts, np.int32), np.asarray(probs, np.float32)
    weights = np.ones(experts.shape, np.float32)
    return Routing(experts, weights, np.log(probs + 1e-9), probs, is_token)


def drawn(seed=0, tokens=64):
    logits = np.random.default_rng(seed).normal(size=(2, tokens // 2, EXPERTS))
    probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    experts = np.argsort(-probs, axis=-1)[..., :2]
    return routing_of(experts, probs).replace(logits=logits.astype(np.float32))


@pytest.mark.parametrize("over_all_choices", [False, True])
def test_load_balance_loss_of_a_balanced_router_is_1(over_all_choices):
    experts = [[i % EXPERTS, (i + 1) % EXPERTS] for i in range(8)]
    routing = routing_of(experts, np.full((8, EXPERTS), 1 / EXPERTS))
    loss = load_balance_loss(routing, over_all_choices=over_all_choices)
    np.testing.assert_allclose(loss, 1.0, rtol=1e-6)


def test_load_balance_loss_of_a_collapsed_router_is_num_experts():
    sure = np.tile(np.eye(EXPERTS)[2], (8, 1))
    np.testing.assert_allclose(load_balance_loss(routing_of([[2]] * 8, sure)), EXPERTS, rtol=1e-6)
    # By first choices also where there is a second; over all of them, the second takes its half.
    pair = routing_of([[2, 0]] * 8, sure)
    np.testing.assert_allclose(load_balance_loss(pair), EXPERTS, rtol=1e-6)
    np.testing.assert_allclose(
        load_balance_loss(pair, over_all_choices=True), EXPERTS / 2, rtol=1e-6
    )


def test_losses_equal_their_formulas():
    routing = drawn()
    probs = np.asarray(routing.probs).reshape(-1, EXPERTS)
    first = np.bincount(probs.argmax(axis=1), minlength=EXPERTS) / len(probs)
    expected = EXPERTS * np.sum(first * probs.mean(axis=0))
    np.testing.assert_allclose(load_balance_loss(routing), expected, rtol=1e-5)
    logits = np.asarray(routing.logits, np.float64).reshape(-1, EXPERTS)
    squares = np.log(np.exp(logits).sum(axis=1)) ** 2
    np.testing.assert_allclose(router_z_loss(routing), squares.mean(), rtol=1e-5)
    counts = np.bincount(np.asarray(routing.experts).ravel(), minlength=EXPERTS)
    np.testing.assert_allclose(expert_load(routing), counts / counts.mean(), rtol=1e-5)


def test_padding_has_no_effect_on_losses():
    routing = drawn()
    is_token = np.arange(32) < np.array([[20], [7]])
    poisoned = Routing(
        np.where(is_token[..., None], routing.experts, EXPERTS),
        routing.weights,
        np.where(is_token[..., None], routing.logits, np.float32(1e9)),
        np.where(is_token[..., None], routing.probs, np.float32(np.nan)),
        is_token,
    )
    kept = (routing.experts, routing.weights, routing.logits, routing.probs)
    alone = Routing(*(leaf[is_token] for leaf in kept))
    for statistic in (load_balance_loss, router_z_loss, expert_load):
        np.testing.assert_allclose(statistic(poisoned), statistic(alone), rtol=1e-5)
    nothing = poisoned.replace(is_token=np.zeros_like(is_token))
    assert load_balance_loss(nothing) == 0.0 and router_z_loss(nothing) == 0.0


def test_load_balance_gradients_reduce_overloaded_probabilities():
    routing = drawn()
    loss = lambda probs: load_balance_loss(routing.replace(probs=probs))  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(routing.probs)
    per_expert = np.asarray(gradient).reshape(-1, EXPERTS).sum(axis=0)
    first = np.bincount(np.asarray(routing.experts)[..., 0].ravel(), minlength=EXPERTS)
    np.testing.assert_allclose(per_expert, EXPERTS * first / first.sum(), rtol=1e-5)
