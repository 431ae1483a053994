"""LLaMA 2 at its published sizes, trained from scratch and by LoRA (arXiv:2307.09288).

Sizes 7B and 13B equal those of the first LLaMA (arXiv:2302.13971). Batches have the published 4M
tokens: 1024 rows of 4096.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.layers import Embedding, FullSoftmax
from layerkit_experiments.lm.experiment import LmExperiment
from layerkit_experiments.recipes.corpora import C4
from layerkit_experiments.recipes.fine_tuning import FolderText, InitialWeights, Lora
from layerkit_experiments.recipes.meshes import Spmd
from layerkit_experiments.recipes.optimizers import AdamWCosine


class LlamaDecoder(LmExperiment, abstract=True):
    """Rotary decoder with RMS norms, SwiGLU, no biases and an untied embedding."""

    VOCAB_SIZE = 32000
    NORM = "rms_norm"
    NORM_EPSILON = 1e-5
    POSITIONS = "rotary"
    ACTIVATION = "silu"
    USE_GATED_ACTIVATION = True
    WEIGHT_INIT = "fan_in"
    SCALE_RESIDUAL_INIT = True
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"

    def model(self) -> Config:
        """Return the config of the LanguageModel with untied softmax and embedding."""
        model = super().model()
        lm = model.lm_tpl
        lm.softmax_tpl = FullSoftmax.HParams.config(
            chunk_size=self.SOFTMAX_CHUNK_SIZE, logit_soft_cap=self.SOFTMAX_LOGIT_CAP
        )
        lm.embedding_tpl = Embedding.HParams.config(weight_init=WeightInit.Gaussian(1.0))
        return model


class Llama2(AdamWCosine, Spmd, C4, LlamaDecoder, abstract=True):
    """Training of the family: 2T tokens, 4M per step."""

    MAX_SEQ_LEN = 4096
    SOFTMAX_CHUNK_SIZE = 1024
    EOS_ID = 2
    LEARNING_RATE = 3e-4
    ADAM_EPSILON = 1e-5
    WARMUP_STEPS = 2000
    MAX_STEPS = 500_000


class Sizes7B(LlamaDecoder, abstract=True):
    """6,738,415,616 weights."""

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 11008
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128


class Sizes13B(LlamaDecoder, abstract=True):
    """13,015,864,320 weights."""

    NUM_LAYERS = 40
    MODEL_DIMS = 5120
    HIDDEN_DIMS = 13824
    NUM_HEADS = 40
    DIMS_PER_HEAD = 128


class Sizes70B(LlamaDecoder, abstract=True):
    """68,976,648,192 weights; 8 key heads for 64 query heads."""

    NUM_LAYERS = 80
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 28672
    NUM_HEADS = 64
    NUM_KV_HEADS = 8
    DIMS_PER_HEAD = 128

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}


class Llama7B(Sizes7B, Llama2):
    """LLaMA 2 7B on 16 nodes of 8 GPUs (h100x128)."""

    tags = ("multislice",)

    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 16, 1]


class Llama13B(Sizes13B, Llama2):
    """LLaMA 2 13B on 128 chips (v5p:4x4x8)."""

    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 128, 1]


class Llama70B(Sizes70B, Llama2):
    """LLaMA 2 70B on 256 chips (v5p:8x8x4)."""

    PERCORE_BATCH_SIZE = 4.0
    LEARNING_RATE = 1.5e-4
    ICI_MESH_SHAPE = [1, 256, 1]


class LlamaLora(Lora, InitialWeights, AdamWCosine, Spmd, FolderText, LlamaDecoder, abstract=True):
    """Adapters of rank 8 on queries and values, as in the paper of LoRA, on local text."""

    VOCAB_SIZE = 32000
    MAX_SEQ_LEN = 1024
    SOFTMAX_CHUNK_SIZE = 256
    LEARNING_RATE = 3e-4
    WEIGHT_DECAY = 0.0
    WARMUP_STEPS = 100
    MAX_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 200

    # The tokenizer of the folder is not available.
    reduced_fields: ClassVar[Mapping[str, Any]] = {"TOKENIZER": "bytes", "VOCAB_SIZE": 259}


class Llama7BLora(Sizes7B, LlamaLora):
    """LoRA of LLaMA 2 7B on one GPU of 80 GB (h100x1)."""

    INIT_FROM = "Llama-2-7b-hf"
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 1, 1]


class Llama70BLora(Sizes70B, LlamaLora):
    """LoRA of LLaMA 2 70B on one node of 8 GPUs (h100x8)."""

    INIT_FROM = "Llama-2-70b-hf"
    PERCORE_BATCH_SIZE = 2.0
    ICI_MESH_SHAPE = [1, 8, 1]
