"""The optimizer's state of repeated layers can be in host memory, and training stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from layerkit.config import Partial
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_runner.optim.optimizers import adam_with_update_cap, bfloat16_state

SLOW = pytest.mark.slow
HOST = {"offload_optimizer_state": True}


def no_norms(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 2, params)


def scaled_adam(learning_rate: Any) -> optax.GradientTransformation:
    """An optimizer that declares nothing."""
    return optax.chain(optax.scale_by_adam(eps=1e-2), optax.scale_by_learning_rate(learning_rate))


OPTIMIZERS = {
    "adam": Partial(optax.adam, eps=1e-2),  # With a small one, Adam enlarges rounding errors.
    "masked": Partial(optax.adamw, eps=1e-2, weight_decay=0.1, mask=no_norms),
    "momentum": Partial(optax.sgd, momentum=0.9),
    "factored": Partial(optax.adafactor, min_dim_size_to_factor=8, momentum=0.9),
    "capped": Partial(adam_with_update_cap, eps=1e-2),
    "undeclared": Partial(scaled_adam),
}


def make_task(arrangements: Any, optimizer: Any, **learner: Any) -> Any:
    settings = {"learning_rate": 1e-2, "ema_decay": 0.9, "clip_global_norm": 0.5, **learner}
    model = arrangements.Doubling.HParams.config()
    return arrangements.sgd_task(model, optimizer=optimizer, **settings)


def rows() -> NestedMap:
    """Return a batch of unequal weights."""
    rng = np.random.default_rng(0)
    batch = NestedMap(x=rng.normal(size=(8, 16)), weights=rng.uniform(size=8))
    return batch.transform(np.float32)


def trained(arrangements: Any, partitioner: Any, task: Any) -> tuple[Any, Any]:
    """Return the state after three steps, the second of which is skipped, and the last scalars."""
    batch, bad = rows(), rows()
    bad.weights = np.full_like(batch.weights, np.nan)
    first, step_fn = partitioner.init_fn(task)(), partitioner.train_step_fn(task)
    state, reported = arrangements.train(partitioner, step_fn, first, [batch, bad, batch])
    return state, reported[-1]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("adam", True),
        *(pytest.param(name, False, marks=SLOW) for name in OPTIMIZERS),
    ],
)
def test_training_equals_that_with_the_state_on_devices(arrangements: Any, name: str, split: bool):
    """Also if the state is split over the data axis (`shard_optimizer_over_data`)."""
    per_layer = False if name == "undeclared" else None
    task = make_task(arrangements, OPTIMIZERS[name], per_layer=per_layer)
    plain = trained(arrangements, arrangements.start([2, 2, 2], task), task)
    fields = {"shard_optimizer_over_data": split, **HOST}
    state, scalars = trained(arrangements, arrangements.start([2, 2, 2], task, **fields), task)
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state)]
    assert "pinned_host" in kinds
    on_host = [x for x in jax.tree.leaves(state.opt_state) if x.sharding.memory_kind != "device"]
    is_split = ["data" in jax.tree.leaves(tuple(leaf.sharding.spec)) for leaf in on_host]
    assert any(is_split) == split
    arrangements.assert_trees_close((state, scalars), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("saved_with", "restored_with"), [(HOST, {}), pytest.param({}, HOST, marks=SLOW)]
)
def test_checkpoints_do_not_depend_on_the_memory_of_the_state(
    arrangements: Any, tmp_path: Path, saved_with: dict[str, Any], restored_with: dict[str, Any]
):
    task = make_task(arrangements, OPTIMIZERS["adam"])
    saving = arrangements.start([2, 2, 2], task, **saved_with)
    state = saving.init_fn(task)()
    state, _ = saving.train_step_fn(task)(state, saving.put_batch(rows()))
    stored = saving.stored_state(task, state)
    restoring = arrangements.start([2, 2, 2], task, **restored_with)
    target = restoring.abstract_stored_state(task)
    restored = arrangements.through_checkpoint(tmp_path, stored, target)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.sharding, b.sharding), restored, target)
    step = restoring.train_step_fn(task)
    step(restored, restoring.put_batch(rows()))


@pytest.mark.parametrize(
    ("optimizer", "learner", "field"),
    [
        (Partial(optax.adafactor, min_dim_size_to_factor=8), {"per_layer": False}, "optimizer"),
        pytest.param(
            *(Partial(bfloat16_state, optimizer=Partial(optax.adam)), {}, "optimizer"), marks=SLOW
        ),
        pytest.param(
            *(Partial(optax.contrib.schedule_free_adamw), {"ema_decay": None}, "optimizer"),
            marks=SLOW,
        ),
        (Partial(optax.sgd), {}, "offload_optimizer_state"),  # It has no state.
    ],
)
def test_an_optimizer_whose_state_cannot_be_offloaded_is_an_error(
    arrangements: Any, raises: Any, optimizer: Any, learner: dict[str, Any], field: str
):
    task = make_task(arrangements, optimizer, **learner)
    partitioner = arrangements.start([8, 1, 1], task, **HOST)
    with raises(ConfigError, field=field):
        trained(arrangements, partitioner, task)


def test_offloading_on_a_mesh_that_does_not_divide_the_weights_is_an_error(
    arrangements: Any, raises: Any
):
    task = make_task(arrangements, OPTIMIZERS["adam"])
    partitioner = arrangements.start([1, 3, 1], task, **HOST)
    with raises(ConfigError, field="mesh"):
        partitioner.abstract_state(task)
