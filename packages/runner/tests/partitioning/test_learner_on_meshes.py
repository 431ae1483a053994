"""Everything a learner does at once, spread over devices and through a checkpoint.

Per-layer clipping and an update cap, another optimizer (factored) for the last layer, averaged
weights, noise, microbatches, and a step that is skipped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Partial, sub_config_field
from layerkit.layers.linears import FeedForward
from layerkit.layers.repeat import Repeat
from layerkit.nested_map import NestedMap
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy
from layerkit_runner.optim.learner import AuxiliaryOptimizer
from layerkit_runner.optim.optimizers import adam_with_update_cap
from layerkit_runner.optim.weight_patterns import VariationalNoise

DIMS, ROWS, BAD_STEP = 16, 16, 2
SHAPES = {"2 x 2 x 2": [2, 2, 2], "pmap": None}


class Residual(FeedForward):
    def fprop(self, x: jax.Array) -> jax.Array:
        return self.constrain(x + super().fprop(x), "batch", "act_embed")


class Doubling(BaseModel):
    """Learns to double its inputs, by two repeated layers and one more."""

    stack_tpl: Any = sub_config_field(
        Repeat.HParams,
        sub_tpl=Residual.HParams.config(input_dims=DIMS, output_dims=DIMS),
        num_repeats=2,
    )
    last_tpl: Any = sub_config_field(FeedForward.HParams, input_dims=DIMS, output_dims=DIMS)

    def setup(self) -> None:
        self.create_child("stack", self.stack_tpl)
        self.create_child("last", self.last_tpl)

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        return self.last(self.stack(batch.x))

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        errors = jnp.mean(jnp.square(predictions - 2.0 * batch.x), axis=-1)
        weight = jnp.sum(batch.weights)
        loss = jnp.sum(errors * batch.weights) / jnp.maximum(weight, 1e-9)
        return {"loss": WeightedScalar.of(loss, weight)}, NestedMap()


def batch_of(step: int) -> NestedMap:
    """Unequal weights, none in the second of two microbatches at step 1; one batch is bad."""
    rng = np.random.default_rng(step)
    weights = rng.uniform(size=ROWS)
    if step == 1:
        weights[1::2] = 0.0
    x = rng.normal(size=(ROWS, DIMS)) * (np.inf if step == BAD_STEP else 1.0)
    return NestedMap(x=x, weights=weights).transform(np.float32)


def started(arrangements: Any, shape: str) -> tuple[Any, Any]:
    last = AuxiliaryOptimizer.HParams.config(
        name="last",
        weights=("last/.*",),
        optimizer=Partial(optax.adafactor, min_dim_size_to_factor=8),
        learning_rate=0.02,
    )
    task = arrangements.sgd_task(
        Doubling.HParams.config(),
        optimizer=Partial(adam_with_update_cap, update_rms_cap=0.5),
        learning_rate=0.05,
        auxiliary_optimizers=[last],
        clip_per_tensor_norm=0.5,
        ema_decay=0.9,
    )
    task.train.gradient_accumulation_steps = 2 if shape != "pmap" else 1
    task.train.eval_use_ema_states = True
    task.vn = VariationalNoise.HParams.config(scale=0.01, weights=("stack/.*/w",)).Instantiate()
    if shape == "one device":
        partitioner = arrangements.one_device()
    else:
        partitioner = arrangements.make_partitioner(SHAPES[shape])
    partitioner.bind(task)
    return task, partitioner


def trained(task: Any, partitioner: Any, state: Any, steps: range) -> tuple[Any, Any]:
    """(state, scalars of each step)."""
    step_fn, reported = partitioner.train_step_fn(task), []
    for step in steps:
        state, (metrics, scalars) = step_fn(state, partitioner.put_batch(batch_of(step)))
        values = {name: float(value) for name, value in scalars.items()}
        reported.append({**values, "loss": float(metrics["loss"].value)})
    return state, reported


@pytest.fixture(scope="module")
def alone(arrangements: Any) -> tuple[Any, Any, float]:
    """State and scalars after four steps on one device, and the loss of an evaluation."""
    task, partitioner = started(arrangements, "one device")
    state, reported = trained(task, partitioner, partitioner.init_fn(task)(), range(4))
    evaluated = partitioner.eval_step_fn(task)(state, partitioner.put_batch(batch_of(9)))
    return jax.device_get(state), reported, float(evaluated["loss"].value)


def test_reference_run_of_one_device(alone: Any):
    state, reported, evaluated = alone
    assert [step["learning/is_valid_step"] for step in reported] == [1.0, 1.0, 0.0, 1.0]
    assert reported[BAD_STEP]["learning/applied_grad_norm"] == 0.0
    assert reported[0]["learning/lr_last"] == np.float32(0.02)
    assert set(state.opt_state) == {"main-layers-2", "last"}
    taken = state.opt_state["main-layers-2"][0].count
    np.testing.assert_array_equal(taken, [3, 3])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))
    assert np.isfinite(evaluated)


@pytest.mark.parametrize("shape", ["2 x 2 x 2", pytest.param("pmap", marks=pytest.mark.slow)])
def test_run_on_a_mesh_and_through_a_checkpoint_equals_one_device(
    arrangements: Any, alone: Any, shape: str, tmp_path: Any
):
    """Two steps here, a checkpoint, and two more on another arrangement."""
    expected, reported, evaluated = alone
    task, partitioner = started(arrangements, shape)
    state, first = trained(task, partitioner, partitioner.init_fn(task)(), range(2))
    if shape != "pmap":
        moment = state.opt_state["main-layers-2"][0].mu["stack"]["sub"]["linear"]["w"]
        mean = state.ema["stack"]["sub"]["linear"]["w"]
        weight = state.params["stack"]["sub"]["linear"]["w"]
        assert not weight.sharding.is_fully_replicated
        assert moment.sharding == mean.sharding == weight.sharding
    with CheckpointManager(tmp_path, policy=CheckpointPolicy(save_interval_steps=1)) as manager:
        manager.save(2, state, input_states={}, metadata={})
    other = next(name for name in SHAPES if name != shape)
    task, partitioner = started(arrangements, other)
    with CheckpointManager(tmp_path, policy=CheckpointPolicy(save_interval_steps=1)) as manager:
        state = manager.restore(2, partitioner.abstract_state(task)).state
    state, second = trained(task, partitioner, state, range(2, 4))

    def check(path: Any, a: Any, b: Any) -> None:
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5, err_msg=name)

    jax.tree_util.tree_map_with_path(check, jax.device_get(state), expected)
    for found, wanted in zip([*first, *second], reported, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6, nan_ok=True)
    loss = partitioner.eval_step_fn(task)(state, partitioner.put_batch(batch_of(9)))["loss"].value
    assert float(loss) == pytest.approx(evaluated, rel=1e-4)
