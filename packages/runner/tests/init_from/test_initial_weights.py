"""Initial weights from a custom loader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.config import Configurable, Partial
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from import plan_first_state
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.step.task import SingleTask


class Loader(Configurable):
    """A loader that returns `make(like)` and records its request."""

    make: Any = None

    def load(self, model: Any, like: Any) -> Any:
        self.asked = like
        return self.make(like)


def sevens(like: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(jnp.full(leaf.shape, 7.0), leaf.sharding), like)


def of_another_model(like: Any) -> Any:
    """Return a weight of another shape, and one that the model lacks."""
    return {"linear": {"w": jnp.ones((5, 1))}, "other": {"w": jnp.ones(3, jnp.bfloat16)}}


def broken(like: Any) -> Any:
    raise FileNotFoundError("no such folder: /nowhere")


def started(partitioner: Any, tiny: SimpleNamespace, make: Any, **task: Any) -> SingleTask:
    config = tiny.task_config(**task)
    config.initial_weights = Loader.HParams.config(make=make)
    built: SingleTask = config.Instantiate()
    partitioner.start()
    partitioner.bind(built)
    return built


@pytest.mark.parametrize("make", [SpmdPartitioner, PmapPartitioner], ids=["spmd", "pmap"])
def test_loaded_weights_are_placed_by_the_partitioner(tiny: SimpleNamespace, make: Any):
    partitioner = make()
    task = started(partitioner, tiny, sevens)
    state = plan_first_state(partitioner, task)().state
    np.testing.assert_array_equal(state.params["linear"]["w"], np.full((2, 1), 7.0))
    abstract = partitioner.abstract_state(task)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, abstract)
    assert task.initial_weights.asked == abstract.params


def test_optimizer_is_initialized_from_loaded_weights(tiny: SimpleNamespace):
    # Lookahead keeps a copy of the weights in its state.
    learner = {"optimizer": Partial(optax.contrib.schedule_free_sgd), "learning_rate": 0.1}
    partitioner = SpmdPartitioner()
    task = started(partitioner, tiny, sevens, learner=learner)
    state = plan_first_state(partitioner, task)().state
    np.testing.assert_array_equal(state.opt_state.z["linear"]["w"], np.full((2, 1), 7.0))


def test_weights_that_the_loader_lacks_are_drawn(tiny: SimpleNamespace):
    partitioner = SpmdPartitioner()
    task = started(partitioner, tiny, lambda like: {}, init_scale=3.0)
    state = plan_first_state(partitioner, task)().state
    np.testing.assert_array_equal(state.params["linear"]["w"], np.full((2, 1), 3.0))


@pytest.mark.parametrize("make", [broken, of_another_model])
def test_error_of_the_loader_and_weights_of_another_model_are_usage_errors(
    tiny: SimpleNamespace, raises, make: Any
):
    partitioner = SpmdPartitioner()
    task = started(partitioner, tiny, make)
    with raises(UsageError, owner="task.initial_weights"):
        plan_first_state(partitioner, task)()
