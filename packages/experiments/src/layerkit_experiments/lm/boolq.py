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
from layerkit.config.checks import require
from layerkit.layers import Embedding, FullSoftmax
from layerkit.layers.quantization.lora import LORA_WEIGHTS, add_lora
from layerkit_experiments.recipes.language_model import REDUCED_TEXT, LmExperiment, decoder
from layerkit_experiments.recipes.optimizers import adam_exponential
from layerkit_experiments.recipes.published_data.boolq import boolq_readers, report_choice_accuracy
from layerkit_experiments.recipes.schedule_choices import number_of_steps
from layerkit_runner.config.experiment import refuse_unread
from layerkit_runner.init_from.settings import weights_of
from layerkit_runner.optim.schedules import linear_warmup_cosine_decay

# Patterns of field paths of the products with an adapter.
_LORA_TARGETS = {
    "all": r".*(query|key|value|output|linear)_tpl",
    "attention": r".*(query|key|value|output)_tpl",
    "mlp": r".*linear_tpl",
}


class LlamaBoolQ(LmExperiment, abstract=True):
    """Base of the sizes: Adam with an update cap, initial weights and adapters."""

    tags: ClassVar[tuple[str, ...]] = ("fine_tune",)

    INIT_FROM: str | None = None
    """Hugging Face folder, job folder or checkpoint, read when training starts. None: random
    weights. `--init_from` takes precedence."""
    CHECKPOINT_RESTORE_PATH: str = ""
    """Pax's name of INIT_FROM: the folder `checkpoints` of a Pax run, or any folder that
    `--init_from` takes; empty for random weights."""
    TARGET_LENGTH: int = 64
    """Positions for the answer; the other positions hold the passage and the question."""
    BOS_ID: int = 1
    """First id of a row, as of LLaMA."""
    ROWS_PER_PART: float = 4.0
    """Rows of a device of which attention keeps the logits of a layer at a time; gradients of the
    parts of a batch are summed."""
    UPDATE_RMS_CAP: float | None = 1.0
    LR_SCHEDULE: Literal[
        "linear_rampup_exponential_decay", "linear_rampup_cosine_decay", "constant"
    ] = "linear_rampup_exponential_decay"
    LR_COS_WARMUP: int = 4000
    """Warmup steps of the cosine; those of the exponential are WARMUP_STEPS."""
    USE_LORA: bool = False
    """Train low-rank adapters alone, which are added with factor 1."""
    LORA_RANK: int = 8
    LORA_TARGET_LAYERS: Literal["all", "attention", "mlp"] = "all"

    NORM = "rms_norm"
    NORM_EPSILON = 1e-5
    POSITIONS = "rotary"
    ACTIVATION = "silu"
    USE_GATED_ACTIVATION = True
    WEIGHT_INIT = "xavier_last_axes"
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    USE_REPEATED_LAYER = False
    VOCAB_SIZE = 32000
    MAX_SEQ_LEN = 4096
    EOS_ID = 2
    PACKED_INPUT = False
    EVAL_NUM_BATCHES = None
    ADAM_BETA2 = 0.99
    ADAM_EPSILON = 1e-6
    WEIGHT_DECAY = 1e-3
    CLIP_GRADIENT_NORM = 5.0
    WARMUP_STEPS = 4000
    DECAY_START = 4001
    DECAY_END = 300_000
    MAX_STEPS = 1000
    SUMMARY_INTERVAL_STEPS = 100

    tfds_name = "super_glue/boolq:1.0.2"
    LEARNING_RATE_SCHEDULE = None  # LR_SCHEDULE names the schedules of Pax.
    unused_fields = (
        *("OPTIMIZER", "DECAYED_WEIGHTS", "PROMPTS_PER_DEVICE", "PROMPT_LENGTH"),
        "LEARNING_RATE_SCHEDULE",
    )
    reduced_fields: ClassVar[Mapping[str, Any]] = {
        **REDUCED_TEXT,
        "INIT_FROM": None,
        "CHECKPOINT_RESTORE_PATH": "",
        "DECAY_START": 6,
        "DECAY_END": 200,
    }
    readers = boolq_readers

    def validate(self) -> None:
        """Raise an error if a stage has a batch, which ROWS_PER_PART does not divide."""
        super().validate()
        expected = "no value, since ROWS_PER_PART divides PERCORE_BATCH_SIZE alone"
        for index, stage in enumerate(self.STAGES or ()):
            rows = stage.get("batch")
            require(rows is None, f"STAGES[{index}]", "batch", rows, expected)

    def model(self) -> Config:
        """Return the config of the model, with adapters if they are asked for."""
        model = report_choice_accuracy(decoder(self))
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
            model = add_lora(model, rank=self.LORA_RANK, alpha=float(self.LORA_RANK), only=only)
        return model

    @property
    def GRADIENT_ACCUMULATION_STEPS(self) -> int:  # type: ignore[override]  # noqa: N802
        """Number of parts of a batch."""
        return max(1, round(self.PERCORE_BATCH_SIZE / self.ROWS_PER_PART))

    def learner(self) -> Config:
        """Return the config of the learner."""
        learner = adam_exponential(self)
        because = f"LR_SCHEDULE={self.LR_SCHEDULE!r}"
        if any("rate" in stage for stage in self.STAGES or ()):
            refuse_unread(self, ("LR_SCHEDULE",), "STAGES have rates")
        elif self.LR_SCHEDULE == "constant":
            unread = ("WARMUP_STEPS", "DECAY_START", "DECAY_END", "MIN_LEARNING_RATE_RATIO")
            refuse_unread(self, unread, because)
            learner.learning_rate = Config(optax.constant_schedule, self.LEARNING_RATE)
        elif self.LR_SCHEDULE == "linear_rampup_cosine_decay":
            refuse_unread(self, ("WARMUP_STEPS",), because)
            learner.learning_rate = Config(
                linear_warmup_cosine_decay,
                self.LEARNING_RATE,
                warmup_steps=self.LR_COS_WARMUP,
                decay_start=number_of_steps(self, "DECAY_START"),
                decay_end=number_of_steps(self, "DECAY_END"),
                min_ratio=self.MIN_LEARNING_RATE_RATIO,
            )
        return learner.set(trainable=(LORA_WEIGHTS,)) if self.USE_LORA else learner

    def task(self) -> Config:
        """Return the config of the task."""
        task = super().task()
        if folder := self.CHECKPOINT_RESTORE_PATH or self.INIT_FROM:
            task.initial_weights = weights_of(folder)
        return task


class LLaMA7B(LlamaBoolQ):
    """LLaMA 7B on one node of 8 GPUs (a100x8), fully sharded."""

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 11008
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 1, 1]


class LLaMA13B(LlamaBoolQ):
    """LLaMA 13B on one node of 8 GPUs (a100x8), fully sharded."""

    NUM_LAYERS = 40
    MODEL_DIMS = 5120
    HIDDEN_DIMS = 13824
    NUM_HEADS = 40
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 1, 1]


class LLaMA70B(LlamaBoolQ):
    """LLaMA 2 70B on two slices of 8 chips (v5p:2x2x2*2), fully sharded."""

    tags = ("multislice",)

    NUM_LAYERS = 80
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 28672
    NUM_HEADS = 64
    NUM_KV_HEADS = 8
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 4.0
    ROWS_PER_PART = 1.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 2, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}
