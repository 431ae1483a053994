"""GLaM at the sizes of its table, and mixtures of experts as a recipe."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerkit.config import target_of
from layerkit.errors import ConfigError
from layerkit_experiments.lm import moe, nvidia
from layerkit_runner.run.resolve import resolve

# layers, model, hidden, heads, dims per head, rows per device, devices, weights as published
PUBLISHED = {
    "Glam126M64E": (12, 768, 3072, 12, 64, 16, 64, 1.9e9),
    "Glam8B64E": (32, 4096, 16384, 32, 128, 4, 256, 143e9),
    "Glam64B64E": (64, 8192, 32768, 128, 128, 1, 1024, 1.2e12),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_weights_are_those_of_the_paper(name: str, num_params: Any):
    layers, model, hidden, heads, per_head, rows, devices, weights = PUBLISHED[name]
    experiment = resolve(getattr(moe, name)())
    lm = experiment.task.model.lm_tpl
    assert (lm.num_layers, lm.model_dims, lm.hidden_dims) == (layers, model, hidden)
    assert (lm.num_heads, lm.num_kv_heads, lm.dim_per_head) == (heads, None, per_head)
    # A million tokens a step.
    data = experiment.datasets[0]
    assert data.percore_batch_size * devices == rows * devices == 1024
    assert data.task_feature_lengths == {"targets": 1024}
    sparse, dense = (block.feed_forward_tpl for block in lm.stack_tpl.block_tpls)
    assert (sparse.num_experts, sparse.num_experts_per_token, sparse.use_gate) == (64, 2, False)
    assert dense.use_gate and target_of(dense.activation_tpl).__name__ == "GELU"
    # By hand; the table leaves the embedding of the smallest model out.
    by_hand = 256_000 * model + layers * (4 * model * heads * per_head + 32 * heads)
    by_hand += layers // 2 * (64 * 2 * model * hidden + 64 * model + 3 * model * hidden)
    by_hand += (2 * layers + 1) * model
    count = num_params(f"lm.moe.{name}")
    assert count == by_hand
    assert count - (name == "Glam126M64E") * 256_000 * model == pytest.approx(weights, rel=0.04)


def test_the_rate_is_constant_and_then_falls_with_the_root_of_the_step():
    train = resolve(moe.Glam126M64E()).task.train
    schedule = train.learner.learning_rate.Instantiate()
    for step, value in {0: 0.01, 9_999: 0.01, 10_000: 0.01, 40_000: 0.005, 160_000: 0.0025}.items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-5)
    assert train.learner.optimizer.decay_rate == 0.8
    assert train.learner.optimizer.clipping_threshold == 1.0


def test_expert_period_sets_the_pattern_of_expert_layers(raises):
    every = resolve(moe.Glam126M64E(EXPERT_PERIOD=1)).task.model.lm_tpl.stack_tpl
    assert every.block_tpls is None
    assert target_of(every.layer_tpl.feed_forward_tpl).__name__ == "MoeFeedForward"
    third = resolve(moe.Glam126M64E(EXPERT_PERIOD=3)).task.model.lm_tpl.stack_tpl
    kinds = [target_of(block.feed_forward_tpl).__name__ for block in third.block_tpls]
    assert kinds == ["MoeFeedForward", "TransformerFeedForward", "TransformerFeedForward"]
    with raises(ConfigError, field="EXPERT_PERIOD", value=0):
        resolve(moe.Glam126M64E(EXPERT_PERIOD=0))


# layers, layers with experts, model, hidden, heads, key heads, words, experts, matrices of an
# expert; GPUs, rows per GPU
PROXIES = {
    "GLaM64B64EProxy": (8, 4, 8192, 32_768, 64, 64, 51_200, 64, 2, 128, 4),
    "GLaM64B64EProxy_EP": (8, 4, 8192, 32_768, 64, 64, 51_200, 8, 2, 128, 4),
    "Grok": (64, 64, 6144, 32_768, 48, 8, 131_072, 8, 3, 256, 1),
    "Grok_Proxy": (16, 16, 6144, 32_768, 48, 8, 131_072, 8, 3, 64, 1),
    "Grok_Proxy_PP": (16, 16, 6144, 32_768, 48, 8, 131_072, 8, 3, 512, 1),
    "Grok_PP": (64, 64, 6144, 32_768, 48, 8, 131_072, 8, 3, 512, 1),
}


@pytest.mark.parametrize("name", PROXIES)
def test_weights_and_mesh_of_the_mixtures_of_nvidia(name: str, num_params: Any):
    layers, sparse, dims, hidden, heads, keys, words, experts, matrices, gpus, rows = PROXIES[name]
    head_dim = dims // heads
    by_hand = words * dims + dims + layers * 2 * dims
    by_hand += layers * 2 * (heads + keys) * head_dim * dims
    by_hand += sparse * (experts * matrices * dims * hidden + experts * dims)
    by_hand += (layers - sparse) * 3 * dims * hidden
    if name.startswith("GLaM"):
        by_hand += layers * heads * 32  # relative positions
    else:
        by_hand += layers * ((heads + 2 * keys) * head_dim + dims)  # biases
    assert num_params(f"lm.nvidia.{name}") == by_hand
    experiment = resolve(getattr(nvidia, name)())
    mesh = experiment.partitioner
    sizes = (*mesh.ici_mesh_shape, *(mesh.dcn_mesh_shape or ()))
    assert math.prod(sizes) == gpus
    assert experiment.datasets[0].percore_batch_size == rows
