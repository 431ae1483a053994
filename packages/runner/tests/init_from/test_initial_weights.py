"""Weights that a task does not draw: where they come from, where they land, what they change."""

from __future__ import annotations

import re
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
from layerkit_runner.training.task import SingleTask


class Sevens(Configurable):
    """All weights are 7; remembers what it was asked for."""

    def load(self, model: Any, like: Any) -> Any:
        self.asked = like
        return jax.tree.map(
            lambda leaf: jax.device_put(jnp.full(leaf.shape, 7.0), leaf.sharding), like
        )


class Nothing(Configurable):
    """Leaves all weights to be drawn."""

    def load(self, model: Any, like: Any) -> Any:
        return {}


class OfAnotherModel(Configurable):
    """One weight that is too long, and one that nobody has."""

    def load(self, model: Any, like: Any) -> Any:
        return {"linear": {"w": jnp.ones((5, 1))}, "other": {"w": jnp.ones(3, jnp.bfloat16)}}


class Broken(Configurable):
    """A folder that is not there."""

    def load(self, model: Any, like: Any) -> Any:
        raise FileNotFoundError("no such folder: /nowhere")


def started(
    partitioner: Any, tiny: SimpleNamespace, source: type[Configurable], **task: Any
) -> Any:
    config = tiny.task_config(**task)
    config.initial_weights = source.HParams.config()
    built: SingleTask = config.Instantiate()
    partitioner.start()
    partitioner.bind(built)
    return built


@pytest.mark.parametrize("make", [SpmdPartitioner, PmapPartitioner], ids=["spmd", "pmap"])
def test_given_weights_begin_the_run(tiny: SimpleNamespace, make: Any):
    partitioner = make()
    task = started(partitioner, tiny, Sevens)
    state = plan_first_state(partitioner, task)().state
    np.testing.assert_array_equal(state.params["linear"]["w"], np.full((2, 1), 7.0))
    abstract = partitioner.abstract_state(task)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, abstract)
    assert task.initial_weights.asked == abstract.params


def test_the_optimizer_begins_from_them_too(tiny: SimpleNamespace):
    # Lookahead keeps a copy of the weights in its state.
    learner = {"optimizer": Partial(optax.contrib.schedule_free_sgd), "learning_rate": 0.1}
    partitioner = SpmdPartitioner()
    task = started(partitioner, tiny, Sevens, learner=learner)
    state = plan_first_state(partitioner, task)().state
    np.testing.assert_array_equal(state.opt_state.z["linear"]["w"], np.full((2, 1), 7.0))


def test_what_is_not_given_is_drawn(tiny: SimpleNamespace):
    partitioner = SpmdPartitioner()
    task = started(partitioner, tiny, Nothing, init_scale=3.0)
    state = plan_first_state(partitioner, task)().state
    np.testing.assert_array_equal(state.params["linear"]["w"], np.full((2, 1), 3.0))


def test_a_source_that_fails_is_the_users_mistake(tiny: SimpleNamespace):
    partitioner = SpmdPartitioner()
    task = started(partitioner, tiny, Broken)
    expected = "task.initial_weights: no such folder: /nowhere"
    with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
        plan_first_state(partitioner, task)()


def test_weights_of_another_model_are_refused(tiny: SimpleNamespace):
    partitioner = SpmdPartitioner()
    task = started(partitioner, tiny, OfAnotherModel)
    expected = (
        "task.initial_weights: linear/w is float32[5, 1], expected float32[2, 1], other/w is"
        " bfloat16[3], expected no such weight"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
        plan_first_state(partitioner, task)()
