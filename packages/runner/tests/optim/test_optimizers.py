"""Optimizers equal formulas in NumPy or penalties in the loss; bfloat16 states keep averages."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base.weights import WeightBox
from layerkit.config import Partial
from layerkit.errors import ConfigError
from layerkit_runner.optim.adamw_variants import (
    ademamix,
    cautious,
    mars,
    schedule_free_adamw,
    sophia,
)
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.matrix.muon import muon
from layerkit_runner.optim.optimizer_updates import round_stochastically
from layerkit_runner.optim.optimizers import (
    adam_with_update_cap,
    bfloat16_state,
    elastic_weight_consolidation,
    lp_regularized,
)
from layerkit_runner.optim.weight_selection import declared


def numpy_adam(params, grads_by_step, *, rate, b1, b2, eps, weight_decay, cap):
    """Kingma and Ba's algorithm 1 per tensor, each update scaled to a root mean square of `cap`."""
    params = {name: value.astype(np.float64) for name, value in params.items()}
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    for step, grads in enumerate(grads_by_step, start=1):
        for name, grad in grads.items():
            first[name] = b1 * first[name] + (1 - b1) * grad
            second[name] = b2 * second[name] + (1 - b2) * grad**2
            mean, square = first[name] / (1 - b1**step), second[name] / (1 - b2**step)
            update = mean / (np.sqrt(square) + eps)
            if cap is not None:
                update = update / max(1.0, np.sqrt(np.mean(update**2)) / cap)
            params[name] = params[name] - rate * (update + weight_decay * params[name])
    return params


