"""Decoders whose depth and width grow together: with the slice, as Pax's, or with DEPTH.

In Pax's optimal_scaling a layer more is a head of 128 dimensions more. A name ends with the shape
of the slice in chips. The rows without a tensor axis need the memory of v5p. The rules of DEPTH are
those of nanochat (https://github.com/karpathy/nanochat, `scripts/base_train.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.config.checks import check_sizes
from layerkit_experiments.lm.pax import PaxLm
from layerkit_experiments.recipes.language_model import REDUCED_TEXT, LmExperiment, untied_decoder
from layerkit_experiments.recipes.training import adamw, schedule_learning_rate
from layerkit_runner.optim.schedules import linear_warmup_polynomial_decay

_TUNED_DEPTH, _TUNED_BATCH = 12, 2**19


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


class DepthDial(LmExperiment):
    """A decoder whose DEPTH sets its sizes, batch, rate, decay and steps, on 8 GPUs (h100x8).

    A model of DEPTH layers has 64 dimensions per layer, in heads of 128. With N weights in the
    matrices of the layers and the softmax, it sees D = 12·N tokens. A step has B tokens, the power
    of two next to 2¹⁹·(D/D₁₂)^0.383, where D₁₂ is that of DEPTH 12, for which the constants are
    tuned. The rate is 1.8e-3·√(B/2¹⁹)·√(dims₁₂/dims), where dims is WIDTH_TRANSFER if that is set,
    and the decay 0.1·√(B/2¹⁹)·D₁₂/D. The rate falls to a twentieth over the last 65 % of the steps.
    A field that is set replaces its rule.

    nanochat trains matrices by Muon; here all weights have AdamW, with the rate of a speed run of
    nanoGPT (KellerJordan/modded-nanogpt, 2024-06-06). There are no value embeddings or windows.
    """

    DEPTH: int = 20
    """Number of layers, from which the other values follow."""
    DIMS_PER_LAYER: int = 64
    TOKENS_PER_WEIGHT: float = 12.0
    NUM_LAYERS: int | None = None  # type: ignore[assignment]
    MODEL_DIMS: int | None = None  # type: ignore[assignment]
    NUM_HEADS: int | None = None  # type: ignore[assignment]
    PERCORE_BATCH_SIZE: float | None = None  # type: ignore[assignment]
    LEARNING_RATE: float | None = None  # type: ignore[assignment]
    WEIGHT_DECAY: float | None = None  # type: ignore[assignment]
    MAX_STEPS: int | None = None  # type: ignore[assignment]

    DIMS_PER_HEAD: int = 128
    NORM = "rms_norm"
    POSITIONS = "rotary"
    QK_NORM = True
    ACTIVATION = "squared_relu"
    WEIGHT_INIT = "fan_in"
    SCALE_RESIDUAL_INIT = True
    SOFTMAX_LOGIT_CAP = 15.0
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    VOCAB_SIZE = 32_768
    MAX_SEQ_LEN = 2048
    WARMUP_STEPS = 40
    DECAY_START = 0.35
    MIN_LEARNING_RATE_RATIO = 0.05
    ICI_MESH_SHAPE = [1, 8, 1]

    unused_fields = ("DECAYED_WEIGHTS",)
    reduced_fields: ClassVar[Mapping[str, Any]] = {
        **REDUCED_TEXT,
        **dict.fromkeys(("NUM_LAYERS", "MODEL_DIMS", "HIDDEN_DIMS", "NUM_HEADS")),
        "DEPTH": 2,
        "DIMS_PER_HEAD": 32,
    }
    model = untied_decoder

    def __init__(self, **overrides: Any):
        """Create the experiment with the values of the rules in the fields that are None."""
        super().__init__(**overrides)
        for name, value in depth_rules(self).items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def size_fields(self, size: int) -> dict[str, Any]:
        """Return the depth; the other fields follow from it."""
        return {"DEPTH": size}

    def learner(self) -> Config:
        """Return AdamW with a linear warmup, a flat part, and linear decay."""
        ratio = self.MIN_LEARNING_RATE_RATIO
        rate = schedule_learning_rate(self, linear_warmup_polynomial_decay, min_ratio=ratio)
        return adamw(self, rate)


def depth_rules(fields: DepthDial) -> dict[str, Any]:
    """Return the values of fields that follow from DEPTH; see `DepthDial`."""
    check_sizes(None, DEPTH=fields.DEPTH, DIMS_PER_HEAD=fields.DIMS_PER_HEAD)
    check_sizes(None, WIDTH_TRANSFER=fields.WIDTH_TRANSFER)

    def heads(depth: int) -> int:
        return math.ceil(depth * fields.DIMS_PER_LAYER / fields.DIMS_PER_HEAD)

    def tokens(depth: int) -> float:
        dims = heads(depth) * fields.DIMS_PER_HEAD
        return fields.TOKENS_PER_WEIGHT * (12 * depth * dims**2 + fields.VOCAB_SIZE * dims)

    growth = tokens(fields.DEPTH) / tokens(_TUNED_DEPTH)
    batch = 2 ** round(math.log2(_TUNED_BATCH * growth**0.383))
    devices = math.prod(fields.ICI_MESH_SHAPE or ()) * math.prod(fields.DCN_MESH_SHAPE or ())
    scale = math.sqrt(batch / _TUNED_BATCH)
    dims, tuned = (heads(depth) * fields.DIMS_PER_HEAD for depth in (fields.DEPTH, _TUNED_DEPTH))
    return {
        "NUM_LAYERS": fields.DEPTH,
        "MODEL_DIMS": dims,
        "NUM_HEADS": heads(fields.DEPTH),
        "PERCORE_BATCH_SIZE": batch / fields.MAX_SEQ_LEN / devices,
        "LEARNING_RATE": 1.8e-3 * scale * math.sqrt(tuned / (fields.WIDTH_TRANSFER or dims)),
        "WEIGHT_DECAY": 0.1 * scale / growth,
        "MAX_STEPS": int(tokens(fields.DEPTH) // batch),
    }
