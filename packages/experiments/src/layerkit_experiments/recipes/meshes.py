"""Recipes of parallelism: SPMD meshes, pipelines and pmap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.base.sharding import DEFAULT_RULES, ShardingRules
from layerkit.config import Config
from layerkit_experiments.recipes.decoder import TransformerLmModel, remat_policy
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner


class Sharded:
    """Sharding rules of a mesh with the axis tensor."""

    SEQUENCE_PARALLEL: bool = False
    """True to split norms and residuals by position over tensor."""

    def rules(self) -> ShardingRules:
        """Return the sharding rules of the partitioner."""
        if self.SEQUENCE_PARALLEL:
            return DEFAULT_RULES.replace(residual_length=("context", "tensor"))
        return DEFAULT_RULES


class Spmd(Sharded):
    """One program over a mesh of data × fsdp × tensor."""

    ICI_MESH_SHAPE: list[int] | None = None
    """[data, fsdp, tensor] within a slice; None puts all devices on data."""
    DCN_MESH_SHAPE: list[int] | None = None
    """[data, fsdp, tensor] across slices; None for one slice."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {"ICI_MESH_SHAPE": None, "DCN_MESH_SHAPE": None}

    def partitioner(self) -> Config:
        """Return the config of the partitioner."""
        return SpmdPartitioner.HParams.config(
            ici_mesh_shape=self.ICI_MESH_SHAPE,
            dcn_mesh_shape=self.DCN_MESH_SHAPE,
            rules=self.rules(),
        )


class SpmdFeatures(Spmd):
    """One program over a mesh, with the activations between layers sharded over tensor (Pax).

    Without this a device keeps the whole inputs of its layers, which is too much for the largest
    models. SEQUENCE_PARALLEL shards them by position instead.
    """

    def rules(self) -> ShardingRules:
        """Return the sharding rules of the partitioner."""
        rules = super().rules()
        return rules if self.SEQUENCE_PARALLEL else rules.replace(act_embed="tensor")


class Pipelined(Sharded, TransformerLmModel):
    """A pipeline of layers on a mesh of stage × data × fsdp × tensor.

    CHECKPOINT_POLICY is the rematerialization policy of a stage for each microbatch.
    """

    tags: ClassVar[tuple[str, ...]] = ("pipeline",)

    NUM_STAGES: int = 1
    """Number of pipeline stages, the first size of the mesh."""
    CIRCULAR_REPEAT: int = 1
    """Number of rounds of a microbatch; 1 is GPipe."""
    MICROBATCH_SIZE: int | None = None
    """Number of rows of a microbatch; alternatively set NUM_MICROBATCHES."""
    NUM_MICROBATCHES: int | None = None
    """Number of microbatches of the global batch; alternatively set MICROBATCH_SIZE."""
    LAYER_CHECKPOINT_POLICY: str = "none"
    """Policy of each layer while its stage is recomputed for one microbatch."""
    ICI_MESH_SHAPE: list[int] | None = None
    """[stage, data, fsdp, tensor] within a slice."""
    DCN_MESH_SHAPE: list[int] | None = None
    """[stage, data, fsdp, tensor] across slices; None for one slice."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "NUM_STAGES": 2,
        "MICROBATCH_SIZE": None,
        "NUM_MICROBATCHES": 2,
        "ICI_MESH_SHAPE": [1, 1, 1, 1],
        "DCN_MESH_SHAPE": None,
    }

    def stack(self) -> Config:
        """Return the config of the pipelined stack."""
        from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer

        return PipelinedTransformer.HParams.config(
            num_stages=self.NUM_STAGES,
            circular_repeats=self.CIRCULAR_REPEAT,
            microbatch_size=self.MICROBATCH_SIZE,
            num_microbatches=self.NUM_MICROBATCHES,
            stage_remat=remat_policy(self.CHECKPOINT_POLICY),
            remat=remat_policy(self.LAYER_CHECKPOINT_POLICY),
        )

    def rules(self) -> ShardingRules:
        """Return the sharding rules of the partitioner."""
        # Embedding and softmax are in no stage; without these rules the devices of every stage
        # compute them.
        vocab = ("tensor", "stage")
        return super().rules().replace(vocab=vocab, act_vocab=vocab)

    def partitioner(self) -> Config:
        """Return the config of the partitioner."""
        return SpmdPartitioner.HParams.config(
            mesh_axis_names=("stage", "data", "fsdp", "tensor"),
            ici_mesh_shape=self.ICI_MESH_SHAPE,
            dcn_mesh_shape=self.DCN_MESH_SHAPE,
            rules=self.rules(),
        )


class PipelinedFeatures(Pipelined):
    """A pipeline with the activations between layers sharded over tensor; see `SpmdFeatures`."""

    def rules(self) -> ShardingRules:
        """Return the sharding rules of the partitioner."""
        rules = super().rules()
        return rules if self.SEQUENCE_PARALLEL else rules.replace(act_embed="tensor")


class Pmap:
    """The whole state on every device, with the batch sharded over all devices."""

    tags: ClassVar[tuple[str, ...]] = ("pmap",)

    def partitioner(self) -> Config:
        """Return the config of the partitioner."""
        return PmapPartitioner.HParams.config()
