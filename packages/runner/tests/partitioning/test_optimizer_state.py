"""The optimizer's state can be split over data, and training stays the same."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from layerkit.config import Partial
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.partitioning.padding import split_over

STEPS = 3
SPLIT = {"shard_optimizer_over_data": True}


@pytest.fixture(scope="module")
def replicated(arrangements: Any) -> Any:
    """The state after three steps with every weight and moment on each device."""
    return trained(arrangements, [8, 1, 1])[2]


def adam_task(arrangements: Any, *, vocab: int = 32) -> Any:
    model = arrangements.language_model()
    model.lm_tpl.vocab_size = vocab
    optimizer = Partial(optax.adam, eps=1e-2)  # With a small one, Adam enlarges rounding errors.
    return arrangements.sgd_task(
        model, optimizer=optimizer, learning_rate=1e-2, ema_decay=0.9, clip_global_norm=0.5
    )


def trained(arrangements: Any, shape: list[int], *, vocab: int = 32, **fields: Any) -> Any:
    """Return the partitioner, the task and the state after three steps."""
    task = adam_task(arrangements, vocab=vocab)
    partitioner = SpmdPartitioner(ici_mesh_shape=shape, **fields)
    partitioner.start()
    partitioner.bind(task)
    state = partitioner.init_fn(task)()
    batch = partitioner.put_batch(arrangements.unequal_batch())
    step = partitioner.train_step_fn(task)
    for _ in range(STEPS):
        state, _ = step(state, batch)
    return partitioner, task, state


def assert_same_values(ours: Any, reference: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), ours, reference
    )


@pytest.mark.parametrize("shape", [[8, 1, 1], [2, 2, 2]])
def test_training_equals_that_with_a_replicated_state(
    arrangements: Any, replicated: Any, shape: list[int]
):
    partitioner, task, state = trained(arrangements, shape, **SPLIT)
    assert_same_values(state, replicated)
    batch = partitioner.put_batch(arrangements.unequal_batch())
    evaluated = partitioner.eval_step_fn(task, averaged=True)(state, batch)
    assert np.isfinite(float(evaluated["loss"].value))


def abstract_state(arrangements: Any, **fields: Any) -> Any:
    task = adam_task(arrangements)
    partitioner = SpmdPartitioner(ici_mesh_shape=[8, 1, 1], **fields)
    partitioner.start()
    partitioner.bind(task)
    return partitioner.abstract_state(task)


def bytes_on_a_device(arrays: Any) -> int:
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def test_each_replica_keeps_a_part_of_the_moments(arrangements: Any):
    def bytes_by_field(**fields: Any) -> dict[str, int]:
        state = abstract_state(arrangements, **fields)
        return {
            name: bytes_on_a_device(getattr(state, name)) for name in ("params", "opt_state", "ema")
        }

    whole, split = bytes_by_field(), bytes_by_field(**SPLIT)
    assert split["params"] == whole["params"]
    for name in ("opt_state", "ema"):  # counters are not split
        assert split[name] / whole[name] == pytest.approx(1 / 8, rel=0.01), name


def test_moments_of_uneven_weights_are_stored_without_padding(arrangements: Any):
    partitioner, task, state = trained(arrangements, [2, 1, 4], vocab=33, **SPLIT)
    stored = partitioner.stored_state(task, state)
    shapes = partitioner.abstract_stored_state(task)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), stored, shapes)
    back = partitioner.device_state(task, stored)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.sharding, b.sharding), back, state)


def test_the_largest_dimension_that_divides_is_split(arrangements: Any):
    mesh = arrangements.make_partitioner([2, 2, 2]).mesh
    axes = ("data", "fsdp")
    split = [
        (PartitionSpec(), (3, 12, 8), PartitionSpec(None, ("data", "fsdp"), None)),
        (PartitionSpec("fsdp", "tensor"), (6, 12), PartitionSpec("fsdp", ("tensor", "data"))),
        (PartitionSpec("fsdp", "tensor"), (8, 10), PartitionSpec(("fsdp", "data"), "tensor")),
        (PartitionSpec(), (3, 5), PartitionSpec()),
        (PartitionSpec(("data", "fsdp")), (16,), PartitionSpec(("data", "fsdp"))),
    ]
    for spec, shape, expected in split:
        assert split_over(spec, shape, mesh=mesh, axes=axes) == expected, shape
