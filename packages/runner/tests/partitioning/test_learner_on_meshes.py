"""Everything a learner does at once, spread over devices and through a checkpoint.

Per-layer clipping and an update cap, another optimizer (factored) for the last layer, averaged
weights, noise, microbatches, and a step that is skipped.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from layerkit.config import Partial
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import FeedForward
from layerkit_runner.optim.learner import AuxiliaryOptimizer
from layerkit_runner.optim.optimizers import adam_with_update_cap
from layerkit_runner.optim.weight_selection import VariationalNoise

BAD_STEP = 2
MESH = [2, 2, 2]


def batch_of(step: int) -> NestedMap:
    """Unequal weights, none in the second of two microbatches at step 1; one batch is bad."""
    rng = np.random.default_rng(step)
    weights = rng.uniform(size=16)
    if step == 1:
        weights[1::2] = 0.0
    x = rng.normal(size=(16, 16)) * (np.inf if step == BAD_STEP else 1.0)
    return NestedMap(x=x, weights=weights).transform(np.float32)


def started(arrangements: Any, shape: Any) -> tuple[Any, Any]:
    last = AuxiliaryOptimizer.HParams.config(
        name="last",
        weights=("last/.*",),
        optimizer=Partial(optax.adafactor, min_dim_size_to_factor=8),
        learning_rate=0.02,
    )
    task = arrangements.sgd_task(
        arrangements.Doubling.HParams.config(last_tpl=FeedForward.HParams.config()),
        optimizer=Partial(adam_with_update_cap, update_rms_cap=0.5),
        learning_rate=0.05,
        auxiliary_optimizers=[last],
        clip_per_tensor_norm=0.5,
        ema_decay=0.9,
    )
    task.train.gradient_accumulation_steps = 1 if shape is None else 2
    task.train.eval_use_ema_states = True
    task.vn = VariationalNoise.HParams.config(scale=0.01, weights=("stack/.*/w",)).Instantiate()
    return task, arrangements.start(shape, task)


def trained(arrangements: Any, task: Any, partitioner: Any, state: Any, steps: range) -> Any:
    """(state, what each step reported)."""
    step_fn = partitioner.train_step_fn(task)
    return arrangements.train(partitioner, step_fn, state, map(batch_of, steps))


@pytest.fixture(scope="module")
def alone(arrangements: Any) -> tuple[Any, Any, float]:
    """State and scalars after four steps on one device, and the loss of an evaluation."""
    task, partitioner = started(arrangements, arrangements.one_device)
    first_state = partitioner.init_fn(task)()
    state, reported = trained(arrangements, task, partitioner, first_state, range(4))
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


@pytest.mark.parametrize(
    ("shape", "other"),
    [(MESH, None), pytest.param(None, MESH, id="pmap", marks=pytest.mark.slow)],
)
def test_run_on_a_mesh_and_through_a_checkpoint_equals_one_device(
    arrangements: Any, alone: Any, shape: Any, other: Any, tmp_path: Any
):
    """Two steps here, a checkpoint, and two more on another arrangement."""
    expected, reported, evaluated = alone
    task, partitioner = started(arrangements, shape)
    first_state = partitioner.init_fn(task)()
    state, first = trained(arrangements, task, partitioner, first_state, range(2))
    if shape is not None:
        moment = state.opt_state["main-layers-2"][0].mu["stack"]["sub"]["linear"]["w"]
        mean = state.ema["stack"]["sub"]["linear"]["w"]
        weight = state.params["stack"]["sub"]["linear"]["w"]
        assert not weight.sharding.is_fully_replicated
        assert moment.sharding == mean.sharding == weight.sharding
    task, partitioner = started(arrangements, other)
    target = partitioner.abstract_state(task)
    state = arrangements.through_checkpoint(tmp_path, state, target)
    state, second = trained(arrangements, task, partitioner, state, range(2, 4))
    arrangements.assert_trees_close(state, expected, rtol=1e-3, atol=1e-5)
    for result, required in zip([*first, *second], reported, strict=True):
        assert result == pytest.approx(required, rel=1e-4, abs=1e-6, nan_ok=True)
    loss = partitioner.eval_step_fn(task)(state, partitioner.put_batch(batch_of(9)))["loss"].value
    assert float(loss) == pytest.approx(evaluated, rel=1e-4)


@pytest.mark.slow  # optim/test_rounding.py has a smaller one
@pytest.mark.parametrize("shape", [MESH, pytest.param(None, id="pmap")])
def test_rounded_weights_resume_bit_for_bit(arrangements: Any, shape: Any, tmp_path: Any):
    def fresh() -> tuple[Any, Any]:
        last = FeedForward.HParams.config()
        task = arrangements.sgd_task(
            arrangements.Doubling.HParams.config(last_tpl=last, dtype="bfloat16"),
            optimizer=Partial(optax.adam),
            learning_rate=1e-4,
            stochastic_rounding=True,
        )
        return task, arrangements.start(shape, task)

    task, partitioner = fresh()
    state = partitioner.init_fn(task)()
    first = jax.device_get(state.params)
    state, _ = trained(arrangements, task, partitioner, state, range(2))
    task, partitioner = fresh()
    state = arrangements.through_checkpoint(tmp_path, state, partitioner.abstract_state(task))
    state, _ = trained(arrangements, task, partitioner, state, range(2, 4))
    whole, _ = trained(arrangements, task, partitioner, partitioner.init_fn(task)(), range(4))
    jax.tree.map(np.testing.assert_array_equal, state, whole)
    moved = jax.tree.map(lambda a, b: float(np.mean(a != b)), first, jax.device_get(whole.params))
    # Weights near 0.25 are 1/1024 apart and three steps move them by 3e-4 at most.
    assert 0.05 < moved["stack"]["sub"]["linear"]["w"] < 0.95
    for leaf in jax.tree.leaves(whole.params):
        copies = [
            np.asarray(shard.data) for shard in leaf.addressable_shards if leaf.is_fully_replicated
        ]
        assert all(np.array_equal(copy, copies[0]) for copy in copies)
