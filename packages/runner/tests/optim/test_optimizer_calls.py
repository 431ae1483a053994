"""Optimizers that need the loss, those that are refused, and the weights of schedule-free ones.

The reference is a loop of Optax by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from layerkit.config import Config, Partial
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_runner.optim.config_numbers import set_config_numbers
from layerkit_runner.optim.learner import AuxiliaryOptimizer, Learner
from layerkit_runner.step.metrics import GLOBAL_BATCH

PARAMS = {"a": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": {"w": jnp.array([1.0, -2.0])}}


def loss_of(params: Any) -> jax.Array:
    return jnp.sum(jnp.square(params["a"]["w"] - 1.0)) + jnp.sum(jnp.abs(params["b"]["w"]))


def learner(optimizer: Any, **fields: Any) -> Learner:
    return Learner.HParams.config(optimizer=optimizer, **fields).Instantiate()


def by_learner(ours: Learner, steps: int, *, stacks: Any = None) -> tuple[Any, Any]:
    """(weights, state) after so many steps."""
    params, state = PARAMS, ours.init(PARAMS, stacks=stacks)
    for step in range(steps):
        loss, grads = jax.value_and_grad(loss_of)(params)
        update = ours.update(grads, state, params, step=jnp.int32(step), loss=loss, stacks=stacks)
        params, state = update.params, update.opt_state
    return params, state


def by_hand(optimizer: Any, steps: int, *, needs_value: bool = True) -> tuple[Any, Any]:
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
        loss, grads = jax.value_and_grad(loss_of)(params)
        extra = {"value": loss} if needs_value else {}
        updates, state = optimizer.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_equal(result: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.polyak_sgd(max_learning_rate=0.1),
        lambda: contrib.momo(0.1),
        lambda: contrib.momo_adam(0.05),
        lambda: optax.chain(optax.sgd(0.3), contrib.reduce_on_plateau(patience=1, rtol=0.5)),
    ],
    ids=["polyak", "momo", "momo_adam", "reduce_on_plateau"],
)
def test_optimizer_that_needs_the_loss_trains_as_by_hand(make: Callable[[], Any]):
    result = by_learner(learner(make()), 6)
    assert_equal(result, by_hand(make(), 6))
    with pytest.raises(AssertionError):
        assert_equal(result[0], PARAMS)


def test_gradient_for_the_optimizer_is_that_before_clipping():
    seen: dict[str, Any] = {}

    def update(grads: Any, state: Any, params: Any, *, grad: Any, **extra: Any) -> Any:
        seen.update(grads=grads, grad=grad, **extra)
        return jax.tree.map(jnp.zeros_like, params), state

    ours = learner(
        optax.GradientTransformationExtraArgs(lambda params: (), update), clip_global_norm=0.1
    )
    state = ours.init(PARAMS)
    grads = jax.grad(loss_of)(PARAMS)
    ours.update(grads, state, PARAMS, step=jnp.int32(0), loss=jnp.float32(2.5))
    assert_equal(seen["grad"], grads)
    assert float(optax.tree.norm(seen["grads"])) == pytest.approx(0.1)
    assert float(seen["value"]) == 2.5


def test_loss_for_the_optimizer_is_that_of_the_batch(tiny: SimpleNamespace):
    batch = NestedMap(x=np.eye(2), y=np.array([3.0, 1.0]), weights=np.ones(2)).transform(np.float32)
    polyak = optax.polyak_sgd(max_learning_rate=10.0)
    config = tiny.task_config(learner={"optimizer": polyak, "learning_rate": None})
    task = config.Instantiate()
    state = task.init_state(jax.random.key(0))
    after, _ = task.train_step(state, batch, GLOBAL_BATCH)

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean(0.5 * jnp.square(batch.x @ w[:, 0] - batch.y))

    before = state.params["linear"]["w"]
    value, grad = jax.value_and_grad(loss)(before)
    updates, _ = polyak.update(grad, polyak.init(before), before, value=value)
    np.testing.assert_allclose(after.params["linear"]["w"], before + updates, rtol=1e-6)
    assert not np.allclose(updates, 0.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.lbfgs(0.1),
        lambda: optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5)),
        lambda: contrib.sophia(0.1),
        lambda: contrib.muon(0.1),
        lambda: optax.chain(optax.clip(1.0), contrib.scale_by_muon()),
        lambda: optax.masked(contrib.schedule_free_sgd(0.1), {"a": {"w": True}, "b": {"w": False}}),
        lambda: optax.GradientTransformation(
            lambda params: jnp.zeros((), jnp.int32), lambda g, s, p=None: (g, s + 0.5)
        ),
    ],
    ids=["lbfgs", "linesearch", "sophia", "muon", "muon in a chain", "masked", "changing state"],
)
def test_unusable_optimizer_is_an_error(raises, make: Callable[[], Any]):
    with raises(ConfigError, owner="Learner.optimizer"):
        jax.eval_shape(Learner.HParams.config(optimizer=make()).Instantiate().init, PARAMS)


def test_updates_of_wider_dtype_than_the_weights_are_accepted():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    optimizer = optax.adamw(0.1, mu_dtype=jnp.float32)
    grads = jax.tree.map(jnp.ones_like, params)
    update = jax.jit(learner(optimizer).update)
    result = update(grads, learner(optimizer).init(params), params, step=jnp.int32(0))
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
    assert_equal(result.params, optax.apply_updates(params, updates))


def test_sam_gets_no_arguments_that_it_does_not_take():
    make = Config(
        contrib.sam, Config(optax.sgd, 0.01), Config(optax.sgd, 0.1), sync_period=2
    ).Instantiate
    assert_equal(by_learner(learner(make()), 4), by_hand(make(), 4, needs_value=False))


def schedule_free() -> Any:
    return contrib.schedule_free_adamw(0.1, warmup_steps=2, b1=0.8)


def test_schedule_free_weights_are_evaluated_at_its_averages():
    params, state = by_learner(learner(schedule_free()), 5)
    expected_params, expected_state = by_hand(schedule_free(), 5)
    assert_equal(params, expected_params)
    result = learner(schedule_free()).evaluated(params, state)
    assert_equal(result, contrib.schedule_free_eval_params(expected_state, expected_params))
    assert not any(jax.tree.leaves(jax.tree.map(np.allclose, result, params)))


def test_schedule_free_within_a_chain_and_beside_another_optimizer():
    """The auxiliary optimizer is schedule-free, within a chain; the main one is not."""

    def chain() -> Any:
        return optax.chain(optax.clip(1.0), contrib.schedule_free_sgd(0.2))

    auxiliary = AuxiliaryOptimizer.HParams.config(name="own", weights=("a/w",), optimizer=chain())
    ours = learner(Partial(optax.sgd), learning_rate=0.1, auxiliary_optimizers=[auxiliary])
    params, state = by_learner(ours, 4)
    result = ours.evaluated(params, state)
    assert_equal(result["b"], params["b"])
    own, own_state = {"a": PARAMS["a"]}, chain().init({"a": PARAMS["a"]})
    for _ in range(4):
        grads = jax.grad(lambda own: loss_of({**PARAMS, **own}))(own)
        updates, own_state = chain().update(grads, own_state, own)
        own = optax.apply_updates(own, updates)
    assert_equal(result["a"], contrib.schedule_free_eval_params(own_state[1], own)["a"])
    assert not np.allclose(result["a"]["w"], params["a"]["w"])


def test_schedule_free_layers_of_a_stack_have_averages_of_their_own():
    """With per_layer each layer has a state of its own; the averages are those of single layers."""
    stacks = {("a", "w"): (2,)}
    ours = learner(contrib.schedule_free_sgd(0.05), per_layer=True)
    params, state = by_learner(ours, 4, stacks=stacks)
    result = ours.evaluated(params, state, stacks=stacks)
    plain = learner(contrib.schedule_free_sgd(0.05))
    expected = plain.evaluated(*by_learner(plain, 4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, expected)


@pytest.mark.parametrize("stochastic_rounding", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_weights_are_schedule_free_only_in_bfloat16_rounded_at_random(
    raises: Any, dtype: Any, stochastic_rounding: bool
):
    ours = learner(schedule_free(), stochastic_rounding=stochastic_rounding)
    params = {**PARAMS, "b": {"w": PARAMS["b"]["w"].astype(dtype)}}
    if stochastic_rounding and dtype == jnp.bfloat16:
        assert ours.init(params).weight_sum.dtype == jnp.float32
        return
    with raises(ConfigError, owner="Learner.optimizer"):
        ours.init(params)


def test_ema_decay_of_a_schedule_free_optimizer_is_an_error(raises):
    with raises(ConfigError, field="ema_decay", value=0.9):
        learner(schedule_free(), ema_decay=0.9).init(PARAMS)


@pytest.mark.parametrize("stacks", [{}, {("a", "w"): (2,)}], ids=["plain", "stack"])
def test_restored_state_has_the_injected_numbers_of_the_config(stacks: Any):
    def make(rate: float) -> Learner:
        injected = Partial(optax.inject_hyperparams(optax.sgd), momentum=0.5)
        return learner(injected, learning_rate=rate, per_layer=True)

    new = make(0.01)
    params, old = by_learner(make(0.1), 2, stacks=stacks)
    state = set_config_numbers(old, lambda: new.init(PARAMS, stacks=stacks))
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, old)
    loss, grads = jax.value_and_grad(loss_of)(params)
    more = {"step": jnp.int32(2), "loss": loss, "stacks": stacks}
    update = new.update(grads, state, params, **more)
    slower = make(0.1).update(grads, old, params, **more).params
    jax.tree.map(
        lambda after, before, large: np.testing.assert_allclose(
            after - before, (large - before) / 10, rtol=1e-4
        ),
        update.params,
        params,
        slower,
    )


@pytest.mark.parametrize("stacks", [{}, {("a", "w"): (2,)}], ids=["plain", "stack"])
def test_restored_averages_of_another_b1_are_an_error(stacks: Any, raises):
    def make(b1: float) -> Learner:
        optimizer = optax.chain(optax.clip(1.0), contrib.schedule_free_sgd(0.2, b1=b1))
        return learner(optimizer, per_layer=True)

    state = by_learner(make(0.9), 2, stacks=stacks)[1]
    assert_equal(set_config_numbers(state, lambda: make(0.9).init(PARAMS, stacks=stacks)), state)
    with raises(ConfigError, field="b1", value=0.95) as caught:
        set_config_numbers(state, lambda: make(0.95).init(PARAMS, stacks=stacks))
    assert "0.9, as in the checkpoint" in str(caught.value)


def test_task_evaluates_and_decodes_with_schedule_free_averages(tiny: SimpleNamespace):
    batch = NestedMap(x=np.eye(2), y=np.array([3.0, 1.0]), weights=np.ones(2)).transform(np.float32)
    config = tiny.task_config(learner={"optimizer": schedule_free(), "learning_rate": None})
    task = config.Instantiate()
    state = task.init_state(jax.random.key(0))
    for _ in range(4):
        state, _ = task.train_step(state, batch, GLOBAL_BATCH)
    average = contrib.schedule_free_eval_params(state.opt_state, state.params)
    w = np.asarray(average["linear"]["w"])[:, 0]
    assert not np.allclose(w, np.asarray(state.params["linear"]["w"])[:, 0])
    # Evaluation is given what inference needs.
    state = state.for_inference()
    loss = float(task.eval_step(state, batch, GLOBAL_BATCH)[0]["loss"].value)
    assert loss == pytest.approx(np.mean(0.5 * (w - batch.y) ** 2), rel=1e-5)
    assert_equal(task.decoded_variables(state)["params"], average)
    # Other optimizers' states are left out.
    plain = tiny.task_config().Instantiate().init_state(jax.random.key(0))
    assert plain.for_inference().opt_state == ()
