"""Mixtures of experts in place of feed-forward layers, also as Praxis trains them.

Praxis' mixtures follow GShard: groups of tokens have slots of their own, and the load is balanced
within each group (Lepikhin et al., 2020, arXiv:2006.16668).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.config.checks import check_sizes
from layerkit.layers import MoeFeedForward, RelativeBias, ReLU
from layerkit_experiments.recipes.language_model import decoder, repeat_layers, set_paths

# Fields whose value is that of a path in the config of the MoeFeedForward.
_PATHS = {
    "NUM_EXPERTS": "num_experts",
    "NUM_EXPERTS_PER_TOKEN": "num_experts_per_token",
    "NUM_SHARED_EXPERTS": "num_shared_experts",
    "CAPACITY_FACTOR": "capacity_factor",
    "USE_GATED_EXPERTS": "use_gate",
    "LOAD_BALANCE_WEIGHT": "load_balance_weight",
    "ROUTER_Z_WEIGHT": "router_z_weight",
    "ROUTER_NOISE": "router_tpl.use_noise",
}


class MixtureOfExperts:
    """Fields of experts in every EXPERT_PERIOD-th layer. Put it before `LmExperiment`.

    USE_GATED_ACTIVATION and FEED_FORWARD_BIAS apply to dense layers only; experts have no biases.
    """

    tags: ClassVar[tuple[str, ...]] = ("moe",)

    NUM_EXPERTS: int = 8
    NUM_EXPERTS_PER_TOKEN: int = 2
    NUM_SHARED_EXPERTS: int = 0
    """Experts that all tokens use (DeepSeekMoE; arXiv:2401.06066)."""
    EXPERT_PERIOD: int = 1
    """Period of the layer pattern, whose first layer has experts and whose others are dense."""
    CAPACITY_FACTOR: float | None = None
    """Slots of an expert relative to the mean number of tokens per expert; None drops no token.
    Balanced routing fills a factor of NUM_EXPERTS_PER_TOKEN."""
    USE_GATED_EXPERTS: bool = False
    ROUTER_NOISE: bool = False
    """Learned noise on the router's logits in training (Shazeer et al., 2017; arXiv:1701.06538)."""
    LOAD_BALANCE_WEIGHT: float = 0.01
    ROUTER_Z_WEIGHT: float = 0.0

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_EXPERTS": 4}

    def model(self) -> Config:
        """Return the config of the LanguageModel."""
        return add_experts(self, decoder(self))


def add_experts(fields: Any, model: Config, experts: Config | None = None) -> Config:
    """Return the config of a LanguageModel with experts in every EXPERT_PERIOD-th layer.

    Args:
      fields: Experiment with the fields of `MixtureOfExperts`.
      model: Config of the model with dense layers, which is changed.
      experts: Config of the feed-forward layer with experts; None for `mixture(fields, model)`.
    """
    check_sizes(None, EXPERT_PERIOD=fields.EXPERT_PERIOD)
    stack = model.lm_tpl.stack_tpl
    dense = stack.layer_tpl
    sparse = dense.clone()
    sparse.feed_forward_tpl = mixture(fields, model) if experts is None else experts
    if fields.EXPERT_PERIOD == 1:
        stack.layer_tpl = sparse
    else:
        repeat_layers(model, sparse, *[dense] * (fields.EXPERT_PERIOD - 1))
    return model


def mixture(fields: Any, model: Config) -> Config:
    """Return the config of experts with the activation of the dense layers of a model."""
    dense = model.lm_tpl.stack_tpl.layer_tpl.feed_forward_tpl
    experts: Config = MoeFeedForward.HParams.config(
        activation_tpl=dense.activation_tpl.clone(), down_init=dense.down_init
    )
    set_paths(experts, fields, _PATHS)
    if fields.NUM_SHARED_EXPERTS:
        experts.shared_tpl.down_init = dense.down_init
    return experts


def gshard_mixture(fields: Any, model: Config) -> Config:
    """Return the config of experts with slots for each group of tokens, and GShard's first draws.

    Args:
      fields: Experiment with the fields of `MixtureOfExperts`, and NUM_GROUPS.
      model: Config of the model with dense layers.
    """
    experts = mixture(fields, model)
    init = unit_variance(fields.MODEL_DIMS)
    experts.set(
        num_groups=fields.NUM_GROUPS,
        balance_per_group=True,
        weight_init=init,
        down_init=unit_variance(model.lm_tpl.hidden_dims),
    )
    experts.router_tpl.weight_init = init
    return experts


def gshard_decoder(fields: Any) -> Config:
    """Return the config of Praxis' decoder of GLaM and Grok with dense layers, and a z-loss.

    The embedding, which is also the softmax, starts with standard deviation 1, and the logits are
    divided by √MODEL_DIMS.
    """
    model = decoder(fields)
    model.lm_tpl.softmax_tpl.set(
        weight_init=WeightInit.Gaussian(1.0),
        logit_scale=fields.MODEL_DIMS**-0.5,
        z_loss_weight=1e-4,
    )
    return model


def praxis_glam(fields: Any) -> Config:
    """Return the config of Praxis' GLaM (Du et al., 2021, arXiv:2112.06905).

    Attention has relative positions, no scale and a fixed sink, and projections have no biases.
    Experts have ReLU and no gate.
    """
    model = gshard_decoder(fields)
    layer = model.lm_tpl.stack_tpl.layer_tpl
    dims, heads = fields.MODEL_DIMS, fields.NUM_HEADS
    head_dim = dims // heads if fields.DIMS_PER_HEAD is None else fields.DIMS_PER_HEAD
    bias = RelativeBias.HParams.config()
    bias.weight_init = WeightInit.Gaussian((heads * bias.num_buckets) ** -0.5)
    attention = layer.attention_tpl
    attention.set(relative_bias_tpl=bias, logit_scale=1.0, sink_logit=0.0)
    # The variance of a logit is 1 at first, without a scale.
    attention.query_tpl.params_init = WeightInit.Gaussian((dims * head_dim) ** -0.5)
    attention.key_tpl.params_init = WeightInit.Gaussian(dims**-0.5)
    attention.value_tpl.params_init = WeightInit.Gaussian(dims**-0.5)
    attention.output_tpl.params_init = WeightInit.Gaussian((heads * head_dim) ** -0.5)
    feed_forward = layer.feed_forward_tpl
    feed_forward.linear_tpl.params_init = unit_variance(dims)
    feed_forward.down_init = unit_variance(model.lm_tpl.hidden_dims)
    experts = gshard_mixture(fields, model)
    experts.activation_tpl = ReLU.HParams.config()
    return add_experts(fields, model, experts)


def unit_variance(fan_in: int) -> WeightInit:
    """Return the uniform initializer of variance 1 / fan_in."""
    return WeightInit.Uniform((3 / fan_in) ** 0.5)
