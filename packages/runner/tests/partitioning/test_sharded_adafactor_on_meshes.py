"""The state of `sharded_adafactor`: sharded, saved and counted like the weights."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config import Partial
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import FeedForward
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor

STEPS = 4


def started(arrangements: Any, shape: list[int]) -> tuple[Any, Any]:
    """Return the task and a partitioner."""
    task = arrangements.sgd_task(
        arrangements.Doubling.HParams.config(last_tpl=FeedForward.HParams.config()),
        optimizer=Partial(sharded_adafactor, quantized_dtype="int8", weight_decay=0.01),
        learning_rate=0.05,
    )
    return task, arrangements.start(shape, task)


def rows() -> NestedMap:
    """Return a batch of unequal weights."""
    rng = np.random.default_rng(0)
    batch = NestedMap(x=rng.normal(size=(8, 16)), weights=rng.uniform(size=8))
    return batch.transform(np.float32)


def trained(
    arrangements: Any, partitioner: Any, step_fn: Any, state: Any, num_steps: int
) -> tuple[Any, list[float]]:
    """Return the state and the losses."""
    batches = [rows()] * num_steps
    state, reported = arrangements.train(partitioner, step_fn, state, batches)
    return state, [values["loss"] for values in reported]


@pytest.fixture(scope="module")
def mesh_program(arrangements: Any) -> tuple[Any, Any, Any]:
    """Return task, partitioner and compiled step on eight devices."""
    task, partitioner = started(arrangements, [2, 2, 2])
    return task, partitioner, partitioner.train_step_fn(task)


@pytest.fixture(scope="module")
def on_mesh(arrangements: Any, mesh_program: tuple[Any, Any, Any]) -> tuple[Any, list[float]]:
    """Return the state after the last step on eight devices, and the losses."""
    task, partitioner, step_fn = mesh_program
    return trained(arrangements, partitioner, step_fn, partitioner.init_fn(task)(), STEPS)


@pytest.fixture(scope="module")
def on_one_device(arrangements: Any) -> tuple[Any, list[float]]:
    """Return the same as `on_mesh`, of one device."""
    task, partitioner = started(arrangements, arrangements.one_device)
    step_fn = partitioner.train_step_fn(task)
    return trained(arrangements, partitioner, step_fn, partitioner.init_fn(task)(), STEPS)


def test_sharded_training_equals_that_of_one_device(on_mesh: Any, on_one_device: Any):
    state, losses = on_mesh
    alone, expected = on_one_device
    np.testing.assert_allclose(losses, expected, rtol=2e-4)
    assert losses[-1] < losses[0] - 0.1
    for name in ("main-layers-2", "main"):
        ours, reference = state.opt_state[name].m, alone.opt_state[name].m
        for m, other in zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True):
            assert m.dtype == np.int8
            # Another order of a sum may round a momentum to the next integer.
            away = np.abs(np.int32(m) - np.int32(other))
            assert away.max() <= 2
            assert np.mean(away > 0) < 0.05


def test_moments_are_sharded_as_their_weights(on_mesh: Any):
    state, _ = on_mesh
    weight = state.params["stack"]["sub"]["linear"]["w"]
    moments = state.opt_state["main-layers-2"]
    arrays = {
        name: tree["stack"]["sub"]["linear"]["w"]
        for name, tree in moments._asdict().items()
        if name in ("m", "m_scale", "vr", "vc")
    }
    assert arrays["m"].sharding == weight.sharding
    assert not weight.sharding.is_fully_replicated
    # Weight [2, 16, 16], embed over fsdp and mlp over tensor, of 2 devices each.
    assert {name: array.addressable_shards[0].data.shape for name, array in arrays.items()} == {
        "m": (2, 8, 8),
        "m_scale": (2, 1, 8),
        "vr": (2, 8, 1),
        "vc": (2, 1, 8),
    }


def test_resumed_run_equals_an_uninterrupted_one(
    arrangements: Any, mesh_program: tuple[Any, Any, Any], on_mesh: Any, tmp_path: Any
):
    expected, losses = on_mesh
    task, partitioner, step_fn = mesh_program
    half = STEPS // 2
    first = partitioner.init_fn(task)()
    state, before = trained(arrangements, partitioner, step_fn, first, half)
    state = arrangements.through_checkpoint(tmp_path, state, partitioner.abstract_state(task))
    state, after = trained(arrangements, partitioner, step_fn, state, STEPS - half)
    assert before + after == losses
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(expected))
