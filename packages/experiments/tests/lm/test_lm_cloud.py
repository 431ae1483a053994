"""The experiments of lm_cloud have the published sizes; nothing as large as them is made here."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest

from layerkit_experiments.lm import lm_cloud
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve

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
    assert (data.is_training, heldout.is_training) == (True, False)
    assert heldout.eval_loop_num_batches == 1
    train = experiment.task.train
    assert train.num_train_steps == steps
    schedule = train.learner.learning_rate.Instantiate()
    # Linear to step 4000, then exponential from 4001 to 300000, down to a tenth.
    at = {0: 0.0, 2000: rate / 2, 4000: rate, 4001: rate, 300_000: rate / 10}
    for step, value in at.items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-5)


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