@pytest.mark.parametrize("cap", [None, 1.0, 0.3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_update_equals_numpy(cap: float | None, weight_decay: float):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3), "b": (3,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    # After many small gradients a large one makes an update whose RMS passes 1.
    grads = [
        {name: (size * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}
        for size in [*([0.01] * 40), 10.0, 10.0]
    ]
    settings = {"b1": 0.5, "b2": 0.99, "eps": 1e-6, "weight_decay": weight_decay}
    optimizer = adam_with_update_cap(0.05, update_rms_cap=cap, **settings)
    ours, state = params, optimizer.init(params)
    for step_grads in grads:
        updates, state = optimizer.update(step_grads, state, ours)
        ours = optax.apply_updates(ours, updates)
    references = {c: numpy_adam(params, grads, rate=0.05, cap=c, **settings) for c in (cap, None)}
    for name, value in ours.items():
        np.testing.assert_allclose(value, references[cap][name], rtol=2e-5, atol=2e-6)
        is_capped = np.max(np.abs(references[cap][name] - references[None][name])) > 1e-3
        assert is_capped == (cap is not None)


def test_schedule_counts_steps_from_zero():
    optimizer = adam_with_update_cap(lambda step: 0.1 * step, update_rms_cap=None)
    params = {"w": np.ones(2, np.float32)}
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params)
    np.testing.assert_array_equal(updates["w"], 0.0)
    updates, state = optimizer.update(params, state, params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-4)


@pytest.mark.parametrize("mask", [None, {"w": True, "b": False}], ids=["all", "matrices"])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_lp_regularizer_equals_a_penalty_in_the_loss(norm: str, mask: Any):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3), "b": (3,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    grads = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    adam = partial(optax.adam, b1=0.5)
    fields: dict[str, Any] = {f"{norm}_regularizer_weight": 0.1, "mask": mask}

    def loss(params: Any) -> jax.Array:
        total = sum(jnp.sum(grads[name] * params[name]) for name in params)
        for name, w in params.items():
            if mask is None or name == "w":
                total += 0.1 * jnp.sum(jnp.abs(w) if norm == "l1" else 0.5 * jnp.square(w))
        return total

    ours, expected = params, params
    optimizer, plain = lp_regularized(0.05, optimizer=adam, **fields), adam(0.05)
    state, plain_state = optimizer.init(params), plain.init(params)
    for _ in range(3):
        updates, state = optimizer.update(grads, state, ours)
        ours = optax.apply_updates(ours, updates)
        updates, plain_state = plain.update(jax.grad(loss)(expected), plain_state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, expected)


PARAMS = {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}


def test_stochastic_rounding_has_the_float32_number_as_expected_value():
    # 1 + 2**-8 lies in the middle of two bfloat16 numbers, the others nearer to one of them.
    for value in (1 + 2**-8, 1 + 2**-10, -3.0001, 1e-20):
        x = jnp.full(200_000, value, jnp.float32)
        rounded = np.asarray(round_stochastically(x, jax.random.key(1)), np.float64)
        assert len(np.unique(rounded)) == 2
        spread = rounded.std() / np.sqrt(x.size)
        assert abs(rounded.mean() - float(x[0])) < 4 * spread


def test_stochastic_rounding_keeps_representable_numbers_and_infinities():
    values = jnp.array([0.0, -0.0, 1.5, -(2.0**100), jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    for seed in range(5):
        rounded = round_stochastically(values, jax.random.key(seed))
        np.testing.assert_array_equal(rounded.astype(jnp.float32), values)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_second_moment_in_bfloat16_reaches_its_mean_where_nearest_rounding_stops(dtype):
    # Increments are a thousandth of the moment, bfloat16 numbers a 256th apart.
    optimizer = bfloat16_state(1e-3, optimizer=partial(optax.adam, b2=0.999))
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    grads = jax.tree.map(jnp.ones_like, params)

    def update(_: Any, carried: Any) -> Any:
        state, nearest = carried
        updates, state = optimizer.update(grads, state, params)
        assert all(x.dtype == dtype for x in jax.tree.leaves(updates))
        return state, (0.999 * nearest.astype(jnp.float32) + 0.001).astype(jnp.bfloat16)

    first = optimizer.init(params), jnp.zeros((), jnp.bfloat16)
    state, nearest = jax.jit(lambda: jax.lax.fori_loop(0, 1000, update, first))()
    moment = np.asarray(state.inner[0].nu["w"], np.float64)
    assert moment.mean() == pytest.approx(1 - 0.999**1000, rel=0.01)
    assert float(nearest) < 0.5


def test_bfloat16_state_is_half_as_large_and_its_updates_are_near_those_of_float32():
    half = bfloat16_state(1e-2, optimizer=partial(optax.adam, b2=0.95))
    full = optax.adam(1e-2, b2=0.95)
    states = [half.init(PARAMS), full.init(PARAMS)]
    updates = [jax.jit(half.update), jax.jit(full.update)]
    for step in range(20):
        key = jax.random.fold_in(jax.random.key(2), step)
        grads = jax.tree.map(lambda x: 1 + jax.random.normal(key, x.shape), PARAMS)  # noqa: B023
        (ours, states[0]), (theirs, states[1]) = (
            update(grads, state, PARAMS) for update, state in zip(updates, states, strict=True)
        )
    for ours_leaf, leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        # An update is at most about the learning rate.
        np.testing.assert_allclose(ours_leaf, leaf, atol=3e-4)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim) for state in states]
    assert sizes[0] == sizes[1] / 2


@pytest.mark.parametrize(
    ("inner", "state"),
    [
        (optax.contrib.schedule_free_adamw, "ScheduleFreeState"),
        (
            partial(elastic_weight_consolidation, optimizer=optax.adam, ewc_regularizer_weight=0.1),
            "ElasticWeightsState",
        ),
    ],
)
def test_bfloat16_state_of_an_optimizer_that_keeps_weights_is_an_error(raises, inner, state):
    optimizer = bfloat16_state(1e-3, optimizer=inner)
    with raises(ConfigError, field="optimizer", value=state):
        optimizer.init(PARAMS)


@pytest.mark.parametrize(
    "wrapper",
    [cautious, partial(elastic_weight_consolidation, ewc_regularizer_weight=0.1)],
    ids=["cautious", "elastic"],
)
def test_schedule_free_optimizer_whose_updates_are_changed_is_an_error(raises, wrapper: Any):
    optimizer = wrapper(1e-3, optimizer=optax.contrib.schedule_free_adamw)
    with raises(ConfigError, field="optimizer", value="schedule-free"):
        optimizer.init(PARAMS)


def test_sophia_leaves_out_entries_of_the_hessian_that_are_not_finite():
    params = {"w": jnp.ones(3)}
    optimizer = sophia(0.1, weight_decay=0.0)
    state = optimizer.init(params)
    for _ in range(2):
        hvp = partial(jax.tree.map, lambda x: x * jnp.array([jnp.nan, jnp.inf, 2.0]))
        updates, state = optimizer.update({"w": jnp.ones(3)}, state, params, hvp=hvp)
        assert np.isfinite(updates["w"]).all()
        # Without curvature, an update is limited to the rate.
        np.testing.assert_allclose(updates["w"][:2], -0.1, rtol=1e-6)


@pytest.mark.parametrize("inner", [optax.adam, muon, sophia])
def test_cautious_treats_layers_of_a_stack_alone(inner: Any):
    """Also around optimizers that take whole stacks."""
    optimizer = Partial(cautious, optimizer=Partial(inner), weight_decay=0.1)
    learner = Learner.HParams.config(optimizer=optimizer, learning_rate=0.1).Instantiate()
    weights, *gradients = np.random.default_rng(0).normal(size=(4, 3, 4, 6)).astype(np.float32)
    box = WeightBox(None, ("embed", "mlp"), is_factor=True, fans=(4, 6), fan_in_dims=(-2,))

    def trained(weight: Any, gradients: Any, stack: tuple[int, ...]) -> Any:
        axes = (*("layers" for _ in stack), "embed", "mlp")
        stacks, params = {("w",): stack} if stack else {}, {"w": weight}
        with declared({("w",): box.replace(axes=axes, fan_out_dims=(-1,))}):
            state = learner.init(params, stacks=stacks)
            update = jax.jit(
                partial(learner.update, stacks=stacks, hvp=partial(jax.tree.map, jnp.copy))
            )
            for step, grad in enumerate(gradients):
                result = update({"w": grad}, state, params, step=step)
                params, state = result.params, result.opt_state
        return params["w"]

    layers = [trained(w, [grad[n] for grad in gradients], ()) for n, w in enumerate(weights)]
    np.testing.assert_allclose(trained(weights, gradients, (3,)), layers, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "field", "value"),
    [
        (partial(ademamix, num_steps=10), "b1", 1.0),
        (partial(ademamix, num_steps=10), "b2", 1.0),
        (partial(ademamix, num_steps=10), "b3", 1.0),
        (partial(ademamix, num_steps=10), "alpha", -1.0),
        (mars, "eps", -1.0),
        (schedule_free_adamw, "b1", 0.0),
        (schedule_free_adamw, "b2", 1.0),
        (sophia, "update_interval", 0),
        (partial(cautious, optimizer=optax.adam), "weight_decay", -0.1),
    ],
)
def test_numbers_out_of_range_raise(raises, optimizer: Any, field: str, value: float):
    with raises(ConfigError, field=field, value=value):
        optimizer(1e-3, **{field: value})
