"""The optimizer's state: split over data, evaluated at its averages, and kept in checkpoints."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from optax import contrib

from layerkit.config import Partial
from layerkit.config.nested_map import NestedMap
from layerkit_runner.optim.optimizers import elastic_weight_consolidation
from layerkit_runner.partitioning.padding import split_over

STEPS = 3
SPLIT = {"shard_optimizer_over_data": True}


def rows() -> NestedMap:
    """Return a batch of unequal weights for the model `Doubling`."""
    rng = np.random.default_rng(0)
    batch = NestedMap(x=rng.normal(size=(8, 16)), weights=rng.uniform(size=8))
    return batch.transform(np.float32)


def started(arrangements: Any, shape: list[int], *, vocab: int | None, **fields: Any) -> Any:
    """Return the partitioner and a task with Adam; without a vocabulary the model doubles."""
    model = arrangements.Doubling.HParams.config()
    if vocab is not None:
        model = arrangements.language_model()
        model.lm_tpl.vocab_size = vocab
    optimizer = Partial(optax.adam, eps=1e-2)  # With a small one, Adam enlarges rounding errors.
    task = arrangements.sgd_task(
        model, optimizer=optimizer, learning_rate=1e-2, ema_decay=0.9, clip_global_norm=0.5
    )
    return arrangements.start(shape, task, **fields), task


def trained(arrangements: Any, shape: list[int], *, vocab: int | None = None, **fields: Any) -> Any:
    """Return the partitioner, the task and the state after three steps."""
    partitioner, task = started(arrangements, shape, vocab=vocab, **fields)
    batch = rows() if vocab is None else arrangements.unequal_batch()
    first, batches = partitioner.init_fn(task)(), [batch] * STEPS
    step_fn = partitioner.train_step_fn(task)
    return partitioner, task, arrangements.train(partitioner, step_fn, first, batches)[0]


@pytest.fixture(scope="module")
def replicated(arrangements: Any) -> Any:
    """The state after three steps with every weight and moment on each device."""
    return trained(arrangements, [8, 1, 1])[2]


@pytest.mark.parametrize("shape", [pytest.param([8, 1, 1], marks=pytest.mark.slow), [2, 2, 2]])
def test_training_equals_that_with_a_replicated_state(
    arrangements: Any, replicated: Any, shape: list[int]
):
    partitioner, task, state = trained(arrangements, shape, **SPLIT)
    arrangements.assert_trees_close(state, replicated, rtol=1e-4, atol=2e-5)
    batch = partitioner.put_batch(rows())
    evaluated = partitioner.eval_step_fn(task, averaged=True)(state, batch)
    assert np.isfinite(float(evaluated["loss"].value))


def bytes_on_a_device(arrays: Any) -> int:
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def test_each_replica_keeps_a_part_of_the_moments(arrangements: Any):
    def bytes_by_field(**fields: Any) -> dict[str, int]:
        partitioner, task = started(arrangements, [8, 1, 1], vocab=32, **fields)
        state, names = partitioner.abstract_state(task), ("params", "opt_state", "ema")
        return {name: bytes_on_a_device(getattr(state, name)) for name in names}

    whole, split = bytes_by_field(), bytes_by_field(**SPLIT)
    assert split["params"] == whole["params"]
    for name in ("opt_state", "ema"):  # counters are not split
        assert split[name] / whole[name] == pytest.approx(1 / 8, rel=0.01), name


@pytest.mark.slow  # test_padding.py stores uneven weights
def test_moments_of_uneven_weights_are_stored_without_padding(arrangements: Any):
    partitioner, task, state = trained(arrangements, [2, 1, 4], vocab=33, **SPLIT)
    stored = partitioner.stored_state(task, state)
    shapes = partitioner.abstract_stored_state(task)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), stored, shapes)
    back = partitioner.device_state(task, stored)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.sharding, b.sharding), back, state)


def test_the_largest_dimension_that_divides_is_split(arrangements: Any):
    mesh = arrangements.start([2, 2, 2]).mesh
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


def test_resumed_run_keeps_the_anchor_and_equals_an_uninterrupted_one(
    arrangements: Any, tmp_path: Any
):
    optimizer = Partial(
        elastic_weight_consolidation, optimizer=Partial(optax.adamw), ewc_regularizer_weight=1.0
    )
    model = arrangements.Doubling.HParams.config()
    task = arrangements.sgd_task(model, optimizer=optimizer, learning_rate=0.02)
    partitioner = arrangements.start([2, 2, 2], task)
    init, step_fn = partitioner.init_fn(task), partitioner.train_step_fn(task)

    def trained(state: Any, num_steps: int) -> Any:
        batches = [rows()] * num_steps
        return arrangements.train(partitioner, step_fn, state, batches)[0]

    first = jax.device_get(init().params)
    expected = jax.device_get(trained(init(), 4))
    target = partitioner.abstract_state(task)
    result = trained(arrangements.through_checkpoint(tmp_path, trained(init(), 1), target), 3)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), expected)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(result.opt_state.anchor), first)
    shardings = (
        jax.tree.map(lambda x: x.sharding, tree)
        for tree in (result.opt_state.anchor, result.params)
    )
    jax.tree.map(np.testing.assert_equal, *shardings)


@pytest.mark.parametrize("mesh", [[2, 2, 2], pytest.param(None, id="pmap", marks=pytest.mark.slow)])
def test_evaluation_at_schedule_free_averages_equals_that_of_one_device(
    arrangements: Any, mesh: list[int] | None
):
    """From what inference keeps of a state."""
    losses = []
    for shape in (mesh, arrangements.one_device):
        optimizer = Partial(contrib.schedule_free_adamw)
        model = arrangements.Doubling.HParams.config()
        task = arrangements.sgd_task(model, optimizer=optimizer, learning_rate=0.01)
        partitioner = arrangements.start(shape, task)
        step_fn, batch = partitioner.train_step_fn(task), rows()
        first = partitioner.init_fn(task)()
        state, _ = arrangements.train(partitioner, step_fn, first, [batch] * STEPS)
        averaged = partitioner.eval_step_fn(task)(
            state.for_inference(), partitioner.put_batch(batch)
        )
        _, [at_the_weights] = arrangements.train(partitioner, step_fn, state, [batch])
        losses.append((float(averaged["loss"].value), at_the_weights["loss"]))
    np.testing.assert_allclose(*losses, rtol=2e-5)
    assert abs(losses[0][0] - losses[0][1]) > 1e-3
