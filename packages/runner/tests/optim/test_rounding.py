"""Updates of bfloat16 weights: what is lost, what is reported, and stochastic rounding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from layerkit.config import Partial
from layerkit_runner.optim.learner import Learner, Update

SIZE = 64 * 64
ONES = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(4)}


def updates(params: Any, *, steps: int, first: int = 0, **fields: Any) -> list[Update]:
    """Return the updates of steps with a gradient of 1 in each entry."""
    fields = {"optimizer": Partial(optax.sgd), "learning_rate": 1e-3, **fields}
    learner = Learner.HParams.config(**fields).Instantiate()
    state, result = learner.init(params), []
    run = jax.jit(
        lambda params, state, step: learner.update(ones(params), state, params, step=step)
    )
    for step in range(first, first + steps):
        result.append(run(params, state, jnp.int32(step)))
        params, state = result[-1].params, result[-1].opt_state
    return result


def ones(tree: Any) -> Any:
    return jax.tree.map(jnp.ones_like, tree)


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_applied_norm_is_that_of_the_rounded_weights(*, stochastic: bool):
    old = ONES
    for update in updates(ONES, steps=3, stochastic_rounding=stochastic):
        changes = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), update.params, old)
        norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(changes)))
        np.testing.assert_allclose(update.scalars["learning/applied_grad_norm"], norm, rtol=1e-6)
        # Half the distance between bfloat16 numbers below 1 is 1/512, more than the rate.
        assert np.any(changes["w"]) == stochastic
        old = update.params


def test_stochastic_rounding_keeps_the_mean_of_small_updates():
    last = updates(ONES, steps=100, stochastic_rounding=True)[-1].params
    assert last["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(last["b"], 0.9, rtol=1e-5)
    # A step moves a weight by 1/256 with probability 0.256; deviation of a sum of 100: 0.017.
    mean, deviation = np.mean(np.float64(last["w"])), np.sqrt(100 * 0.256 * 0.744) / 256
    assert abs(mean - 0.9) < 5 * deviation / np.sqrt(SIZE)
    np.testing.assert_allclose(np.std(np.float64(last["w"])), deviation, rtol=0.1)


def test_small_gradients_of_float16_weights_move_them_as_in_float32():
    learner = Learner.HParams.config(optimizer=Partial(optax.adam), learning_rate=1e-2)
    learner, moved = learner.Instantiate(), {}
    for dtype in (jnp.float16, jnp.float32):
        params = {"w": jnp.ones(4, dtype)}
        grads = jax.tree.map(lambda x: 1e-5 * x, params)
        update = learner.update(grads, learner.init(params), params, step=jnp.int32(0))
        moved[dtype] = update.params["w"]
        assert moved[dtype].dtype == dtype
    np.testing.assert_allclose(moved[jnp.float16], moved[jnp.float32], rtol=1e-3)
    assert np.all(moved[jnp.float16] < 0.995)


def test_optimizers_compute_in_float32_and_weights_do_not_depend_on_restart_or_mesh():
    fields = {"optimizer": Partial(optax.adam), "stochastic_rounding": True}
    whole = updates(ONES, steps=4, **fields)
    moments = [x for x in jax.tree.leaves(whole[-1].opt_state) if x.ndim]
    assert {x.dtype for x in moments} == {jnp.dtype("float32")}
    learner = Learner.HParams.config(learning_rate=1e-3, **fields).Instantiate()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    sharded = {"w": sharding, "b": NamedSharding(mesh, PartitionSpec())}
    params = jax.device_put(whole[1].params, sharded)
    state = whole[1].opt_state
    run = jax.jit(
        lambda params, state, step: learner.update(ones(params), state, params, step=step)
    )
    for step in (2, 3):
        update = run(params, state, jnp.int32(step))
        params, state = update.params, update.opt_state
    jax.tree.map(np.testing.assert_array_equal, params, whole[-1].params)
    again = updates(ONES, steps=1, first=1, **fields)[0].params
    assert np.any(np.asarray(again["w"] != whole[0].params["w"]))
