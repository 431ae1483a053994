"""Decoders on C4 for several TPU slices, with the values of Pax's c4_multislice.

Each slice holds the whole model, sharded over its chips by fsdp, and only gradients cross the slow
network between slices. `2xv4_128` means two slices of TPU v4-128, which counts cores: 64 chips.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit_experiments.lm.c4 import C4SpmdGpt3AdamOrgHP
from layerkit_experiments.lm.pax import PaxLm
from layerkit_experiments.recipes.language_model import REDUCED_TEXT


class C4Spmd22BAdamMaxText(PaxLm):
    """22 billion weights, sharded by fsdp and tensor over 8 chips.

    Model and optimizer take 44 GB of a chip, more than a v4 has, so that it needs v5p:2x2x2.
    """

    DATA_FORMAT = "seqio"
    EVAL_NUM_BATCHES = 8
    EOS_ID = 1
    NUM_LAYERS = 48
    MODEL_DIMS = 6144
    HIDDEN_DIMS = 24576
    NUM_HEADS = 24
    DIMS_PER_HEAD = 256
    VOCAB_SIZE = 32768
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [1, 4, 2]
    SUMMARY_INTERVAL_STEPS = 10
    CHECKPOINT_EVERY_N_STEPS = 1000

    unused_fields = (
        "OPTIMIZER",
        "DECAYED_WEIGHTS",
    )
    reduced_fields: ClassVar[Mapping[str, Any]] = REDUCED_TEXT


class C4Spmd22BAdam1xv4_128(C4Spmd22BAdamMaxText):  # noqa: N801 - the name in Pax
    """22 billion weights on one slice of 64 chips (v4:4x4x4)."""

    ICI_MESH_SHAPE = [1, 64, 1]


class C4Spmd22BAdam2xv4_128(C4Spmd22BAdamMaxText):  # noqa: N801
    """22 billion weights on two slices of 64 chips (v4:4x4x4*2)."""

    tags = ("multislice",)

    ICI_MESH_SHAPE = [1, 64, 1]
    DCN_MESH_SHAPE = [2, 1, 1]


class C4Spmd22BAdam4xv4_128(C4Spmd22BAdamMaxText):  # noqa: N801
    """22 billion weights on four slices of 64 chips (v4:4x4x4*4)."""

    tags = ("multislice",)

    ICI_MESH_SHAPE = [1, 64, 1]
    DCN_MESH_SHAPE = [4, 1, 1]


class C4Spmd22BAdam1xv4_128LimitSteps(C4Spmd22BAdamMaxText):  # noqa: N801
    """The model of C4Spmd22BAdam1xv4_128 for 300 steps (v4:4x4x4)."""

    tags = ("speed_test",)

    ICI_MESH_SHAPE = [1, 64, 1]
    MAX_STEPS = 300


class C4Spmd22BAdam2xv4_128LimitSteps(C4Spmd22BAdamMaxText):  # noqa: N801
    """The model of C4Spmd22BAdam2xv4_128 for 300 steps (v4:4x4x4*2)."""

    tags = ("multislice", "speed_test")

    ICI_MESH_SHAPE = [1, 64, 1]
    DCN_MESH_SHAPE = [2, 1, 1]
    MAX_STEPS = 300


class C4Spmd22BAdam4xv4_128LimitSteps(C4Spmd22BAdamMaxText):  # noqa: N801
    """The model of C4Spmd22BAdam4xv4_128 for 300 steps (v4:4x4x4*4)."""

    tags = ("multislice", "speed_test")

    ICI_MESH_SHAPE = [1, 64, 1]
    DCN_MESH_SHAPE = [4, 1, 1]
    MAX_STEPS = 300


class C4Spmd22BAdam1xv4_384(C4Spmd22BAdamMaxText):  # noqa: N801
    """25 billion weights, half as deep and wider, on one slice of 192 chips (v4:4x4x12)."""

    NUM_LAYERS = 24
    MODEL_DIMS = 9216
    HIDDEN_DIMS = 36864
    DIMS_PER_HEAD = 384
    PERCORE_BATCH_SIZE = 10.0
    ICI_MESH_SHAPE = [1, 192, 1]


class C4Spmd22BAdam2xv4_384(C4Spmd22BAdamMaxText):  # noqa: N801
    """25 billion weights, half as deep and wider, on two slices of 192 chips (v4:4x4x12*2)."""

    tags = ("multislice",)

    NUM_LAYERS = 24
    MODEL_DIMS = 9216
    HIDDEN_DIMS = 36864
    DIMS_PER_HEAD = 384
    PERCORE_BATCH_SIZE = 10.0
    ICI_MESH_SHAPE = [1, 192, 1]
    DCN_MESH_SHAPE = [2, 1, 1]


class C4Spmd22BAdam1xv4_8(C4Spmd22BAdamMaxText):  # noqa: N801
    """0.9 billion weights (not 22) on one slice of 4 chips (v4:2x2x1)."""

    NUM_LAYERS = 16
    MODEL_DIMS = 2048
    HIDDEN_DIMS = 8192
    NUM_HEADS = 8
    ICI_MESH_SHAPE = [1, 4, 1]


class C4Spmd22BAdam2xv4_8(C4Spmd22BAdamMaxText):  # noqa: N801
    """The smallest run over two slices, of 4 chips each (v4:2x2x1*2)."""

    tags = ("multislice",)

    NUM_LAYERS = 16
    MODEL_DIMS = 2048
    HIDDEN_DIMS = 8192
    NUM_HEADS = 8
    ICI_MESH_SHAPE = [1, 4, 1]
    DCN_MESH_SHAPE = [2, 1, 1]


class C4Spmd22BAdam4xv4_8(C4Spmd22BAdamMaxText):  # noqa: N801
    """The smallest run over four slices, of 4 chips each (v4:2x2x1*4)."""

    tags = ("multislice",)

    NUM_LAYERS = 16
    MODEL_DIMS = 2048
    HIDDEN_DIMS = 8192
    NUM_HEADS = 8
    ICI_MESH_SHAPE = [1, 4, 1]
    DCN_MESH_SHAPE = [4, 1, 1]


class C4Spmd22BAdam1xv4_8LimitSteps(C4Spmd22BAdamMaxText):  # noqa: N801
    """The model of C4Spmd22BAdam1xv4_8 for 300 steps (v4:2x2x1)."""

    tags = ("speed_test",)

    NUM_LAYERS = 16
    MODEL_DIMS = 2048
    HIDDEN_DIMS = 8192
    NUM_HEADS = 8
    ICI_MESH_SHAPE = [1, 4, 1]
    MAX_STEPS = 300


class C4Spmd22BAdam2xv4_8LimitSteps(C4Spmd22BAdamMaxText):  # noqa: N801
    """The model of C4Spmd22BAdam2xv4_8 for 300 steps (v4:2x2x1*2)."""

    tags = ("multislice", "speed_test")

    NUM_LAYERS = 16
    MODEL_DIMS = 2048
    HIDDEN_DIMS = 8192
    NUM_HEADS = 8
    ICI_MESH_SHAPE = [1, 4, 1]
    DCN_MESH_SHAPE = [2, 1, 1]
    MAX_STEPS = 300


class C4Spmd22BAdam4xv4_8LimitSteps(C4Spmd22BAdamMaxText):  # noqa: N801
    """The model of C4Spmd22BAdam4xv4_8 for 300 steps (v4:2x2x1*4)."""

    tags = ("multislice", "speed_test")

    NUM_LAYERS = 16
    MODEL_DIMS = 2048
    HIDDEN_DIMS = 8192
    NUM_HEADS = 8
    ICI_MESH_SHAPE = [1, 4, 1]
    DCN_MESH_SHAPE = [4, 1, 1]
    MAX_STEPS = 300


class C4Spmd32BAdam1xv5_256(C4Spmd22BAdamMaxText):  # noqa: N801
    """32 billion weights on one slice of 128 chips (v5p:4x4x8)."""

    NUM_LAYERS = 40
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 32768
    NUM_HEADS = 32
    MAX_SEQ_LEN = 2048
    PERCORE_BATCH_SIZE = 2.0
    ICI_MESH_SHAPE = [1, 128, 1]


class C4Spmd32BAdam2xv5_256(C4Spmd22BAdamMaxText):  # noqa: N801
    """32 billion weights on two slices of 128 chips (v5p:4x4x8*2)."""

    tags = ("multislice",)

    NUM_LAYERS = 40
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 32768
    NUM_HEADS = 32
    MAX_SEQ_LEN = 2048
    PERCORE_BATCH_SIZE = 2.0
    ICI_MESH_SHAPE = [1, 128, 1]
    DCN_MESH_SHAPE = [2, 1, 1]


class C4SpmdGpt3AdamDataParallel2x16x16(C4SpmdGpt3AdamOrgHP):
    """100 steps of GPT-3 175B on two slices of 256 chips (v4:4x8x8*2)."""

    tags = ("multislice",)

    PERCORE_BATCH_SIZE = 0.5
    ICI_MESH_SHAPE = [1, 16, 16]
    DCN_MESH_SHAPE = [2, 1, 1]
    MAX_STEPS = 100
    CHECKPOINT_EVERY_N_STEPS = 2000
