"""Other partitioners than one SPMD mesh: pipelines, with their stack of layers, and pmap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit_experiments.recipes.language_model import remat_policy
from layerkit_experiments.recipes.training import spmd
from layerkit_runner.partitioning import PmapPartitioner

EXPERT_AXES = ("data", "fsdp", "expert", "tensor")
"""Axes of the mesh of a mixture of experts."""


def pipelined(fields: Any) -> Config:
    """Return a partitioner whose mesh has the axis stage before the others; see `spmd`."""
    # Embedding and softmax are in no stage; without these rules the devices of every stage compute
    # them.
    vocab = ("tensor", "stage")
    return spmd(fields, axes=("stage",), vocab=vocab, act_vocab=vocab)


def pmap(_: Any) -> Config:
    """Return a partitioner with the whole state on every device and the batch sharded over all."""
    return PmapPartitioner.HParams.config()


def pipelined_stack(fields: Any) -> Config:
    """Return the config of a stack of layers in the stages of a pipeline."""
    from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer

    return PipelinedTransformer.HParams.config(
        num_stages=fields.NUM_STAGES,
        circular_repeats=fields.CIRCULAR_REPEAT,
        microbatch_size=fields.MICROBATCH_SIZE,
        num_microbatches=fields.NUM_MICROBATCHES,
        stage_remat=remat_policy(fields.CHECKPOINT_POLICY),
        remat=remat_policy(fields.LAYER_CHECKPOINT_POLICY),
    )


class Pipelined:
    """Fields of a pipeline of layers on a mesh of stage × data × fsdp × tensor.

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
    }

    stack = pipelined_stack
    partitioner = pipelined
