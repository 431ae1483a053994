"""An optimizer's state in bfloat16 is half as large and keeps the averages of float32."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.errors import ConfigError
from layerkit_runner.optim.bfloat16_state import bfloat16_state, round_stochastically
from layerkit_runner.optim.optimizer_calls import Reach, check_usable, reach_of

PARAMS = {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}


def test_expected_value_is_the_float32_number():
    # 1 + 2**-8 lies in the middle of two bfloat16 numbers, the others nearer to one of them.
    for value in (1 + 2**-8, 1 + 2**-10, -3.0001, 1e-20):
        x = jnp.full(200_000, value, jnp.float32)
        rounded = np.asarray(round_stochastically(x, jax.random.key(1)), np.float64)
        assert len(np.unique(rounded)) == 2
        spread = rounded.std() / np.sqrt(x.size)
        assert abs(rounded.mean() - float(x[0])) < 4 * spread


def test_representable_numbers_and_infinities_are_unchanged():
    values = jnp.array([0.0, -0.0, 1.5, -(2.0**100), jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    for seed in range(5):
        rounded = round_stochastically(values, jax.random.key(seed))
        np.testing.assert_array_equal(rounded.astype(jnp.float32), values)


def test_second_moment_reaches_its_mean_where_nearest_rounding_stops():
    # Increments are a thousandth of the moment, bfloat16 numbers a 256th apart.
    optimizer = bfloat16_state(1e-3, optimizer=partial(optax.adam, b2=0.999))
    state, update = optimizer.init(PARAMS), jax.jit(optimizer.update)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    nearest = jnp.zeros((), jnp.bfloat16)
    for _ in range(1000):
        _, state = update(grads, state, PARAMS)
        nearest = (0.999 * nearest.astype(jnp.float32) + 0.001).astype(jnp.bfloat16)
    moment = np.asarray(state.inner[0].nu["w"], np.float64)
    assert moment.mean() == pytest.approx(1 - 0.999**1000, rel=0.01)
    assert float(nearest) < 0.5


def test_updates_are_near_those_of_float32_and_the_state_is_half_as_large():
    half = bfloat16_state(1e-2, optimizer=partial(optax.adam, b2=0.95))
    full = optax.adam(1e-2, b2=0.95)
    states = [half.init(PARAMS), full.init(PARAMS)]
    for step in range(20):
        key = jax.random.fold_in(jax.random.key(2), step)
        grads = jax.tree.map(lambda x: 1 + jax.random.normal(key, x.shape), PARAMS)  # noqa: B023
        (ours, states[0]), (theirs, states[1]) = (
            optimizer.update(grads, state, PARAMS)
            for optimizer, state in zip((half, full), states, strict=True)
        )
    for ours_leaf, leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        # An update is at most about the learning rate.
        np.testing.assert_allclose(ours_leaf, leaf, atol=3e-4)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim) for state in states]
    assert sizes[0] == sizes[1] / 2


def test_learner_treats_it_as_the_optimizer_inside():
    for inner, reach in ((optax.adam, Reach.ENTRY), (optax.lamb, Reach.TENSOR)):
        optimizer = bfloat16_state(1e-3, optimizer=partial(inner))
        check_usable(optimizer, PARAMS, owner="test")
        assert reach_of(optimizer, PARAMS) is reach


def test_schedule_free_optimizer_is_an_error(raises):
    optimizer = bfloat16_state(1e-3, optimizer=partial(optax.contrib.schedule_free_adamw))
    with raises(ConfigError, field="optimizer", value="ScheduleFreeState"):
        optimizer.init(PARAMS)
