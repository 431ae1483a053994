"""Speed tests on synthetic data by NVIDIA, with the values of Pax's nvidia.

A "proxy" has the width of a model and fewer layers, so that it fits on 16 GPUs. Pax's runs have no
last step; these end where the learning rate does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit_experiments.lm.moe import PraxisExperts
from layerkit_experiments.lm.pax import PaxLm
from layerkit_experiments.recipes.experts import (
    MixtureOfExperts,
    add_experts,
    gshard_mixture,
    praxis_glam,
)
from layerkit_experiments.recipes.language_model import TEXT_FIELDS, LmExperiment, decoder
from layerkit_experiments.recipes.meshes import EXPERT_AXES, Pipelined
from layerkit_experiments.recipes.optimizers import capped_cosine


def capped_decoder(fields: Any) -> Config:
    """Return the config of a `decoder` whose embedding vectors start with length 1."""
    model = decoder(fields)
    model.lm_tpl.softmax_tpl.weight_init = WeightInit.Gaussian(fields.MODEL_DIMS**-0.5)
    return model


# Whole rows, and several for the stages of a pipeline.
_REDUCED_ROWS: Mapping[str, Any] = {"PERCORE_BATCH_SIZE": 4.0}


class NvidiaLm(LmExperiment, abstract=True):
    """Decoder with capped logits and learned positions; a cosine from the first step on."""

    USE_ADAFACTOR: bool = False
    """Use Pax's `ShardedAdafactor`, with a momentum in int8 and factors of the second moment."""
    USE_FP8: bool = False
    """Pax's name of `QUANTIZATION="fp8_delayed"`."""
    UPDATE_RMS_CAP: float | None = 1.0

    ATTENTION_LOGIT_CAP: float | None = 50.0
    SOFTMAX_LOGIT_CAP = 30.0
    FEED_FORWARD_BIAS = True
    PER_DIM_SCALE = True
    SOFTMAX_BIAS = True
    POSITIONS = "trainable"
    SCALE_EMBEDDING = True
    WEIGHT_INIT = "xavier_last_axes"
    INIT_STD = 0.023
    # The optimizer caps the update of the three projections as that of one weight.
    COMBINE_QKV = True
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    DIMS_PER_HEAD = 128
    VOCAB_SIZE = 51_200
    DATA_FORMAT = "synthetic"
    EVAL_NUM_BATCHES = 1
    EOS_ID = None
    MAX_SEQ_LEN = 2048
    MAX_POSITIONS: int | None = 2048

    LEARNING_RATE = 6e-4
    WEIGHT_DECAY = 1e-3
    WARMUP_STEPS = 0
    DECAY_START = 1
    DECAY_END = 500_000
    MAX_STEPS = 500_000
    CHECKPOINT_EVERY_N_STEPS = 100_000

    unused_fields = ("OPTIMIZER", "DECAYED_WEIGHTS", *TEXT_FIELDS)
    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "DECAY_START": 6,
        "DECAY_END": 200,
        "MAX_SEQ_LEN": 64,
        "VOCAB_SIZE": 64,
    }

    model = capped_decoder
    learner = capped_cosine


class NVIDIA1_3B(NvidiaLm):  # noqa: N801 - the names in Pax
    """1.3 billion weights on 16 GPUs (a100x16), data parallel."""

    NUM_LAYERS = 24
    MODEL_DIMS = 2048
    HIDDEN_DIMS = 8192
    NUM_HEADS = 32
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [16, 1, 1]


class NVIDIA8_3B(NvidiaLm):  # noqa: N801
    """8.3 billion weights on 16 GPUs (a100x16), data 4 × tensor 4."""

    NUM_LAYERS = 40
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16_384
    NUM_HEADS = 64
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [4, 1, 4]


class NVIDIA10B(NvidiaLm):
    """10 billion weights on 16 GPUs (a100x16), data 2 × tensor 8."""

    NUM_LAYERS = 32
    MODEL_DIMS = 5120
    HIDDEN_DIMS = 20_480
    NUM_HEADS = 40
    PERCORE_BATCH_SIZE = 0.25
    ICI_MESH_SHAPE = [2, 1, 8]

    reduced_fields: ClassVar[Mapping[str, Any]] = _REDUCED_ROWS


