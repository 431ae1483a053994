"""Muon on heads and experts gives the same weights on every mesh and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from layerkit.config import Partial
from layerkit.errors import ConfigError
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.quantization.lora import LORA_WEIGHTS, add_lora
from layerkit_runner.optim.learner import AuxiliaryOptimizer
from layerkit_runner.optim.matrices import all_but_matrices
from layerkit_runner.optim.muon import muon
from layerkit_runner.optim.optimizers import decays


def make_task(
    arrangements: Any, *, microbatches: int = 1, lora: bool = False, **options: Any
) -> Any:
    model = arrangements.language_model()
    layer = model.lm_tpl.stack_tpl.layer_tpl
    layer.attention_tpl.combined_qkv = True
    model.lm_tpl.set(num_heads=16, num_kv_heads=8, dim_per_head=4)
    layer.feed_forward_tpl = MoeFeedForward.HParams.config(num_experts=8, load_balance_weight=0.0)
    adamw = AuxiliaryOptimizer.HParams.config(
        name="adamw",
        weights=all_but_matrices,
        optimizer=Partial(optax.adamw, eps=1e-2),
        learning_rate=0.01,
    )
    task = arrangements.sgd_task(
        add_lora(model, rank=4) if lora else model,
        optimizer=Partial(muon, weight_decay=0.1, mask=decays, **options),
        learning_rate=0.01,
        auxiliary_optimizers=[adamw],
        clip_per_tensor_norm=0.1,
        trainable=(LORA_WEIGHTS,) if lora else None,
    )
    task.train.gradient_accumulation_steps = microbatches
    return task


def trained(arrangements: Any, task: Any, partitioner: Any, state: Any, steps: int) -> Any:
    step_fn = partitioner.train_step_fn(task)
    batch = arrangements.unequal_batch().transform(lambda x: np.concatenate([x, x]))
    batches = [batch] * steps
    return arrangements.train(partitioner, step_fn, state, batches)[0]


@pytest.fixture(scope="module")
def alone(arrangements: Any) -> Any:
    """State after three steps on one device."""
    task = make_task(arrangements, variant="normuon")
    partitioner = arrangements.start(arrangements.one_device, task)
    first = partitioner.init_fn(task)()
    return jax.device_get(trained(arrangements, task, partitioner, first, 3))


def test_weights_equal_those_of_one_device_through_a_checkpoint(
    arrangements: Any, alone: Any, shape: Any, tmp_path: Path
):
    task = make_task(arrangements, variant="normuon", microbatches=2)
    partitioner = arrangements.start(shape, task)
    state = trained(arrangements, task, partitioner, partitioner.init_fn(task)(), 2)
    restored = arrangements.through_checkpoint(tmp_path, state, partitioner.abstract_state(task))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    state = trained(arrangements, task, partitioner, restored, 1)
    arrangements.assert_trees_close(state.params, alone.params, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("axes", [("data", "expert", "tensor"), ("fsdp", "expert", "context")])
@pytest.mark.slow
def test_weights_equal_those_of_one_device_with_split_experts(
    arrangements: Any, alone: Any, axes: Any
):
    task = make_task(arrangements, variant="normuon")
    partitioner = arrangements.start([2, 2, 2], task, mesh_axis_names=axes)
    state = trained(arrangements, task, partitioner, partitioner.init_fn(task)(), 3)
    arrangements.assert_trees_close(state.params, alone.params, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_adapters_alone_are_trained(arrangements: Any):
    task = make_task(arrangements, lora=True)
    partitioner = arrangements.start([2, 2, 2], task)
    state = partitioner.init_fn(task)()
    first = flatten_dict(jax.device_get(state.params))
    last = flatten_dict(trained(arrangements, task, partitioner, state, 2).params)
    changed = {path for path, leaf in last.items() if np.any(leaf != first[path])}
    assert {path[-1] for path in changed} == {"lora_a", "lora_b"}


@pytest.mark.slow
def test_momentum_in_host_memory_gives_the_same_weights(arrangements: Any):
    """NorMuon's second moment has other shapes than the weights, and cannot be there."""
    task = make_task(arrangements)
    host = {"offload_optimizer_state": True}
    expected, found = (
        trained(arrangements, task, one, one.init_fn(task)(), 2)
        for one in (arrangements.start([2, 2, 2], task, **fields) for fields in ({}, host))
    )
    arrangements.assert_trees_close(found.params, expected.params, rtol=1e-4, atol=1e-6)
    task = make_task(arrangements, variant="normuon")
    partitioner = arrangements.start([2, 2, 2], task, **host)
    with pytest.raises(ConfigError, match="offload_optimizer_state=True"):
        trained(arrangements, task, partitioner, partitioner.init_fn(task)(), 1)
