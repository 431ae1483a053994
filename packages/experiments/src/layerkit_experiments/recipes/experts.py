"""Mixtures of experts and their mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config, target_of
from layerkit.config.checks import check_sizes
from layerkit.layers import MoeFeedForward
from layerkit_experiments.recipes.decoder import TransformerLmModel
from layerkit_experiments.recipes.meshes import Pipelined, Spmd


class MixtureOfExperts(TransformerLmModel):
    """Experts instead of a feed-forward layer, in every EXPERT_PERIOD-th layer.

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
        """Return the config of the LanguageModel.

        Raises:
          ConfigError: EXPERT_PERIOD is below 1, or a field of the dense model is invalid.
        """
        model = super().model()
        check_sizes(None, EXPERT_PERIOD=self.EXPERT_PERIOD)
        stack = model.lm_tpl.stack_tpl
        dense = stack.layer_tpl
        sparse = dense.clone()
        sparse.feed_forward_tpl = self._experts(dense.feed_forward_tpl)
        if self.EXPERT_PERIOD == 1:
            stack.layer_tpl = sparse
        else:
            stack.layer_tpl = Config(target_of(stack)).layer_tpl
            others = tuple(dense.clone() for _ in range(self.EXPERT_PERIOD - 1))
            stack.block_tpls = (sparse, *others)
        return model

    def _experts(self, dense: Config) -> Config:
        experts = MoeFeedForward.HParams.config(
            num_experts=self.NUM_EXPERTS,
            num_experts_per_token=self.NUM_EXPERTS_PER_TOKEN,
            num_shared_experts=self.NUM_SHARED_EXPERTS,
            capacity_factor=self.CAPACITY_FACTOR,
            use_gate=self.USE_GATED_EXPERTS,
            activation_tpl=dense.activation_tpl.clone(),
            down_init=dense.down_init,
            load_balance_weight=self.LOAD_BALANCE_WEIGHT,
            router_z_weight=self.ROUTER_Z_WEIGHT,
        )
        experts.router_tpl.use_noise = self.ROUTER_NOISE
        if self.NUM_SHARED_EXPERTS:
            experts.shared_tpl.down_init = dense.down_init
        return experts


class SpmdExperts(Spmd):
    """One program over a mesh of data × fsdp × expert × tensor."""

    ICI_MESH_SHAPE: list[int] | None = None
    """[data, fsdp, expert, tensor] within a slice; None puts all devices on data."""
    DCN_MESH_SHAPE: list[int] | None = None
    """[data, fsdp, expert, tensor] across slices; None for one slice."""

    def partitioner(self) -> Config:
        """Return the config of the partitioner."""
        partitioner = super().partitioner()
        partitioner.mesh_axis_names = ("data", "fsdp", "expert", "tensor")
        return partitioner


class PipelinedExperts(Pipelined):
    """A pipeline of layers on a mesh of stage × data × fsdp × expert × tensor."""

    ICI_MESH_SHAPE: list[int] | None = None
    """[stage, data, fsdp, expert, tensor] within a slice."""
    DCN_MESH_SHAPE: list[int] | None = None
    """[stage, data, fsdp, expert, tensor] across slices; None for one slice."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {"ICI_MESH_SHAPE": [1, 1, 1, 1, 1]}

    def partitioner(self) -> Config:
        """Return the config of the partitioner."""
        partitioner = super().partitioner()
        partitioner.mesh_axis_names = ("stage", "data", "fsdp", "expert", "tensor")
        return partitioner
