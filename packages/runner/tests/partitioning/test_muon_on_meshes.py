"""Optimizers of matrices give the same weights on every mesh and after a restart."""

from __future__ import annotations

import math
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
from layerkit_runner.optim.matrix.matrices import all_but_matrices
from layerkit_runner.optim.matrix.muon import muon
from layerkit_runner.optim.matrix.psgd import psgd
from layerkit_runner.optim.matrix.shampoo import shampoo
from layerkit_runner.optim.matrix.soap import soap
from layerkit_runner.optim.optimizers import decays

NORMUON = Partial(muon, variant="normuon")
# Without epsilons, rounding errors of small numbers would grow. Sides of SOAP have a full rank.
PRECONDITIONED = {
    "soap": Partial(soap, precondition_frequency=1, one_sided=True, eps=1e-2),
    "shampoo": Partial(
        shampoo, block_size=24, root_interval=2, start_step=1, eps=1e-2, matrix_epsilon=1e-2
    ),
    "psgd": Partial(psgd, max_dimension=40),
}


def make_task(
    arrangements: Any, optimizer: Any, *, microbatches: int = 1, lora: bool = False, **fields: Any
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
        optimizer=optimizer.clone().set(weight_decay=0.1, mask=decays),
        learning_rate=0.01,
        auxiliary_optimizers=[adamw],
        clip_per_tensor_norm=0.1,
        trainable=(LORA_WEIGHTS,) if lora else None,
        **fields,
    )
    task.train.gradient_accumulation_steps = microbatches
    return task


def trained(arrangements: Any, task: Any, partitioner: Any, state: Any, steps: int) -> Any:
    step_fn = partitioner.train_step_fn(task)
    batch = arrangements.unequal_batch().transform(lambda x: np.concatenate([x, x]))
    batches = [batch] * steps
    return arrangements.train(partitioner, step_fn, state, batches)[0]


SHAPES = [[8, 1, 1], [1, 8, 1], [1, 1, 8], [2, 2, 2], None]  # None is pmap.
OPTIMIZERS = {"normuon": NORMUON, **PRECONDITIONED}


@pytest.fixture(scope="module", params=OPTIMIZERS.values(), ids=OPTIMIZERS)
def optimizer(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def atol(optimizer: Any) -> float:
    """The tolerance of weights.

    The gradient of an expert with few tokens has a small rank, and SOAP's basis of the rest is any,
    so that rounding errors choose it.
    """
    return 3e-5 if optimizer is PRECONDITIONED["soap"] else 1e-5


@pytest.fixture(scope="module")
def alone(arrangements: Any, optimizer: Any) -> Any:
    """State after three steps on one device."""
    task = make_task(arrangements, optimizer)
    partitioner = arrangements.start(arrangements.one_device, task)
    first = partitioner.init_fn(task)()
    return jax.device_get(trained(arrangements, task, partitioner, first, 3))


@pytest.mark.slow  # test_spread_matrices.py has small ones
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_equal_those_of_one_device_through_a_checkpoint(
    arrangements: Any, optimizer: Any, alone: Any, atol: float, shape: Any, tmp_path: Path
):
    task = make_task(arrangements, optimizer, microbatches=2)
    partitioner = arrangements.start(shape, task)
    state = trained(arrangements, task, partitioner, partitioner.init_fn(task)(), 2)
    restored = arrangements.through_checkpoint(tmp_path, state, partitioner.abstract_state(task))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    state = trained(arrangements, task, partitioner, restored, 1)
    arrangements.assert_trees_close(state.params, alone.params, rtol=1e-3, atol=atol)


def test_preconditioners_are_divided_over_the_devices_of_their_weight(arrangements: Any):
    for optimizer in PRECONDITIONED.values():
        task = make_task(arrangements, optimizer)
        state = arrangements.start([2, 2, 2], task).abstract_state(task)
        for factor in state.opt_state["main"][0].factors:
            experts = flatten_dict(factor)["lm", "stack", "repeat", "sub", "feed_forward", "up"][0]
            assert experts.shape[:2] == (2, 8)
            is_scalar = len(experts.shape) == 2
            whole, part = experts.shape, experts.sharding.shard_shape(experts.shape)
            assert is_scalar or math.prod(part) == math.prod(whole) // 4


@pytest.mark.parametrize("axes", [("data", "expert", "tensor"), ("fsdp", "expert", "context")])
@pytest.mark.slow
def test_weights_equal_those_of_one_device_with_split_experts(
    arrangements: Any, optimizer: Any, alone: Any, atol: float, axes: Any
):
    task = make_task(arrangements, optimizer)
    partitioner = arrangements.start([2, 2, 2], task, mesh_axis_names=axes)
    state = trained(arrangements, task, partitioner, partitioner.init_fn(task)(), 3)
    arrangements.assert_trees_close(state.params, alone.params, rtol=1e-3, atol=atol)


@pytest.mark.slow
def test_adapters_alone_are_trained(arrangements: Any):
    task = make_task(arrangements, Partial(muon), lora=True)
    partitioner = arrangements.start([2, 2, 2], task)
    state = partitioner.init_fn(task)()
    first = flatten_dict(jax.device_get(state.params))
    last = flatten_dict(trained(arrangements, task, partitioner, state, 2).params)
    changed = {path for path, leaf in last.items() if np.any(leaf != first[path])}
    assert {path[-1] for path in changed} == {"lora_a", "lora_b"}


@pytest.mark.slow
def test_momentum_in_host_memory_gives_the_same_weights(arrangements: Any):
    """States of other shapes than the weights, such as NorMuon's, cannot be there."""
    task = make_task(arrangements, Partial(muon))
    host = {"offload_optimizer_state": True}
    expected, result = (
        trained(arrangements, task, one, one.init_fn(task)(), 2)
        for one in (arrangements.start([2, 2, 2], task, **fields) for fields in ({}, host))
    )
    arrangements.assert_trees_close(result.params, expected.params, rtol=1e-4, atol=1e-6)
    for optimizer in (NORMUON, PRECONDITIONED["soap"]):
        task = make_task(arrangements, optimizer)
        partitioner = arrangements.start([2, 2, 2], task, **host)
        first = partitioner.init_fn(task)()
        with pytest.raises(ConfigError, match="offload_optimizer_state=True"):
            trained(arrangements, task, partitioner, first, 1)