class NVIDIA175B_FSDP(NvidiaLm):  # noqa: N801
    """175 billion weights on 128 GPUs (a100x128), fully sharded."""

    tags = ("multislice",)

    NUM_LAYERS = 96
    MODEL_DIMS = 12_288
    HIDDEN_DIMS = 49_152
    NUM_HEADS = 96
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 16, 1]
    DCN_MESH_SHAPE = [1, 8, 1]
    USE_ADAFACTOR = True


class Llama33BProxy(NvidiaLm):
    """The sizes of LLaMA 33B with the blocks of GPT, on 16 GPUs (a100x16), fully sharded."""

    tags = ("speed_test",)

    NUM_LAYERS = 60
    MODEL_DIMS = 6656
    HIDDEN_DIMS = 17_920
    NUM_HEADS = 52
    VOCAB_SIZE = 32_000
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 16, 1]
    USE_ADAFACTOR = True


class MoELarge(MixtureOfExperts, NvidiaLm):
    """27 billion weights in 16 experts of each layer, on 32 GPUs (a100x32), fully sharded."""

    tags = ("multislice",)

    # Pax has 16 groups, which cannot be shared evenly by the 32 shards of the batch.
    NUM_GROUPS: int | None = 32
    """Groups of a batch, each with slots of its own; None for one per row."""
    NUM_LAYERS = 12
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16_384
    NUM_HEADS = 32
    NUM_EXPERTS = 16
    CAPACITY_FACTOR = 2.0
    LOAD_BALANCE_WEIGHT = 1.0
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [1, 16, 1]
    DCN_MESH_SHAPE = [1, 2, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_GROUPS": None}

    def model(self) -> Config:
        """Return the config of the LanguageModel."""
        model = capped_decoder(self)
        return add_experts(self, model, gshard_mixture(self, model))


class GLaM64B64EProxy(PraxisExperts):
    """Eight layers of GLaM 64B/64E, 143B weights, on 128 GPUs (a100x128), fsdp 16 × expert 8."""

    tags = ("speed_test",)

    NUM_LAYERS = 8
    MODEL_DIMS = 8192
    NUM_HEADS = 64
    NUM_KV_HEADS = None
    VOCAB_SIZE = 51_200
    MAX_SEQ_LEN = 2048
    POSITIONS = "none"  # type: ignore[assignment]  # mypy narrows the field to "rotary"
    ATTENTION_BIAS = False
    NUM_EXPERTS = 64
    EXPERT_PERIOD = 2
    NUM_GROUPS = 128
    USE_GATED_EXPERTS = False
    CHECKPOINT_POLICY = "full"
    PERCORE_BATCH_SIZE = 4.0
    # Pax splits the 64 experts unevenly over a mesh of [1, 128, 1].
    ICI_MESH_SHAPE = [1, 16, 8, 1]
    MAX_STEPS = 500_000
    SUMMARY_INTERVAL_STEPS = None

    model = praxis_glam


class GLaM64B64EProxy_EP(GLaM64B64EProxy):  # noqa: N801
    """Eight layers of GLaM with eight experts on 128 GPUs (a100x128), fsdp 16 × expert 8."""

    NUM_EXPERTS = 8


class Grok(PraxisExperts):
    """Grok-1, 316 billion weights, on 256 GPUs (h100x256), fsdp 32 × expert 8."""

    tags = ("multislice",)

    NUM_LAYERS = 64
    NUM_GROUPS = 256
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 1, 8, 1]
    DCN_MESH_SHAPE = [1, 32, 1, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}


class Grok_Proxy(Grok):  # noqa: N801
    """16 layers of Grok-1 on 64 GPUs (h100x64), fsdp 8 × expert 8."""

    tags = ("speed_test",)

    NUM_LAYERS = 16
    NUM_GROUPS = 64
    DCN_MESH_SHAPE = [1, 8, 1, 1]


