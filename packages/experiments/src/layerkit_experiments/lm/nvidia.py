"""Speed tests on synthetic data by NVIDIA, with the values of Pax's nvidia.

A "proxy" has the width of a model and fewer layers, so that it fits on 16 GPUs. Pax's runs have no
last step; these end where the learning rate does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit_experiments.lm.pax import CappedDecoder
from layerkit_experiments.recipes.experts import PipelinedExperts, SpmdExperts
from layerkit_experiments.recipes.gshard import (
    GlamExperts,
    GlamLayers,
    GrokDecoder,
    GShardExperts,
)
from layerkit_experiments.recipes.local_files import SyntheticTokens
from layerkit_experiments.recipes.meshes import Pipelined, PipelinedFeatures, Spmd
from layerkit_experiments.recipes.nvidia import (
    CappedCosine,
    NvidiaDecoder,
    NvidiaLlamaDecoder,
)
from layerkit_experiments.recipes.optimizers import AdamExponential


class NvidiaSpmd(CappedCosine, Spmd, NvidiaDecoder, abstract=True):
    """Base of the models without a pipeline."""


class NvidiaPipeline(CappedCosine, PipelinedFeatures, NvidiaDecoder, abstract=True):
    """Base of the models in pipeline stages."""


class NVIDIA1_3B(NvidiaSpmd):  # noqa: N801 - the names in Pax
    """1.3 billion weights on 16 GPUs (a100x16), data parallel."""

    NUM_LAYERS = 24
    MODEL_DIMS = 2048
    HIDDEN_DIMS = 8192
    NUM_HEADS = 32
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [16, 1, 1]


class NVIDIA8_3B(NvidiaSpmd):  # noqa: N801
    """8.3 billion weights on 16 GPUs (a100x16), data 4 × tensor 4."""

    NUM_LAYERS = 40
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16_384
    NUM_HEADS = 64
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [4, 1, 4]


class NVIDIA10B(NvidiaSpmd):
    """10 billion weights on 16 GPUs (a100x16), data 2 × tensor 8."""

    NUM_LAYERS = 32
    MODEL_DIMS = 5120
    HIDDEN_DIMS = 20_480
    NUM_HEADS = 40
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 0.25
    ICI_MESH_SHAPE = [2, 1, 8]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"PERCORE_BATCH_SIZE": 4.0}


class NVIDIA175B_FSDP(NvidiaSpmd):  # noqa: N801
    """175 billion weights on 128 GPUs (a100x128), fully sharded."""

    tags = ("multislice",)

    NUM_LAYERS = 96
    MODEL_DIMS = 12_288
    HIDDEN_DIMS = 49_152
    NUM_HEADS = 96
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 16, 1]
    DCN_MESH_SHAPE = [1, 8, 1]
    USE_ADAFACTOR = True


class Llama33BProxy(NvidiaSpmd):
    """The sizes of LLaMA 33B with the blocks of GPT, on 16 GPUs (a100x16), fully sharded."""

    NUM_LAYERS = 60
    MODEL_DIMS = 6656
    HIDDEN_DIMS = 17_920
    NUM_HEADS = 52
    DIMS_PER_HEAD = 128
    VOCAB_SIZE = 32_000
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 16, 1]
    USE_ADAFACTOR = True


class MoELarge(GShardExperts, NvidiaSpmd):
    """27 billion weights in 16 experts of each layer, on 32 GPUs (a100x32), fully sharded."""

    tags = ("multislice",)

    NUM_LAYERS = 12
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16_384
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    NUM_EXPERTS = 16
    LOAD_BALANCE_WEIGHT = 1.0
    # Pax has 16 groups, which cannot be shared evenly by the 32 shards of the batch.
    NUM_GROUPS = 32
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [1, 16, 1]
    DCN_MESH_SHAPE = [1, 2, 1]


class GLaM64B64EProxy(GlamExperts, CappedCosine, SpmdExperts, GlamLayers):
    """Eight layers of GLaM 64B/64E, 143B weights, on 128 GPUs (a100x128), fsdp 16 × expert 8."""

    NUM_LAYERS = 8
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 32_768
    NUM_HEADS = 64
    DIMS_PER_HEAD = 128
    VOCAB_SIZE = 51_200
    MAX_SEQ_LEN = 2048
    NUM_EXPERTS = 64
    NUM_GROUPS = 128
    PERCORE_BATCH_SIZE = 4.0
    # Pax splits the 64 experts unevenly over a mesh of [1, 128, 1].
    ICI_MESH_SHAPE = [1, 16, 8, 1]


class GLaM64B64EProxy_EP(GLaM64B64EProxy):  # noqa: N801
    """Eight layers of GLaM with eight experts on 128 GPUs (a100x128), fsdp 16 × expert 8."""

    NUM_EXPERTS = 8


class Grok(CappedCosine, SpmdExperts, GrokDecoder):
    """Grok-1, 316 billion weights, on 256 GPUs (h100x256), fsdp 32 × expert 8."""

    tags = ("multislice",)

    NUM_LAYERS = 64
    NUM_GROUPS = 256
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 1, 8, 1]
    DCN_MESH_SHAPE = [1, 32, 1, 1]
    MAX_STEPS = 10
    SUMMARY_INTERVAL_STEPS = 100


class Grok_Proxy(Grok):  # noqa: N801
    """16 layers of Grok-1 on 64 GPUs (h100x64), fsdp 8 × expert 8."""

    NUM_LAYERS = 16
    NUM_GROUPS = 64
    DCN_MESH_SHAPE = [1, 8, 1, 1]


class Grok_Proxy_PP(CappedCosine, PipelinedExperts, GrokDecoder):  # noqa: N801
    """16 layers of Grok-1 in eight stages on 512 GPUs (h100x512), fsdp 8 × expert 8."""

    tags = ("multislice",)

    NUM_LAYERS = 16
    PERCORE_BATCH_SIZE = 1.0
    NUM_STAGES = 8
    # Pax has 32 microbatches of 16 rows in 8 groups, which its 64 shards of a batch cannot share
    # evenly.
    NUM_MICROBATCHES = 8
    NUM_GROUPS = 64
    # Pax keeps the outputs of attention of a whole stage, and all else of its layers while it is
    # recomputed, which is too much for the eight layers of Grok_PP.
    CHECKPOINT_POLICY = "full"
    LAYER_CHECKPOINT_POLICY = "attention_out"
    ICI_MESH_SHAPE = [1, 1, 1, 8, 1]
    DCN_MESH_SHAPE = [8, 1, 8, 1, 1]
    MAX_STEPS = 10
    SUMMARY_INTERVAL_STEPS = 100


class Grok_PP(Grok_Proxy_PP):  # noqa: N801
    """Grok-1 in eight stages on 512 GPUs (h100x512), fsdp 8 × expert 8."""

    NUM_LAYERS = 64


class NVIDIA5B(NvidiaPipeline):
    """5 billion weights in four stages on 16 GPUs (a100x16)."""

    NUM_LAYERS = 24
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16_384
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 1.0
    NUM_STAGES = 4
    MICROBATCH_SIZE = 2
    ICI_MESH_SHAPE = [4, 2, 1, 2]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"PERCORE_BATCH_SIZE": 4.0}


class NVIDIA40BProxy(NVIDIA5B):
    """12 layers of a 40B model in two stages on 16 GPUs (a100x16)."""

    NUM_LAYERS = 12
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 32_768
    NUM_HEADS = 64
    PERCORE_BATCH_SIZE = 16.0
    NUM_STAGES = 2
    MICROBATCH_SIZE = 4
    ICI_MESH_SHAPE = [2, 2, 1, 4]


class NVIDIA70BProxy(NVIDIA40BProxy):
    """20 layers of a 70B model in two stages on 16 GPUs (a100x16)."""

    NUM_LAYERS = 20
    PERCORE_BATCH_SIZE = 8.0


class NVIDIA116BProxy(NVIDIA5B):
    """16 layers of a 116B model in four stages on 16 GPUs (a100x16)."""

    NUM_LAYERS = 16
    MODEL_DIMS = 12_288
    HIDDEN_DIMS = 49_152
    NUM_HEADS = 96
    PERCORE_BATCH_SIZE = 6.0
    ICI_MESH_SHAPE = [4, 1, 1, 4]


class NVIDIA175BProxy(NVIDIA116BProxy):
    """24 layers of GPT-3 175B in four stages on 16 GPUs (a100x16)."""

    NUM_LAYERS = 24
    MICROBATCH_SIZE = 1


class NVIDIA175B(NVIDIA175BProxy):
    """GPT-3 175B in six stages of one node, on 96 GPUs (a100x96)."""

    tags = ("multislice",)

    NUM_LAYERS = 96
    PERCORE_BATCH_SIZE = 0.0625
    NUM_STAGES = 6
    ICI_MESH_SHAPE = [1, 1, 1, 16]
    DCN_MESH_SHAPE = [6, 1, 1, 1]
    USE_ADAFACTOR = True


class TestSmallConfig(NVIDIA5B):
    """16 layers in two stages on 16 GPUs (a100x16), to test an installation."""

    NUM_LAYERS = 16
    PERCORE_BATCH_SIZE = 2.0
    NUM_STAGES = 2
    ICI_MESH_SHAPE = [2, 2, 1, 4]


class NVIDIA_CIRCULAR_REPEAT(  # noqa: N801
    AdamExponential, Pipelined, SyntheticTokens, CappedDecoder
):
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


class Llama2_7B(CappedCosine, Spmd, NvidiaLlamaDecoder):  # noqa: N801
    """The sizes of LLaMA 2 7B on 16 GPUs (a100x16), fully sharded."""

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 11_008
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
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
