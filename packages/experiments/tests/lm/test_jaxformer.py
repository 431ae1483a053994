"""The model with everything in it: latent attention, shared experts, noise, and a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from layerkit.config import target_of
from layerkit.errors import ConfigError
from layerkit_experiments.lm.jaxformer import Jaxformer1B
from layerkit_runner.run.resolve import resolve


def test_fields_are_those_of_the_original():
    experiment = resolve(Jaxformer1B())
    lm = experiment.task.model.lm_tpl
    assert (lm.num_layers, lm.model_dims, lm.hidden_dims, lm.num_heads) == (16, 768, 3072, 12)
    assert lm.position_tpl is None and lm.vocab_size == 100_277
    attention = lm.stack_tpl.layer_tpl.attention_tpl
    assert target_of(attention).__name__ == "MultiHeadLatentAttention"
    assert (attention.latent_dims, attention.query_latent_dims) == (64, 64)
    assert (attention.plain_dim_per_head, attention.rotary_dim_per_head) == (64, 64)
    experts = lm.stack_tpl.layer_tpl.feed_forward_tpl
    assert (experts.num_experts, experts.num_experts_per_token) == (8, 2)
    assert (experts.num_shared_experts, experts.capacity_factor) == (2, 1.5)
    assert experts.router_tpl.use_noise and experts.load_balance_weight == 1e-4
    assert (lm.stack_tpl.num_stages, lm.stack_tpl.num_microbatches) == (2, 8)
    assert experiment.partitioner.mesh_axis_names == ("stage", "data", "fsdp", "tensor")
    assert experiment.partitioner.ici_mesh_shape == [2, 8, 1, 2]
    schedule = experiment.task.train.learner.learning_rate.Instantiate()
    for step, value in {0: 0.0, 2000: 4e-3, 15_000: 4e-5, 20_000: 4e-5}.items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-5)


def test_a_billion_weights_three_hundred_million_of_them_for_each_token(num_params: Any):
    count = num_params("lm.jaxformer.Jaxformer1B")
    assert 0.8e9 < count < 1.0e9
    unused = 16 * 6 * 2 * 768 * 3072
    assert 0.25e9 < count - unused - 100_277 * 768 < 0.35e9


@pytest.mark.parametrize(("field", "value"), [("DIMS_PER_HEAD", 64), ("POSITIONS", "rotary")])
def test_field_of_plain_attention_raises(raises: Any, field: str, value: Any):
    with raises(ConfigError, field=field, value=value):
        resolve(Jaxformer1B(**{field: value}))