class Grok_PP(Pipelined, PraxisExperts):  # noqa: N801
    """Grok-1 in eight stages on 512 GPUs (h100x512), fsdp 8 × expert 8."""

    tags = ("multislice",)

    NUM_LAYERS = 64
    PERCORE_BATCH_SIZE = 1.0
    NUM_STAGES = 8
    # Pax has 32 microbatches of 16 rows in 8 groups, which its 64 shards of a batch cannot share
    # evenly.
    NUM_MICROBATCHES = 8
    NUM_GROUPS = 64
    # Pax keeps the outputs of attention of a whole stage, and all else of its layers while it is
    # recomputed, which is too much for the eight layers of a stage.
    CHECKPOINT_POLICY = "full"
    LAYER_CHECKPOINT_POLICY = "attention_out"
    ICI_MESH_SHAPE = [1, 1, 1, 8, 1]
    DCN_MESH_SHAPE = [8, 1, 8, 1, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}

    mesh_axes = EXPERT_AXES


class Grok_Proxy_PP(Pipelined, PraxisExperts):  # noqa: N801
    """16 layers of Grok-1 in eight stages on 512 GPUs (h100x512), fsdp 8 × expert 8."""

    tags = ("multislice", "speed_test")

    NUM_LAYERS = 16
    PERCORE_BATCH_SIZE = 1.0
    NUM_STAGES = 8
    NUM_MICROBATCHES = 8
    NUM_GROUPS = 64
    CHECKPOINT_POLICY = "full"
    LAYER_CHECKPOINT_POLICY = "attention_out"
    ICI_MESH_SHAPE = [1, 1, 1, 8, 1]
    DCN_MESH_SHAPE = [8, 1, 8, 1, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}

    mesh_axes = EXPERT_AXES


class NVIDIA5B(Pipelined, NvidiaLm):
    """5 billion weights in four stages on 16 GPUs (a100x16)."""

    NUM_LAYERS = 24
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16_384
    NUM_HEADS = 32
    PERCORE_BATCH_SIZE = 1.0
    NUM_STAGES = 4
    MICROBATCH_SIZE = 2
    ICI_MESH_SHAPE = [4, 2, 1, 2]
    shards_features = True
    reduced_fields: ClassVar[Mapping[str, Any]] = _REDUCED_ROWS


class NVIDIA40BProxy(Pipelined, NvidiaLm):
    """12 layers of a 40B model in two stages on 16 GPUs (a100x16)."""

    tags = ("speed_test",)

    NUM_LAYERS = 12
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 32_768
    NUM_HEADS = 64
    PERCORE_BATCH_SIZE = 16.0
    NUM_STAGES = 2
    MICROBATCH_SIZE = 4
    ICI_MESH_SHAPE = [2, 2, 1, 4]
    shards_features = True
    reduced_fields: ClassVar[Mapping[str, Any]] = _REDUCED_ROWS


class NVIDIA70BProxy(Pipelined, NvidiaLm):
    """20 layers of a 70B model in two stages on 16 GPUs (a100x16)."""

    tags = ("speed_test",)

    NUM_LAYERS = 20
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 32_768
    NUM_HEADS = 64
    PERCORE_BATCH_SIZE = 8.0
    NUM_STAGES = 2
    MICROBATCH_SIZE = 4
    ICI_MESH_SHAPE = [2, 2, 1, 4]
    shards_features = True
    reduced_fields: ClassVar[Mapping[str, Any]] = _REDUCED_ROWS


class NVIDIA116BProxy(Pipelined, NvidiaLm):
    """16 layers of a 116B model in four stages on 16 GPUs (a100x16)."""

    tags = ("speed_test",)

    NUM_LAYERS = 16
    MODEL_DIMS = 12_288
    HIDDEN_DIMS = 49_152
    NUM_HEADS = 96
    PERCORE_BATCH_SIZE = 6.0
    NUM_STAGES = 4
    MICROBATCH_SIZE = 2
    ICI_MESH_SHAPE = [4, 1, 1, 4]
    shards_features = True
    reduced_fields: ClassVar[Mapping[str, Any]] = _REDUCED_ROWS


