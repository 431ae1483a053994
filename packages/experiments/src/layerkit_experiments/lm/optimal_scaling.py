"""Decoders whose depth and width grow together with the slice, with Pax's optimal_scaling.

A layer more is a head of 128 dimensions more. A name ends with the shape of the slice in chips. The
rows without a tensor axis need the memory of v5p.
"""

from __future__ import annotations

from layerkit_experiments.lm.pax import PaxLm


class OptimalScaling(PaxLm, abstract=True):
    """Base of the decoders, which keep the outputs of projections for the backward pass."""

    CHECKPOINT_POLICY = "dots_no_batch"
    DIMS_PER_HEAD = 128
    LEARNING_RATE = 2.5e-4

    shards_features = True


class OptimalScaling2x2x1(OptimalScaling):
    """4 billion weights on 4 chips (v5p:2x2x1)."""

    NUM_LAYERS = 28
    MODEL_DIMS = 3584
    NUM_HEADS = 28
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [1, 4, 1]


class OptimalScaling2x2x2(OptimalScaling):
    """7 billion weights on 8 chips (v5p:2x2x2)."""

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    NUM_HEADS = 32
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 8, 1]


class OptimalScaling2x2x4(OptimalScaling):
    """9 billion weights on 16 chips (v5p:2x2x4)."""

    NUM_LAYERS = 36
    MODEL_DIMS = 4608
    NUM_HEADS = 36
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 16, 1]


class OptimalScaling2x4x4(OptimalScaling):
    """13 billion weights on 32 chips (v5p:2x4x4)."""

    NUM_LAYERS = 40
    MODEL_DIMS = 5120
    NUM_HEADS = 40
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 32, 1]


class OptimalScaling4x4x4(OptimalScaling):
    """18 billion weights on 64 chips (v5p:4x4x4)."""

    NUM_LAYERS = 45
    MODEL_DIMS = 5760
    NUM_HEADS = 45
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 64, 1]


class OptimalScaling4x4x8(OptimalScaling):
    """25 billion weights on 128 chips (v5p:4x4x8)."""

    NUM_LAYERS = 50
    MODEL_DIMS = 6400
    NUM_HEADS = 50
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [1, 128, 1]


class OptimalScaling4x8x8(OptimalScaling):
    """35 billion weights on 256 chips (v4:4x8x8)."""

    NUM_LAYERS = 56
    MODEL_DIMS = 7168
    NUM_HEADS = 56
    PERCORE_BATCH_SIZE = 2.0
    ICI_MESH_SHAPE = [1, 64, 4]


class OptimalScaling4x8x16(OptimalScaling):
    """52 billion weights on 512 chips (v4:4x8x16)."""

    NUM_LAYERS = 64
    MODEL_DIMS = 8192
    NUM_HEADS = 64
    PERCORE_BATCH_SIZE = 2.0
    ICI_MESH_SHAPE = [1, 128, 4]


class OptimalScaling4x16x16(OptimalScaling):
    """52 billion weights on 1024 chips (v4:4x16x16)."""

    NUM_LAYERS = 64
    MODEL_DIMS = 8192
    NUM_HEADS = 64
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 256, 4]


class OptimalScaling4x16x32(OptimalScaling):
    """52 billion weights on 2048 chips (v4:4x16x32)."""

    NUM_LAYERS = 64
    MODEL_DIMS = 8192
    NUM_HEADS = 64
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 512, 4]


class OptimalScaling4x24x32(OptimalScaling):
    """52 billion weights on 3072 chips (v4:4x24x32)."""

    NUM_LAYERS = 64
    MODEL_DIMS = 8192
    NUM_HEADS = 64
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 768, 4]
