"""GLaM at the sizes of its table 4 (Du et al., 2021; arXiv:2112.06905).

A decoder with relative positions in each layer and RMS norms. The first of every two layers has
experts, of which a token uses two; the others have a gated GELU. Batches are the published million
tokens: 1024 rows of 1024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.layers import RelativeBias
from layerkit_experiments.recipes.experts import (
    MixtureOfExperts,
    add_experts,
    gshard_decoder,
    gshard_mixture,
)
from layerkit_experiments.recipes.language_model import (
    REDUCED_TEXT,
    TEXT_FIELDS,
    DataFormat,
    LmExperiment,
    decoder,
)
from layerkit_experiments.recipes.meshes import EXPERT_AXES
from layerkit_experiments.recipes.optimizers import adafactor_sqrt, capped_cosine


class Glam(MixtureOfExperts, LmExperiment, abstract=True):
    """Common values of the family: 64 experts, of which each token uses two."""

    CONSTANT_STEPS: int | float = 10_000
    """Steps, or a fraction of MAX_STEPS, at LEARNING_RATE. It then falls as 1/√step."""
    SECOND_MOMENT_DECAY: float = 0.8
    """Exponent c of the decay 1 - step^-c of the factored second moments."""
    UPDATE_RMS_CAP: float | None = 1.0

    VOCAB_SIZE = 256_000
    MAX_SEQ_LEN = 1024
    NORM = "rms_norm"
    ACTIVATION = "gelu"
    USE_GATED_ACTIVATION = True
    POSITIONS = "none"
    WEIGHT_INIT = "fan_in"
    NUM_EXPERTS = 64
    EXPERT_PERIOD = 2
    # As many slots as choices, so that balanced routing drops nothing.
    CAPACITY_FACTOR = 2.0
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    LEARNING_RATE = 0.01
    CLIP_GRADIENT_NORM = None
    MAX_STEPS = 500_000

    unused_fields = (
        *("OPTIMIZER", "ADAM_BETA1", "ADAM_BETA2", "ADAM_EPSILON", "WEIGHT_DECAY"),
        *("DECAYED_WEIGHTS", "LEARNING_RATE_SCHEDULE"),
        *("WARMUP_STEPS", "DECAY_START", "DECAY_END", "MIN_LEARNING_RATE_RATIO"),
    )
    reduced_fields: ClassVar[Mapping[str, Any]] = {**REDUCED_TEXT, "LEARNING_RATE": 0.03}
    learner = adafactor_sqrt
    mesh_axes = EXPERT_AXES

    def model(self) -> Config:
        """Return the config of the LanguageModel, whose only positions are relative biases (T5)."""
        model = decoder(self)
        bias = RelativeBias.HParams.config()
        model.lm_tpl.stack_tpl.layer_tpl.attention_tpl.relative_bias_tpl = bias
        return add_experts(self, model)


class Glam126M64E(Glam):
    """GLaM 0.1B/64E: 1.9B weights without the embedding, on 64 chips (v5p:4x4x4)."""

    NUM_LAYERS = 12
    MODEL_DIMS = 768
    HIDDEN_DIMS = 3072
    NUM_HEADS = 12
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [1, 1, 64, 1]


class Glam8B64E(Glam):
    """GLaM 8B/64E: 143B weights, 9.8B of them for each token, on 256 chips (v5p:8x8x4)."""

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16384
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [1, 4, 64, 1]


class Glam64B64E(Glam):
    """GLaM 64B/64E: 1.2T weights, 96.6B of them for each token, on 1024 chips (v4:8x8x16)."""

    NUM_LAYERS = 64
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 32768
    NUM_HEADS = 128
    DIMS_PER_HEAD = 128
    SOFTMAX_CHUNK_SIZE = 256  # 3 GB of a chip are free
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 16, 8, 8]


class PraxisExperts(LmExperiment, abstract=True):
    """Praxis' decoder of Grok-1: eight experts in each layer, rotary positions, grouped queries.

    The released Grok-1 also caps the logits of attention at 30, scales embeddings and logits, and
    normalizes the outputs of its blocks.
    """

    tags: ClassVar[tuple[str, ...]] = ("moe",)

    NUM_GROUPS: int | None = None
    """Groups of a batch, each with slots of its own; None for one per row."""
    USE_ADAFACTOR: bool = False
    """Use Pax's `ShardedAdafactor`, with a momentum in int8 and factors of the second moment."""
    USE_FP8: bool = False
    """Pax's name of `QUANTIZATION="fp8_delayed"`."""
    UPDATE_RMS_CAP: float | None = 1.0
    # The fields of MixtureOfExperts.
    NUM_EXPERTS: int = 8
    NUM_EXPERTS_PER_TOKEN: int = 2
    NUM_SHARED_EXPERTS: int = 0
    EXPERT_PERIOD: int = 1
    CAPACITY_FACTOR: float | None = 2.0
    USE_GATED_EXPERTS: bool = True
    ROUTER_NOISE: bool = False
    LOAD_BALANCE_WEIGHT: float = 0.01
    ROUTER_Z_WEIGHT: float = 0.0

    NUM_HEADS = 48
    NUM_KV_HEADS: int | None = 8
    DIMS_PER_HEAD = 128
    MODEL_DIMS = 6144
    HIDDEN_DIMS = 32_768
    VOCAB_SIZE = 131_072
    MAX_SEQ_LEN = 8192
    NORM = "rms_norm"
    USE_GATED_ACTIVATION = True
    POSITIONS = "rotary"
    ATTENTION_BIAS = True
    INIT_STD = 0.023
    FPROP_DTYPE = "bfloat16"
    # Praxis names the policy SAVE_QKV_OUT_PROJ, and saves projections only where they are combined.
    CHECKPOINT_POLICY = "attention_out"

    DATA_FORMAT: DataFormat = "synthetic"
    EVAL_NUM_BATCHES: int | None = 1
    EOS_ID = None
    LEARNING_RATE = 6e-4
    WEIGHT_DECAY = 1e-3
    WARMUP_STEPS = 0
    DECAY_START = 1
    DECAY_END = 500_000
    MAX_STEPS = 10
    SUMMARY_INTERVAL_STEPS: int | None = 100
    CHECKPOINT_EVERY_N_STEPS = 100_000

    unused_fields: ClassVar[tuple[str, ...]] = ("OPTIMIZER", "DECAYED_WEIGHTS", *TEXT_FIELDS)
    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "NUM_GROUPS": None,
        "NUM_EXPERTS": 4,
        "DECAY_START": 6,
        "DECAY_END": 200,
        "MAX_SEQ_LEN": 64,
        "VOCAB_SIZE": 64,
    }
    learner = capped_cosine
    mesh_axes = EXPERT_AXES

    def model(self) -> Config:
        """Return the config of the LanguageModel."""
        model = gshard_decoder(self)
        return add_experts(self, model, gshard_mixture(self, model))
