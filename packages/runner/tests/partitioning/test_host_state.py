"""The optimizer's state of repeated layers can be in host memory, and training stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from layerkit.config import Partial
from layerkit.errors import ConfigError
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy
from layerkit_runner.optim.bfloat16_state import bfloat16_state
from layerkit_runner.optim.optimizers import adam_with_update_cap
from layerkit_runner.partitioning import SpmdPartitioner

HOST = {"offload_optimizer_state": True}


def no_norms(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 2, params)


OPTIMIZERS = {
    "adam": Partial(optax.adam, eps=1e-2),  # With a small one, Adam enlarges rounding errors.
    "masked": Partial(optax.adamw, eps=1e-2, weight_decay=0.1, mask=no_norms),
    "momentum": Partial(optax.sgd, momentum=0.9),
    "factored": Partial(optax.adafactor, min_dim_size_to_factor=8, momentum=0.9),
    "capped": Partial(adam_with_update_cap, eps=1e-2),
}


def make_task(arrangements: Any, optimizer: Any, **learner: Any) -> Any:
    settings = {"learning_rate": 1e-2, "ema_decay": 0.9, "clip_global_norm": 0.5, **learner}
    return arrangements.sgd_task(arrangements.language_model(), optimizer=optimizer, **settings)


def started(task: Any, shape: list[int], **fields: Any) -> SpmdPartitioner:
    partitioner = SpmdPartitioner(ici_mesh_shape=shape, **fields)
    partitioner.start()
    partitioner.bind(task)
    return partitioner


def trained(partitioner: Any, task: Any, batch: Any) -> tuple[Any, Any]:
    """Return the state after three steps, the second of which is skipped, and the scalars."""
    state = partitioner.init_fn(task)()
    step = partitioner.train_step_fn(task)
    bad = batch.copy()
    bad.weights = np.full_like(batch.weights, np.nan)
    for each in (batch, bad, batch):
        state, (_, scalars) = step(state, partitioner.put_batch(each))
    return state, scalars


@pytest.mark.parametrize(
    ("name", "split"), [*((name, False) for name in OPTIMIZERS), ("adam", True)]
)
def test_training_equals_that_with_the_state_on_devices(arrangements: Any, name: str, split: bool):
    """Also if the state is split over the data axis (`shard_optimizer_over_data`)."""
    task, batch = make_task(arrangements, OPTIMIZERS[name]), arrangements.unequal_batch()
    plain, plain_scalars = trained(started(task, [2, 2, 2]), task, batch)
    offloading = started(task, [2, 2, 2], shard_optimizer_over_data=split, **HOST)
    state, scalars = trained(offloading, task, batch)
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state)]
    assert "pinned_host" in kinds
    on_host = [x for x in jax.tree.leaves(state.opt_state) if x.sharding.memory_kind != "device"]
    is_split = ["data" in jax.tree.leaves(tuple(leaf.sharding.spec)) for leaf in on_host]
    assert any(is_split) == split
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        (state, scalars),
        (plain, plain_scalars),
    )


@pytest.mark.parametrize(("saved_with", "restored_with"), [(HOST, {}), ({}, HOST)])
def test_checkpoints_do_not_depend_on_the_memory_of_the_state(
    arrangements: Any, tmp_path: Path, saved_with: dict[str, Any], restored_with: dict[str, Any]
):
    task = make_task(arrangements, OPTIMIZERS["adam"])
    saving = started(task, [2, 2, 2], **saved_with)
    state = saving.init_fn(task)()
    state, _ = saving.train_step_fn(task)(state, saving.put_batch(arrangements.unequal_batch()))
    policy = CheckpointPolicy(save_interval_steps=1)
    with CheckpointManager(tmp_path, policy=policy) as manager:
        manager.save(1, saving.stored_state(task, state), input_states={}, metadata={})
    restoring = started(task, [2, 2, 2], **restored_with)
    target = restoring.abstract_stored_state(task)
    with CheckpointManager(tmp_path, read_only=True) as manager:
        restored = manager.restore(1, target).state
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.sharding, b.sharding), restored, target)
    step = restoring.train_step_fn(task)
    step(restored, restoring.put_batch(arrangements.unequal_batch()))


@pytest.mark.parametrize(
    ("optimizer", "learner"),
    [
        (Partial(optax.adafactor, min_dim_size_to_factor=8), {"per_layer": False}),
        (Partial(bfloat16_state, optimizer=Partial(optax.adam)), {}),
        (Partial(optax.contrib.schedule_free_adamw), {"ema_decay": None}),
    ],
)
def test_an_optimizer_that_cannot_update_layers_one_at_a_time_is_an_error(
    arrangements: Any, raises: Any, optimizer: Any, learner: dict[str, Any]
):
    task = make_task(arrangements, optimizer, **learner)
    partitioner = started(task, [8, 1, 1], **HOST)
    with raises(ConfigError, field="optimizer"):
        partitioner.abstract_state(task)


def test_an_optimizer_without_state_is_an_error(arrangements: Any, raises: Any):
    task = make_task(arrangements, Partial(optax.sgd))
    partitioner = started(task, [8, 1, 1], **HOST)
    with raises(ConfigError, field="offload_optimizer_state"):
        partitioner.abstract_state(task)
