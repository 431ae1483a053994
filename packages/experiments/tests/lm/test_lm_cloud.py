"""The experiments of lm_cloud have the published sizes; nothing as large as them is made here."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest

from layerkit_experiments.lm import lm_cloud
from layerkit_runner.config.resolve import ResolvedExperiment, resolve
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.trainer.job import build_parts

# layers, model, hidden, heads, dims per head, rows per device, rate, steps
PUBLISHED = {
    "LmCloudSpmdTest": (2, 64, 256, 8, 8, 4, 2.5e-4, 10),
    "LmCloudSpmd2BLimitSteps": (18, 3072, 12288, 24, 128, 8, 2.5e-4, 300),
    "LmCloudTransformerAdamLimitSteps": (10, 1024, 4096, 16, 64, 16, 1e-3, 2000),
}
NUM_DEVICES = {
    "LmCloudSpmdTest": 1,
    "LmCloudSpmd2BLimitSteps": 4,
    "LmCloudTransformerAdamLimitSteps": 8,
}


def resolved(name: str) -> ResolvedExperiment:
    return resolve(getattr(lm_cloud, name)())


def abstract_state(name: str) -> Any:
    partitioner, task = build_parts(resolved(name))
    partitioner.start(jax.devices()[: NUM_DEVICES[name]])
    partitioner.bind(task)
    return partitioner.abstract_state(task)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_data_and_schedule_are_those_of_pax(name: str):
    layers, model, hidden, heads, per_head, rows, rate, steps = PUBLISHED[name]
    experiment = resolved(name)
    lm = experiment.task.model.lm_tpl
    assert (lm.num_layers, lm.model_dims, lm.hidden_dims) == (layers, model, hidden)
    assert (lm.num_heads, lm.num_kv_heads, lm.dim_per_head) == (heads, None, per_head)
    data, heldout = experiment.datasets
    for each in (data, heldout):
        assert (each.percore_batch_size, each.seq_length, each.vocab_size) == (rows, 1024, 32000)
    assert (data.is_training, heldout.is_training, heldout.eval_loop_num_batches) == (
        True,
        False,
        1,
    )
    assert lm.vocab_size == 32000
    train = experiment.task.train
    assert train.num_train_steps == steps
    schedule = train.learner.learning_rate.Instantiate()
    # Linear to step 4000, then exponential from 4001 to 300000, down to a tenth.
    at = {0: 0.0, 2000: rate / 2, 4000: rate, 4001: rate, 300_000: rate / 10}
    for step, value in at.items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-5)
    optimizer = train.learner.optimizer
    assert (optimizer.b1, optimizer.b2, optimizer.eps) == (0.9, 0.99, 1e-6)
    assert (optimizer.weight_decay, optimizer.update_rms_cap) == (1e-3, 1.0)
    assert train.learner.clip_global_norm == 5.0


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_has_the_layers_of_pax(name: str):
    experiment = resolved(name)
    model = experiment.task.model
    layer = model.lm_tpl.stack_tpl.layer_tpl
    is_pmap = name == "LmCloudTransformerAdamLimitSteps"
    assert layer.attention_tpl.logit_cap == 50.0
    assert model.lm_tpl.softmax_tpl.logit_soft_cap == (None if is_pmap else 30.0)
    assert layer.feed_forward_tpl.activation_tpl.__fn_or_cls__.__name__ == (
        "ReLU" if is_pmap else "GELU"
    )
    assert layer.feed_forward_tpl.use_gate is False
    assert model.lm_tpl.position_tpl.__fn_or_cls__.__name__ == "PositionalEmbedding"
    assert model.lm_tpl.stack_tpl.__fn_or_cls__.__name__ == (
        "StackedTransformer" if is_pmap else "StackedTransformerRepeated"
    )
    assert model.lm_tpl.stack_tpl.remat == ("none" if is_pmap else "full")
    assert model.fprop_dtype == ("float32" if is_pmap else "bfloat16")
    partitioner = experiment.partitioner
    if is_pmap:
        assert partitioner.__fn_or_cls__ is PmapPartitioner
    else:
        assert partitioner.__fn_or_cls__ is SpmdPartitioner
        assert partitioner.ici_mesh_shape == [1, NUM_DEVICES[name], 1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_weights_equals_a_count_by_hand(name: str):
    layers, d, ff, heads, per_head, *_ = PUBLISHED[name]
    attention = 4 * d * heads * per_head
    feed_forward = 2 * d * ff + ff + d
    norms = 2 * 2 * d
    layer = attention + per_head + feed_forward + norms
    by_hand = 32000 * d + 32000 + layers * layer + 2 * d
    params = jax.tree.leaves(abstract_state(name).params)
    assert sum(math.prod(leaf.shape) for leaf in params) == by_hand
    assert {str(leaf.dtype) for leaf in params} == {"float32"}


def test_the_2b_model_has_a_quarter_on_each_of_its_devices():
    state = abstract_state("LmCloudSpmd2BLimitSteps")
    whole, here = 0, 0
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        whole += math.prod(leaf.shape)
        here += math.prod(leaf.sharding.shard_shape(leaf.shape))
    # Only norms and biases are on all of them.
    assert whole / 4 < here < 1.001 * whole / 4


def test_under_pmap_every_device_has_the_whole():
    leaves = jax.tree.leaves(abstract_state("LmCloudTransformerAdamLimitSteps"))
    assert all(leaf.sharding.shard_shape(leaf.shape) == leaf.shape for leaf in leaves)
