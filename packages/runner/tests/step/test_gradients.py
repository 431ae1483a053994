"""Gradient accumulation against the whole batch, on the Regression of conftest.py."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit_runner.errors import UsageError
from layerkit_runner.step.gradients import split_rows
from layerkit_runner.step.metrics import GLOBAL_BATCH


def unequal_rows(count: int = 8) -> NestedMap:
    """Rows of unequal weights; every fourth from row 1 on has none."""
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.1, 3.0, size=count)
    weights[1::4] = 0.0
    batch = NestedMap(x=rng.normal(size=(count, 2)), y=rng.normal(size=count), weights=weights)
    return batch.transform(np.float32)


def step(tiny: SimpleNamespace, microbatches: int, batch: NestedMap, **fields: Any) -> Any:
    train = {"gradient_accumulation_steps": microbatches, **fields.pop("train", {})}
    task = tiny.task_config(train=train, **fields).Instantiate()
    state = task.init_state(jax.random.key(0))
    return jax.jit(lambda s, b: task.train_step(s, b, GLOBAL_BATCH))(state, batch)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_accumulated_step_equals_that_of_the_whole_batch(tiny: SimpleNamespace, microbatches: int):
    """With four, one microbatch has no weight at all; clipping sees the sum."""
    fields = {"aux": 0.5, "learner": {"clip_global_norm": 0.7}}
    whole, (metrics, scalars) = step(tiny, 1, unequal_rows(), **fields)
    state, (result, result_scalars) = step(tiny, microbatches, unequal_rows(), **fields)
    assert float(scalars["learning/raw_grad_norm"]) > 1.0
    assert scalars.keys() == result_scalars.keys()
    for a, b in ((state, whole), (result, metrics), (result_scalars, scalars)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), a, b)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_batch_of_weight_zero_changes_no_weights(tiny: SimpleNamespace, microbatches: int):
    batch = unequal_rows()
    batch.weights = np.zeros(8, np.float32)
    state, (metrics, _) = step(tiny, microbatches, batch)
    np.testing.assert_array_equal(state.params["linear"]["w"], np.ones((2, 1)))
    assert (float(metrics["loss"].value), float(metrics["loss"].weight)) == (0.0, 0.0)


def test_microbatches_take_every_nth_row():
    batch = {"x": np.arange(12).reshape(6, 2), "y": np.arange(6)}
    parts = split_rows(jax.tree.map(jnp.asarray, batch), 3)
    np.testing.assert_array_equal(parts["y"], [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(parts["x"][1], [[2, 3], [8, 9]])


def test_rows_that_cannot_be_divided_are_an_error(tiny: SimpleNamespace, raises):
    with raises(UsageError, field="task.train.gradient_accumulation_steps", value=3):
        step(tiny, 3, unequal_rows())
    with raises(UsageError, field="task.train.gradient_accumulation_steps", value=4):
        split_rows(unequal_rows(), 4, multiple=4)


def test_non_trainables_are_passed_between_microbatches(
    tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
):
    class Halving(tiny.Regression):
        """Its counter takes the mean of what it has and what it sees."""

        def compute_predictions(self, batch: Any) -> jax.Array:
            old = self.counter.get_var("sum")
            self.counter.update_var("sum", 0.5 * old + 0.5 * batch.x[0, 0])
            return self.linear(batch.x)[:, 0]

    config = tiny.task_config(train={"gradient_accumulation_steps": 4})
    task = config.set(model=Halving.HParams.config(counts=True)).Instantiate()
    batch = unequal_rows(4)
    batch.x[:, 0] = [1, 2, 3, 4]
    with caplog.at_level(logging.INFO, "layerkit"):
        state, _ = task.train_step(task.init_state(jax.random.key(0)), batch, GLOBAL_BATCH)
    assert "each microbatch uses and adds its own: counter/sum" in caplog.text
    # 0.5, 1.25, 2.125 and then this.
    assert float(state.non_trainable["counter"]["sum"]) == 3.0625


def test_microbatches_have_different_random_keys(tiny: SimpleNamespace):
    class Noise(tiny.Regression):
        """The gradient by w is the mean of a number drawn per microbatch."""

        def compute_loss(self, predictions: jax.Array, batch: Any) -> Any:
            drawn = jax.random.uniform(self.next_prng_key())
            self.add_summary("drawn", drawn)
            return super().compute_loss(predictions, batch)

    config = tiny.task_config().set(model=Noise.HParams.config())
    drawn = {}
    for microbatches in (1, 2, 4):
        config.train.gradient_accumulation_steps = microbatches
        task = config.Instantiate()
        state = task.init_state(jax.random.key(0))
        step_fn = jax.jit(lambda s, b, task=task: task.train_step(s, b, GLOBAL_BATCH))
        _, (_, scalars) = step_fn(state, unequal_rows())
        drawn[microbatches] = float(scalars["summaries/drawn"])
    assert len(set(drawn.values())) == 3


def test_weights_of_microbatches_need_no_forward_pass(tiny: SimpleNamespace):
    """The sum of weights that comes first leaves no product of the network in the program."""
    config = tiny.task_config(dims=16, dropout_rate=0.5, train={"gradient_accumulation_steps": 2})
    task = config.Instantiate()
    state = jax.eval_shape(task.init_state, jax.random.key(0))
    batch = NestedMap(x=np.zeros((8, 16)), y=np.zeros(8), weights=np.zeros(8))
    batch = batch.transform(np.float32)
    step_fn = jax.jit(lambda s, b: task.train_step(s, b, GLOBAL_BATCH))
    text = step_fn.lower(state, batch).compile().as_text()
    # Forward, and towards the weights; the inputs need no gradient.
    assert text.count(" dot(") == 2
