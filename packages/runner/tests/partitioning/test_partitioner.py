"""Where states live: bytes on each device, states born in place, what is refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError


def bytes_on(device: jax.Device, tree: Any) -> int:
    """What the arrays really hold there."""
    shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def total_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="session")
def started(arrangements: Any, shape: Any) -> tuple[Any, Any]:
    """Partitioner and task."""
    task = arrangements.sgd_task(arrangements.language_model())
    return arrangements.start(shape, task), task


@pytest.fixture(scope="session")
def born(started: tuple[Any, Any]) -> Any:
    """The first state."""
    partitioner, task = started
    return partitioner.init_fn(task)()


# Weights of the language model in conftest.py, in numbers: the tied embedding 32×32 (vocab, embed);
# in each of 2 layers the projections 4×32×32 (embed, heads) and the feed-forward 2×32×64 (embed,
# mlp) with biases of 64 (mlp) and 32, and two norms of 2×32; at the end one more norm.
def by_hand(params: Any) -> dict[str, int]:
    """Scalars by the axes that split them, from the shapes alone."""
    counts = {"embed and tensor": 0, "tensor": 0, "whole": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if name.endswith("['w']"):
            counts["embed and tensor"] += leaf.size
        elif leaf.shape[-1] == 64:
            counts["tensor"] += leaf.size
        else:
            counts["whole"] += leaf.size
    return counts


def test_weights_are_split_by_the_rules(born: Any, shape: Any):
    counts = by_hand(born.params)
    assert sum(counts.values()) * 4 == total_bytes(born.params)
    assert counts["embed and tensor"] == 32 * 32 + 2 * (4 * 32 * 32 + 2 * 32 * 64)
    _, fsdp, tensor = shape or [1, 1, 1]
    held = counts["embed and tensor"] // (fsdp * tensor)
    held += counts["tensor"] // tensor + counts["whole"]
    for device in jax.devices():
        assert bytes_on(device, born.params) == 4 * held


def test_abstract_state_describes_the_initial_state(started: tuple[Any, Any], born: Any):
    partitioner, task = started
    abstract = partitioner.abstract_state(task)
    assert jax.tree.structure(abstract) == jax.tree.structure(born)
    for told, made in zip(jax.tree.leaves(abstract), jax.tree.leaves(born), strict=True):
        assert (told.shape, told.dtype) == (made.shape, made.dtype)
        assert made.sharding.is_equivalent_to(told.sharding, made.ndim)


def test_initial_state_is_equal_on_every_mesh(arrangements: Any, born: Any):
    task = arrangements.sgd_task(arrangements.language_model())
    alone = arrangements.start(arrangements.one_device, task).init_fn(task)()
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((born, alone)))


def test_a_training_step_keeps_the_layout_and_consumes_the_state(
    tiny: Any, arrangements: Any, shape: Any
):
    config = tiny.task_config(dims=8)
    config.model.linear_tpl.weight_axes = ("embed", None)  # the output has one dimension only
    task = config.Instantiate()
    partitioner = arrangements.start(shape, task)
    state = partitioner.init_fn(task)()
    batch = NestedMap(x=np.ones((8, 8)), y=np.ones(8), weights=np.ones(8)).transform(np.float32)
    after, _ = partitioner.train_step_fn(task)(state, partitioner.put_batch(batch))
    abstract = jax.tree.leaves(partitioner.abstract_state(task))
    for told, made in zip(abstract, jax.tree.leaves(after), strict=True):
        assert made.sharding.is_equivalent_to(told.sharding, made.ndim)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_rows_of_a_batch_are_split(started: tuple[Any, Any], shape: Any, arrangements: Any):
    partitioner, _ = started
    batch = partitioner.put_batch(arrangements.unequal_batch())
    shards = 8 if shape is None else shape[0] * shape[1]
    assert partitioner.num_batch_shards() == shards
    for device in jax.devices():
        assert bytes_on(device, batch) == total_bytes(batch) // shards


def test_abstract_batch_of_64_bit_arrays_describes_what_is_put_on_the_devices(
    started: tuple[Any, Any],
):
    partitioner, _ = started
    batch = NestedMap(ids=np.ones((8, 3), np.int64), weights=np.ones(8, np.float64))
    described, put = partitioner.abstract_batch(batch), partitioner.put_batch(batch)
    for name, spec in described.items():
        assert (spec.shape, spec.dtype) == (put[name].shape, put[name].dtype)
        assert spec.sharding == put[name].sharding


def test_axis_without_a_rule_is_an_error(raises, arrangements: Any, tiny: Any):
    model = tiny.Regression.HParams.config()
    model.linear_tpl.weight_axes = ("embed", "mlpp")
    task = arrangements.sgd_task(model)
    for shape in ([8, 1, 1], None):
        partitioner = arrangements.start(shape, task)
        with raises(ConfigError, field="logical axis", value="mlpp"):
            partitioner.abstract_state(task)