class NVIDIA175BProxy(Pipelined, NvidiaLm):
    """24 layers of GPT-3 175B in four stages on 16 GPUs (a100x16)."""

    tags = ("speed_test",)

    NUM_LAYERS = 24
    MODEL_DIMS = 12_288
    HIDDEN_DIMS = 49_152
    NUM_HEADS = 96
    PERCORE_BATCH_SIZE = 6.0
    NUM_STAGES = 4
    MICROBATCH_SIZE = 1
    ICI_MESH_SHAPE = [4, 1, 1, 4]
    shards_features = True
    reduced_fields: ClassVar[Mapping[str, Any]] = _REDUCED_ROWS


class NVIDIA175B(Pipelined, NvidiaLm):
    """GPT-3 175B in six stages of one node, on 96 GPUs (a100x96)."""

    tags = ("multislice",)

    NUM_LAYERS = 96
    MODEL_DIMS = 12_288
    HIDDEN_DIMS = 49_152
    NUM_HEADS = 96
    PERCORE_BATCH_SIZE = 0.0625
    NUM_STAGES = 6
    MICROBATCH_SIZE = 1
    ICI_MESH_SHAPE = [1, 1, 1, 16]
    DCN_MESH_SHAPE = [6, 1, 1, 1]
    USE_ADAFACTOR = True
    shards_features = True
    reduced_fields: ClassVar[Mapping[str, Any]] = _REDUCED_ROWS


class TestSmallConfig(Pipelined, NvidiaLm):
    """16 layers in two stages on 16 GPUs (a100x16), to test an installation."""

    NUM_LAYERS = 16
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16_384
    NUM_HEADS = 32
    PERCORE_BATCH_SIZE = 2.0
    NUM_STAGES = 2
    MICROBATCH_SIZE = 2
    ICI_MESH_SHAPE = [2, 2, 1, 4]
    shards_features = True
    reduced_fields: ClassVar[Mapping[str, Any]] = _REDUCED_ROWS


class NVIDIA_CIRCULAR_REPEAT(Pipelined, PaxLm):  # noqa: N801
    """32 layers in eight stages that each microbatch passes four times, on 8 GPUs (a100x8)."""

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16_384
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    ACTIVATION = "relu"
    FPROP_DTYPE = "float32"
    CHECKPOINT_POLICY = "dots"
    PERCORE_BATCH_SIZE = 1.0
    NUM_STAGES = 8
    NUM_MICROBATCHES = 8
    CIRCULAR_REPEAT = 4
    ICI_MESH_SHAPE = [8, 1, 1, 1]
    LEARNING_RATE = 1.6e-4
    MAX_STEPS = 300_000
    SUMMARY_INTERVAL_STEPS = 10
    CHECKPOINT_EVERY_N_STEPS = 250

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "NUM_LAYERS": 4,
        "CIRCULAR_REPEAT": 2,
        "PERCORE_BATCH_SIZE": 4.0,
    }


class Llama2_7B(NvidiaLm):  # noqa: N801
    """The sizes of LLaMA 2 7B on 16 GPUs (a100x16), fully sharded.

    The embedding, the biases and the capped logits of tokens are those of the other models.
    """

    NORM = "rms_norm"
    POSITIONS = "rotary"  # type: ignore[assignment]  # mypy narrows the field to "trainable"
    MAX_POSITIONS = None
    ACTIVATION = "silu"
    USE_GATED_ACTIVATION = True
    ATTENTION_BIAS = True
    ATTENTION_LOGIT_CAP = None
    PER_DIM_SCALE = False
    COMBINE_QKV = False
    MAX_SEQ_LEN = 4096

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 11_008
    NUM_HEADS = 32
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 16, 1]


class Llama2_13B(Llama2_7B):  # noqa: N801
    """The sizes of LLaMA 2 13B on 16 GPUs (a100x16), fully sharded."""

    NUM_LAYERS = 40
    MODEL_DIMS = 5120
    HIDDEN_DIMS = 13_824
    NUM_HEADS = 40


class Llama2_70B(Llama2_7B):  # noqa: N801
    """The sizes of LLaMA 2 70B on 64 GPUs (a100x64), fully sharded."""

    tags = ("multislice",)

    NUM_LAYERS = 80
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 28_672
    NUM_HEADS = 64
    NUM_KV_HEADS = 8
    DCN_MESH_SHAPE = [1, 4, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}
