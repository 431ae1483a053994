"""LLaMA, evaluated and fine-tuned on BoolQ, with the values of NVIDIA's Pax.

All weights are trained, or with USE_LORA adapters alone. `run_llama_boolq.sh` of Pax passes the
fields. Pax's classes only evaluate, so MAX_STEPS is that of the script, and ROWS_PER_PART divides
the batch: to train on all rows at once would need 118 GB for each GPU with the 7B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import optax

from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.layers import Embedding, FullSoftmax
from layerkit.layers.quantization.lora import LORA_WEIGHTS, with_lora
from layerkit_experiments.lm.llama import LlamaDecoder, Sizes7B, Sizes13B, Sizes70B
from layerkit_experiments.recipes.boolq import BoolQ
from layerkit_experiments.recipes.fine_tuning import InitialWeights
from layerkit_experiments.recipes.meshes import Spmd
from layerkit_experiments.recipes.optimizers import AdamExponential
from layerkit_runner.optim.schedules import linear_warmup_cosine_decay

# Patterns of field paths of the products with an adapter.
_LORA_TARGETS = {
    "all": r".*(query|key|value|output|linear)_tpl",
    "attention": r".*(query|key|value|output)_tpl",
    "mlp": r".*linear_tpl",
}


class LlamaBoolQ(InitialWeights, AdamExponential, Spmd, BoolQ, LlamaDecoder, abstract=True):
    """Base of the sizes: Adam with an update cap, initial weights and adapters."""

    CHECKPOINT_RESTORE_PATH: str = ""
    """Pax's name of INIT_FROM: the folder `checkpoints` of a Pax run, or any folder that
    `--init_from` takes; empty for random weights."""
    LR_SCHEDULE: Literal[
        "linear_rampup_exponential_decay", "linear_rampup_cosine_decay", "constant"
    ] = "linear_rampup_exponential_decay"
    LR_COS_WARMUP: int = 4000
    """Warmup steps of the cosine; those of the exponential are WARMUP_STEPS."""
    USE_LORA: bool = False
    """Train low-rank adapters alone, which are added with factor 1."""
    ROWS_PER_PART: float = 4.0
    """Rows of a device of which attention keeps the logits of a layer at a time; gradients of the
    parts of a batch are summed."""
    LORA_RANK: int = 8
    LORA_TARGET_LAYERS: Literal["all", "attention", "mlp"] = "all"

    SCALE_RESIDUAL_INIT = False
    WEIGHT_INIT = "xavier_last_axes"
    USE_REPEATED_LAYER = False
    MAX_STEPS = 1000
    SUMMARY_INTERVAL_STEPS = 100

    reduced_fields: ClassVar[Mapping[str, Any]] = {"CHECKPOINT_RESTORE_PATH": ""}

    def model(self) -> Config:
        """Return the config of the model, with adapters if they are asked for."""
        model = super().model()
        model.lm_tpl.softmax_tpl = FullSoftmax.HParams.config()
        model.lm_tpl.embedding_tpl = Embedding.HParams.config()
        attention = model.lm_tpl.stack_tpl.layer_tpl.attention_tpl
        if attention.rotary_tpl is not None:
            attention.rotary_tpl.pairing = "neighbors"
        if self.NUM_KV_HEADS is None:
            # Pax draws the three as one weight, with three times the fans. They are separate here,
            # as Pax's adapters of them are.
            for projection in (attention.query_tpl, attention.key_tpl, attention.value_tpl):
                projection.params_init = WeightInit.XavierLastAxes(3**-0.5)
        if self.USE_LORA:
            only = _LORA_TARGETS[self.LORA_TARGET_LAYERS]
            model = with_lora(model, rank=self.LORA_RANK, alpha=float(self.LORA_RANK), only=only)
        return model

    def train_config(self, learner: Config) -> Config:
        """Return the training config, which divides the batch into parts."""
        parts = max(1, round(self.PERCORE_BATCH_SIZE / self.ROWS_PER_PART))
        return super().train_config(learner).set(gradient_accumulation_steps=parts)

    def learner(self) -> Config:
        """Return the config of the learner."""
        learner = super().learner()
        if self.LR_SCHEDULE == "constant":
            learner.learning_rate = Config(optax.constant_schedule, self.LEARNING_RATE)
        elif self.LR_SCHEDULE == "linear_rampup_cosine_decay":
            learner.learning_rate = Config(
                linear_warmup_cosine_decay,
                self.LEARNING_RATE,
                warmup_steps=self.LR_COS_WARMUP,
                decay_start=self.DECAY_START,
                decay_end=self.DECAY_END,
                min_ratio=self.MIN_LEARNING_RATE_RATIO,
            )
        return learner.set(trainable=(LORA_WEIGHTS,)) if self.USE_LORA else learner

    @property
    def weights_folder(self) -> str | None:
        """The folder of the initial weights; None if there is none."""
        return self.CHECKPOINT_RESTORE_PATH or self.INIT_FROM


class LLaMA7B(LlamaBoolQ, Sizes7B):
    """LLaMA 7B on one node of 8 GPUs (a100x8), fully sharded."""

    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 1, 1]


class LLaMA13B(LlamaBoolQ, Sizes13B):
    """LLaMA 13B on one node of 8 GPUs (a100x8), fully sharded."""

    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 1, 1]


class LLaMA70B(LlamaBoolQ, Sizes70B):
    """LLaMA 2 70B on two slices of 8 chips (v5p:2x2x2*2), fully sharded."""

    tags = ("multislice",)

    PERCORE_BATCH_SIZE = 4.0
    ROWS_PER_PART = 1.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 2, 1]
