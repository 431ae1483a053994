"""Mixtures of experts as Praxis trains them, after GShard: the decoders of its GLaM and Grok.

Groups of tokens have slots of their own, and the load is balanced within each group (Lepikhin et
al., 2020, arXiv:2006.16668). Both decoders share their embedding with the softmax: it starts with
standard deviation 1, and the logits are divided by √MODEL_DIMS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.layers import RelativeBias, ReLU
from layerkit_experiments.lm.experiment import LmExperiment
from layerkit_experiments.recipes.experts import MixtureOfExperts
from layerkit_experiments.recipes.local_files import SyntheticTokens
from layerkit_experiments.recipes.quantization import Fp8Field


class GShardExperts(MixtureOfExperts):
    """Experts with slots for each group of tokens, and the first draws of GShard."""

    NUM_GROUPS: int | None = None
    """Groups of a batch, each with slots of its own; None for one per row."""
    CAPACITY_FACTOR = 2.0

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_GROUPS": None}

    def _experts(self, dense: Config) -> Config:
        experts = super()._experts(dense)
        wide = 4 * self.MODEL_DIMS if self.HIDDEN_DIMS is None else self.HIDDEN_DIMS
        init = unit_variance(self.MODEL_DIMS)
        experts.set(
            num_groups=self.NUM_GROUPS,
            balance_per_group=True,
            weight_init=init,
            down_init=unit_variance(wide),
        )
        experts.router_tpl.weight_init = init
        return experts


class GShardDecoder(Fp8Field, SyntheticTokens, LmExperiment, abstract=True):
    """Pre-norm decoder of synthetic tokens with RMS norms, gated GELU and a z-loss."""

    NORM = "rms_norm"
    ACTIVATION = "gelu"
    USE_GATED_ACTIVATION = True
    INIT_STD = 0.023
    FPROP_DTYPE = "bfloat16"

    def model(self) -> Config:
        """Return the config of the LanguageModel."""
        model = super().model()
        model.lm_tpl.softmax_tpl.set(
            weight_init=WeightInit.Gaussian(1.0),
            logit_scale=self.MODEL_DIMS**-0.5,
            z_loss_weight=1e-4,
        )
        return model


class GlamLayers(GShardDecoder, abstract=True):
    """Layers of Praxis' GLaM (Du et al., 2021, arXiv:2112.06905).

    Attention has relative positions, no scale and a fixed sink. Projections have no biases.
    """

    POSITIONS = "none"
    CHECKPOINT_POLICY = "full"

    def model(self) -> Config:
        """Return the config of the LanguageModel."""
        model = super().model()
        layer = model.lm_tpl.stack_tpl.layer_tpl
        dims, heads = self.MODEL_DIMS, self.NUM_HEADS
        head_dim = dims // heads if self.DIMS_PER_HEAD is None else self.DIMS_PER_HEAD
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
        return model


class GlamExperts(GShardExperts):
    """Experts of Praxis' GLaM in the first of every two layers, with ReLU and without a gate."""

    EXPERT_PERIOD = 2

    def _experts(self, dense: Config) -> Config:
        experts = super()._experts(dense)
        experts.activation_tpl = ReLU.HParams.config()
        return experts


class GrokDecoder(GShardExperts, GShardDecoder, abstract=True):
    """Praxis' decoder of Grok-1: eight experts in each layer, rotary positions and grouped queries.

    The released Grok-1 also caps the logits of attention at 30, scales embeddings and logits, and
    normalizes the outputs of its blocks.
    """

    NUM_HEADS = 48
    NUM_KV_HEADS = 8
    DIMS_PER_HEAD = 128
    MODEL_DIMS = 6144
    HIDDEN_DIMS = 32_768
    VOCAB_SIZE = 131_072
    MAX_SEQ_LEN = 8192
    POSITIONS = "rotary"
    ATTENTION_BIAS = True
    NUM_EXPERTS = 8
    USE_GATED_EXPERTS = True
    # Praxis names the policy SAVE_QKV_OUT_PROJ, and saves projections only where they are combined.
    CHECKPOINT_POLICY = "attention_out"

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}


def unit_variance(fan_in: int) -> WeightInit:
    """Return the uniform initializer of variance 1 / fan_in."""
    return WeightInit.Uniform((3 / fan_in) ** 0.5)
