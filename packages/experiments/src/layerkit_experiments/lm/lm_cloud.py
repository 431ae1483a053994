"""Smoke and speed tests on synthetic data, with the values of Pax's lm_cloud."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit_experiments.lm.pax import PaxLm
from layerkit_experiments.recipes.meshes import Pipelined, pmap


class LmCloudSpmd(PaxLm, abstract=True):
    """Base of the SPMD experiments on synthetic data.

    Pax's tokens are all 1. These can be learned, and a held-out batch measures how well. A run ends
    after MAX_STEPS, the end of the decay, where Pax's goes on to ten million steps.
    """

    LEARNING_RATE = 2.5e-4
    DIMS_PER_HEAD = 128


class LmCloudSpmdTest(LmCloudSpmd):
    """A tiny model on one device, as a smoke test of 10 steps, each of which is reported."""

    NUM_LAYERS = 2
    MODEL_DIMS = 64
    HIDDEN_DIMS = 256
    NUM_HEADS = 8
    DIMS_PER_HEAD = 8
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [1, 1, 1]
    MAX_STEPS = 10
    SUMMARY_INTERVAL_STEPS = 1


class LmCloudSpmd2B(LmCloudSpmd):
    """2 billion parameters, fully sharded over 4 devices."""

    NUM_LAYERS = 18
    MODEL_DIMS = 3072
    HIDDEN_DIMS = 12288
    NUM_HEADS = 24
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 4, 1]


class LmCloudSpmd2BLimitSteps(LmCloudSpmd):
    """The 2B model for 300 steps."""

    tags = ("speed_test",)

    NUM_LAYERS = 18
    MODEL_DIMS = 3072
    HIDDEN_DIMS = 12288
    NUM_HEADS = 24
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 4, 1]
    MAX_STEPS = 300
    SUMMARY_INTERVAL_STEPS = 100


class LmCloudSpmd32B(LmCloudSpmd):
    """32 billion weights on 64 chips (v4:4x4x4)."""

    NUM_LAYERS = 40
    MODEL_DIMS = 8192
    NUM_HEADS = 64
    PERCORE_BATCH_SIZE = 8.0
    CHECKPOINT_POLICY = "attention_out"
    ICI_MESH_SHAPE = [1, 16, 4]
    shards_features = True


class LmCloudSpmd64B(LmCloudSpmd):
    """64 billion weights on 128 chips (v4:4x4x8)."""

    NUM_LAYERS = 51
    MODEL_DIMS = 10_240
    NUM_HEADS = 80
    PERCORE_BATCH_SIZE = 4.0
    CHECKPOINT_POLICY = "attention_out"
    ICI_MESH_SHAPE = [1, 16, 8]
    shards_features = True


class LmCloudSpmd128B(LmCloudSpmd):
    """129 billion weights on 256 chips (v4:4x8x8)."""

    NUM_LAYERS = 71
    MODEL_DIMS = 12_288
    NUM_HEADS = 96
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [1, 64, 4]
    shards_features = True


class LmCloudSpmd256B(LmCloudSpmd):
    """258 billion weights on 512 chips (v4:8x8x8)."""

    NUM_LAYERS = 80
    MODEL_DIMS = 16_384
    NUM_HEADS = 128
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [1, 64, 8]
    shards_features = True


class LmCloudSpmd512B(LmCloudSpmd):
    """514 billion weights on 1024 chips (v4:8x8x16)."""

    NUM_LAYERS = 102
    MODEL_DIMS = 20_480
    NUM_HEADS = 160
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [1, 64, 16]
    shards_features = True


class LmCloudSpmd1024B(LmCloudSpmd):
    """1.03 trillion weights on 2048 chips (v4:8x16x16)."""

    NUM_LAYERS = 142
    MODEL_DIMS = 24_576
    NUM_HEADS = 192
    PERCORE_BATCH_SIZE = 2.0
    ICI_MESH_SHAPE = [1, 256, 8]
    shards_features = True


class LmCloudSpmdMultislice2B(LmCloudSpmd):
    """The 2B model, data parallel over two slices of 4 chips (v4:2x2x1*2)."""

    tags = ("multislice",)

    NUM_LAYERS = 18
    MODEL_DIMS = 3072
    HIDDEN_DIMS = 12288
    NUM_HEADS = 24
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [1, 4, 1]
    DCN_MESH_SHAPE = [2, 1, 1]


class LmCloudSpmdPipeline9B(Pipelined, PaxLm):
    """9.8 billion weights in 16 pipeline stages of 4 chips (v4:4x4x4)."""

    NUM_LAYERS = 48
    MODEL_DIMS = 4096
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 8.0
    NUM_STAGES = 16
    MICROBATCH_SIZE = 4
    FPROP_DTYPE = "float32"
    LEARNING_RATE = 2.5e-4
    ICI_MESH_SHAPE = [16, 4, 1, 1]


class LmCloudSpmdPipeline175B(Pipelined, PaxLm):
    """174 billion weights in 8 pipeline stages of one node of 16 GPUs each (a100x128)."""

    tags = ("multislice",)

    NUM_LAYERS = 96
    MODEL_DIMS = 12_288
    NUM_HEADS = 96
    DIMS_PER_HEAD = 128
    MAX_SEQ_LEN = 2048
    PERCORE_BATCH_SIZE = 0.75
    NUM_STAGES = 8
    MICROBATCH_SIZE = 2
    LEARNING_RATE = 2.5e-4
    ICI_MESH_SHAPE = [1, 1, 1, 16]
    DCN_MESH_SHAPE = [8, 1, 1, 1]


class LmCloudSpmdPipelineMultislice2B(Pipelined, PaxLm):
    """The 2B model in two pipeline stages, a slice of 4 chips each (v4:2x2x1*2)."""

    tags = ("multislice",)

    NUM_LAYERS = 18
    MODEL_DIMS = 3072
    NUM_HEADS = 24
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 16.0
    NUM_STAGES = 2
    MICROBATCH_SIZE = 4
    LEARNING_RATE = 2.5e-4
    ICI_MESH_SHAPE = [1, 4, 1, 1]
    DCN_MESH_SHAPE = [2, 1, 1, 1]


class LmCloudSpmdPipelineMultislice2BCircular(Pipelined, PaxLm):
    """The pipelined 2B model, three rounds of a microbatch through both slices (v4:2x2x1*2)."""

    tags = ("multislice",)

    NUM_LAYERS = 18
    MODEL_DIMS = 3072
    NUM_HEADS = 24
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 16.0
    NUM_STAGES = 2
    MICROBATCH_SIZE = 8
    CIRCULAR_REPEAT = 3
    LEARNING_RATE = 2.5e-4
    ICI_MESH_SHAPE = [1, 4, 1, 1]
    DCN_MESH_SHAPE = [2, 1, 1, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_LAYERS": 6}


class LmCloudTransformerAdam(PaxLm):
    """A 32-layer model under pmap: the whole state on every device."""

    tags = ("pmap",)

    NUM_LAYERS = 32
    MODEL_DIMS = 1024
    HIDDEN_DIMS = 4096
    NUM_HEADS = 16
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 16.0
    ACTIVATION = "relu"
    SOFTMAX_LOGIT_CAP = None
    COMBINE_QKV = False
    FPROP_DTYPE = "float32"
    CHECKPOINT_POLICY = "none"
    USE_REPEATED_LAYER = False

    unused_fields = (
        *PaxLm.unused_fields,
        *("ICI_MESH_SHAPE", "DCN_MESH_SHAPE", "SEQUENCE_PARALLEL"),
    )

    partitioner = pmap


class LmCloudTransformerAdamTest(LmCloudTransformerAdam):
    """The pmap model with 2 layers."""

    NUM_LAYERS = 2


class LmCloudTransformerAdamLimitSteps(LmCloudTransformerAdam):
    """The pmap model with 10 layers, for 2000 steps."""

    tags = ("speed_test",)

    NUM_LAYERS = 10
    MAX_STEPS = 2000
    SUMMARY_INTERVAL_STEPS = 100
