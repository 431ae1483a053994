"""Experts that choose tokens, the cap of the router's logits, and dropout inside experts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import AUX_LOSS
from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit.layers.basic.elementwise import Identity, ReLU
from layerkit.layers.moe.expert_choice import ExpertChoiceFeedForward
from layerkit.layers.moe.routing import ExpertChoiceRouter, TopKRouter
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.transformer.transformer import Transformer

SIZES = {"input_dims": 4, "hidden_dims": 6, "num_experts": 4}
KEY = jax.random.key(0)
X = np.random.default_rng(1).normal(size=(2, 8, 4)).astype(np.float32)


def params_of(weights):
    """Return Praxis' weights of a mixture under the names of this project."""
    params = {"router": {"w": weights["gate"]}, "up": weights["wi_0"], "down": weights["wo_0"]}
    if "wi_gate_0" in weights:
        params["gate"] = weights["wi_gate_0"]
    return {"params": params}


def run(layer, variables, x, **options):
    """Return (output, auxiliary losses)."""
    apply = jax.jit(partial(layer.apply, mutable=[AUX_LOSS]))
    result, updates = apply(variables, x, **options)
    return result, updates.get(AUX_LOSS, {})


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("name", "capacity_factor"), [("expert_choice", 2.0), ("expert_choice_gated", 3.5)]
)
def test_expert_choice_equals_praxis(praxis, name, capacity_factor, train):
    case = praxis(name)
    layer = ExpertChoiceFeedForward(
        **SIZES,
        capacity_factor=capacity_factor,
        num_groups=2,
        use_gate="wi_gate_0" in case["weights"],
        activation_tpl=Config(ReLU),
        train=train,
    )
    result, _ = run(layer, params_of(case["weights"]), case["x"], is_token=case["paddings"] == 0)
    np.testing.assert_allclose(result, case["outputs"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["capped_top2", "capped_top2_without_padding"])
def test_capped_router_and_loss_of_groups_equal_praxis(praxis, name):
    case = praxis(name)
    is_token = case["paddings"] == 0 if "paddings" in case else None
    layer = MoeFeedForward(
        **SIZES,
        router_tpl=Config(TopKRouter, logit_cap=0.5),
        capacity_factor=4.0,
        use_gate=False,
        activation_tpl=Config(ReLU),
        load_balance_weight=1.0,
        balance_per_group=True,
        router_z_weight=0.0,
        train=True,
    )
    result, losses = run(layer, params_of(case["weights"]), case["x"], is_token=is_token)
    np.testing.assert_allclose(result, case["outputs"], rtol=1e-5, atol=1e-6)
    if is_token is None:  # Praxis divides by the size of the group, padding included
        np.testing.assert_allclose(losses["load_balance_loss"][0], case["aux_loss"], rtol=1e-5)


def test_experts_choose_their_most_probable_tokens():
    router = ExpertChoiceRouter(input_dims=2, num_experts=2)
    # The first expert prefers tokens 2 and 0, the second one tokens 1 and 3.
    x = jnp.array([[[1.0, 0.0], [0.0, 3.0], [2.0, 0.0], [0.0, 1.0]]])
    routing = router.apply({"params": {"w": jnp.eye(2)}}, x, capacity=2)
    assert routing.tokens.tolist() == [[[2, 0], [1, 3]]]
    expected = 1.0 / (1.0 + np.exp(-np.array([[[2.0, 1.0], [3.0, 1.0]]])))
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-6)


def test_padding_takes_no_slot_of_a_token():
    layer = ExpertChoiceFeedForward(**SIZES)
    variables = layer.init(KEY)
    is_token = np.arange(8) < np.array([[5], [0]])
    apply = jax.jit(layer.apply)
    result = apply(variables, X, is_token=is_token)
    poisoned = np.where(is_token[..., None], X, np.float32(100.0))
    other = apply(variables, poisoned, is_token=is_token)
    np.testing.assert_array_equal(result, other)
    assert np.all(np.asarray(result)[~is_token] == 0)


def test_expert_choice_balances_without_a_loss():
    layer = ExpertChoiceFeedForward(**SIZES, train=True)
    _, losses = run(layer, layer.init(KEY), X)
    assert set(losses) == {"router_z_loss"}


def test_expert_choice_cannot_decode(raises):
    mixture = Config(ExpertChoiceFeedForward, num_experts=4)
    layer = Transformer(input_dims=4, hidden_dims=6, num_heads=2, feed_forward_tpl=mixture)
    with raises(ConfigError, field="feed_forward_tpl", value="ExpertChoiceFeedForward"):
        layer.apply(layer.init(KEY), 2, 8, method="init_cache", mutable=True)


def test_init_raises_for_a_router_of_tokens(raises):
    layer = ExpertChoiceFeedForward(**SIZES, router_tpl=Config(TopKRouter))
    with raises(ConfigError, field="router_tpl", value="TopKRouter"):
        layer.init(KEY)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(MoeFeedForward, {"num_experts_per_token": 1}), (ExpertChoiceFeedForward, {})],
)
def test_dropout_drops_hidden_activations_of_experts_as_in_praxis(praxis, kind, fields):
    """One expert that computes x: its outputs are 0 or x / (1 - rate)."""
    case = praxis("expert_dropout")
    dims = 64
    layer = kind(
        **fields,
        input_dims=dims,
        hidden_dims=dims,
        num_experts=1,
        capacity_factor=1.0,
        use_gate=False,
        activation_tpl=Config(Identity),
        dropout_rate=0.25,
        train=True,
    )
    one = jnp.eye(dims)[None]
    weights = {"params": {"router": {"w": jnp.zeros((dims, 1))}, "up": one, "down": one}}
    x = jnp.ones((4, 16, dims))
    result, _ = run(layer, weights, x, rngs={"random": KEY})
    result = np.asarray(result)
    np.testing.assert_allclose(np.unique(result), case["values"], rtol=1e-6)
    # 4096 draws: five standard deviations are 0.034.
    for kept in (np.mean(result != 0), case["kept"]):
        assert abs(kept - 0.75) < 0.034
    np.testing.assert_allclose(run(layer.clone(train=False), weights, x)[0], x, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (MoeFeedForward, {}),
        (ExpertChoiceFeedForward, {}),
        (MoeFeedForward, {"gate_limit": 7.0, "up_offset": 1.0}),
    ],
)
def test_backward_pass_keeps_slopes_and_no_float32_inputs(kind, options):
    """Arrays of 32 features are hidden ones: two slopes and the hidden activations."""
    fields = {"input_dims": 16, "hidden_dims": 32, "num_experts": 4, "use_gate": True}
    layer = kind(**fields, **options, fprop_dtype=jnp.bfloat16)
    x = jax.random.normal(KEY, (2, 8, 16), jnp.bfloat16)
    variables = jax.jit(layer.init)(KEY)
    weight_shapes = {leaf.shape for leaf in jax.tree.leaves(variables)}
    saved = jax.jit(lambda *arguments: jax.tree.leaves(jax.vjp(layer.apply, *arguments)[1]))
    # Constants are not kept, such as the zeros that the outputs of expert choice are added to.
    kept = [
        leaf
        for leaf in saved(variables, x)
        if leaf.ndim > 1 and leaf.shape not in weight_shapes and bool(jnp.any(leaf))
    ]
    wide = [leaf for leaf in kept if leaf.shape[-1] == 32]
    assert [leaf.dtype for leaf in wide] == [jnp.bfloat16] * 3
    assert {leaf.dtype for leaf in kept if leaf.shape[-1] == 16} == {jnp.dtype(jnp.bfloat16)}
