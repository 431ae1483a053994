"""The anchor of `elastic_weight_consolidation` is sharded and saved like the weights."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from layerkit.config import Partial
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy
from layerkit_runner.optim.optimizers import elastic_weight_consolidation

STEPS = 4


def test_resumed_run_keeps_the_anchor_and_equals_an_uninterrupted_one(
    arrangements: Any, tmp_path: Any
):
    optimizer = Partial(
        elastic_weight_consolidation, optimizer=Partial(optax.adamw), ewc_regularizer_weight=1.0
    )

    task = arrangements.sgd_task(
        arrangements.language_model(), optimizer=optimizer, learning_rate=0.02
    )
    partitioner = arrangements.make_partitioner([2, 2, 2])
    partitioner.bind(task)
    init, step_fn = partitioner.init_fn(task), partitioner.train_step_fn(task)
    batch = partitioner.put_batch(arrangements.unequal_batch())

    def trained(state: Any, num_steps: int) -> Any:
        for _ in range(num_steps):
            state, _ = step_fn(state, batch)
        return state

    first = jax.device_get(init().params)
    expected = jax.device_get(trained(init(), STEPS))
    with CheckpointManager(tmp_path, policy=CheckpointPolicy(save_interval_steps=1)) as manager:
        manager.save(1, trained(init(), 1), input_states={}, metadata={})
        restored = manager.restore(1, partitioner.abstract_state(task)).state
    found = trained(restored, STEPS - 1)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found.opt_state.anchor), first)
    for anchor, weight in zip(
        jax.tree.leaves(found.opt_state.anchor), jax.tree.leaves(found.params), strict=True
    ):
        assert anchor.sharding == weight.sharding
