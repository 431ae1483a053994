"""LLaMA 2 and 3.1 at their published sizes, trained from scratch, and LLaMA 2 by LoRA.

Sizes 7B and 13B of LLaMA 2 (arXiv:2307.09288) equal those of the first LLaMA (arXiv:2302.13971).
Batches have the published 4M tokens: 1024 rows of 4096.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.layers.quantization.lora import LORA_WEIGHTS
from layerkit_experiments.recipes.fine_tuning import add_adapters
from layerkit_experiments.recipes.language_model import REDUCED_TEXT, LmExperiment, untied_decoder
from layerkit_experiments.recipes.local_files import LocalFiles, folder_tokenizer
from layerkit_runner.init_from.settings import weights_of


class Llama2(LmExperiment, abstract=True):
    """Rotary decoder with RMS norms, SwiGLU and an untied embedding; 2T tokens of C4, 4M a step."""

    NORM = "rms_norm"
    NORM_EPSILON = 1e-5
    POSITIONS = "rotary"
    ACTIVATION = "silu"
    USE_GATED_ACTIVATION = True
    WEIGHT_INIT = "fan_in"
    SCALE_RESIDUAL_INIT = True
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    VOCAB_SIZE = 32000
    MAX_SEQ_LEN = 4096
    EOS_ID: int | None = 2
    LEARNING_RATE = 3e-4
    ADAM_EPSILON = 1e-5
    WARMUP_STEPS = 2000
    MAX_STEPS = 500_000

    reduced_fields: ClassVar[Mapping[str, Any]] = REDUCED_TEXT
    model = untied_decoder


class Llama7B(Llama2):
    """LLaMA 2 7B on 16 nodes of 8 GPUs (h100x128)."""

    tags = ("multislice",)

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 11008
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 16, 1]


class Llama13B(Llama2):
    """LLaMA 2 13B on 128 chips (v5p:4x4x8)."""

    NUM_LAYERS = 40
    MODEL_DIMS = 5120
    HIDDEN_DIMS = 13824
    NUM_HEADS = 40
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 128, 1]


class Llama70B(Llama2):
    """LLaMA 2 70B on 256 chips (v5p:8x8x4)."""

    NUM_LAYERS = 80
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 28672
    NUM_HEADS = 64
    NUM_KV_HEADS = 8
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 4.0
    LEARNING_RATE = 1.5e-4
    ICI_MESH_SHAPE = [1, 256, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}


class Llama31(Llama2, abstract=True):
    """LLaMA 3.1 on 8192 tokens, before its contexts grow (Llama team, 2024, arXiv:2407.21783).

    Rates are published for each size, and for 405B the schedule and the last batch of 16M tokens,
    after 4M and 8M, which all sizes have here. AdamW's other constants are those of LLaMA 2.
    """

    tags: ClassVar[tuple[str, ...]] = ("multislice",)

    NUM_KV_HEADS = 8
    VOCAB_SIZE = 128_256
    MAX_SEQ_LEN = 8192
    ROTARY_BASE = 500_000.0
    EOS_ID = None
    WARMUP_STEPS = 8000
    MAX_STEPS = 1_200_000
    MIN_LEARNING_RATE_RATIO = 0.01

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}


class Llama31_8B(Llama31):  # noqa: N801 - the name of the size
    """LLaMA 3.1 8B on 32 nodes of 8 GPUs (h100x256), fully sharded."""

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 14336
    NUM_HEADS = 32
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 32, 1]


class Llama31_70B(Llama31):  # noqa: N801
    """LLaMA 3.1 70B on 128 nodes of 8 GPUs (h100x1024), fully sharded."""

    NUM_LAYERS = 80
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 28672
    NUM_HEADS = 64
    LEARNING_RATE = 1.5e-4
    PERCORE_BATCH_SIZE = 2.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 128, 1]


class Llama31_405B(Llama31):  # noqa: N801
    """LLaMA 3.1 405B on 256 nodes, whose 8 GPUs share each layer (h100x2048)."""

    NUM_LAYERS = 126
    MODEL_DIMS = 16384
    HIDDEN_DIMS = 53248
    NUM_HEADS = 128
    LEARNING_RATE = 8e-5
    PERCORE_BATCH_SIZE = 1.0
    SEQUENCE_PARALLEL = True
    ICI_MESH_SHAPE = [1, 1, 8]
    DCN_MESH_SHAPE = [1, 256, 1]


class LlamaLora(LocalFiles, LmExperiment, abstract=True):
    """Adapters of rank 8 on queries and values, as in the paper of LoRA, on local text."""

    tags: ClassVar[tuple[str, ...]] = ("fine_tune", "lora")

    INIT_FROM: str | None = None
    """Hugging Face folder, job folder or checkpoint, read when training starts. None: random
    weights. `--init_from` takes precedence."""
    LORA_RANK: int = 8
    LORA_ALPHA: float = 16.0
    """Adapters are multiplied by LORA_ALPHA / LORA_RANK."""
    LORA_DROPOUT_RATE: float = 0.0
    LORA_ONLY: str = ".*(query|value)_tpl"
    """Pattern of field paths of products with an adapter; `.*_tpl` matches all."""

    NORM = "rms_norm"
    NORM_EPSILON = 1e-5
    POSITIONS = "rotary"
    ACTIVATION = "silu"
    USE_GATED_ACTIVATION = True
    WEIGHT_INIT = "fan_in"
    SCALE_RESIDUAL_INIT = True
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    VOCAB_SIZE = 32000
    MAX_SEQ_LEN = 1024
    SOFTMAX_CHUNK_SIZE = 256
    LEARNING_RATE = 3e-4
    WEIGHT_DECAY = 0.0
    WARMUP_STEPS = 100
    MAX_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 200

    # The tokenizer of the folder is not available.
    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "INIT_FROM": None,
        "TOKENIZER": "bytes",
        "VOCAB_SIZE": 259,
        "PERCORE_BATCH_SIZE": 8.0,
    }

    def model(self) -> Config:
        """Return the config of the model with adapters."""
        return add_adapters(self, untied_decoder(self))

    def learner(self) -> Config:
        """Return the config of the learner, which trains only adapters."""
        return super().learner().set(trainable=(LORA_WEIGHTS,))

    def tokenizer(self) -> Config:
        """Return the config of the tokenizer."""
        return folder_tokenizer(self, self.INIT_FROM)

    def task(self) -> Config:
        """Return the config of the task with its initial weights."""
        task = super().task()
        if self.INIT_FROM is not None:
            task.initial_weights = weights_of(self.INIT_FROM)
        return task

    def validate(self) -> None:
        """Check the fields; a tokenizer of a missing folder is checked when the run starts."""
        if self.TOKENIZER is not None or self.INIT_FROM is None or Path(self.INIT_FROM).exists():
            super().validate()


class Llama7BLora(LlamaLora):
    """LoRA of LLaMA 2 7B on one GPU of 80 GB (h100x1)."""

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 11008
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    INIT_FROM = "Llama-2-7b-hf"
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 1, 1]


class Llama70BLora(LlamaLora):
    """LoRA of LLaMA 2 70B on one node of 8 GPUs (h100x8)."""

    NUM_LAYERS = 80
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 28672
    NUM_HEADS = 64
    NUM_KV_HEADS = 8
    DIMS_PER_HEAD = 128
    INIT_FROM = "Llama-2-70b-hf"
    PERCORE_BATCH_SIZE = 2.0
    ICI_MESH_SHAPE = [1, 8, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}
