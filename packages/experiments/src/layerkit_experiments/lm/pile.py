"""GPT-3 on The Pile for GPUs, and its evaluation on LAMBADA, with the values of NVIDIA's Pax.

Published on A100 with rows of 2048 tokens: 2068.5 rows/s for 126M on 64 devices, 450.6 for 5B on
256, 17.5 for 175B on 256; 126M predicts 0.397 ± 0.012 of LAMBADA's last words. The figure of 5B was
measured on data 32 × fsdp 4 × tensor 2 (`--fdl.ICI_MESH_SHAPE=[1,4,2]
--fdl.DCN_MESH_SHAPE=[32,1,1]`), not on the mesh of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit_experiments.recipes.language_model import REDUCED_TEXT, LmExperiment
from layerkit_experiments.recipes.published_data.lambada import lambada, lambada_readers
from layerkit_runner.step.task_metrics import Mean


class Gpt126M(LmExperiment, abstract=True):
    """GPT-3 Small (Brown et al., 2020, arXiv:2005.14165) with unrolled layers, on The Pile."""

    USE_FP8: bool = False
    """Pax's name of `QUANTIZATION="fp8_delayed"`."""

    NUM_LAYERS = 12
    MODEL_DIMS = 768
    HIDDEN_DIMS = 3072
    NUM_HEADS = 12
    DIMS_PER_HEAD = 64
    VOCAB_SIZE = 50304
    MAX_SEQ_LEN = 2048
    EOS_ID = None
    INIT_STD = 0.023
    ACTIVATION = "gelu"
    POSITIONS = "trainable"
    ATTENTION_BIAS = True
    FEED_FORWARD_BIAS = True
    NORM_EPSILON = 1e-5
    FPROP_DTYPE = "bfloat16"
    USE_REPEATED_LAYER = False
    LEARNING_RATE = 6e-4
    DECAYED_WEIGHTS = "all"
    WARMUP_STEPS = 636
    DECAY_START = 637
    DECAY_END = 500_000
    MAX_STEPS = 600_000

    tfds_name = "the_pile:1.0.0"
    reduced_fields: ClassVar[Mapping[str, Any]] = REDUCED_TEXT


class Pile126M(Gpt126M):
    """GPT-3 Small on 8 nodes of 8 GPUs (h100x64), data parallel."""

    tags = ("multislice",)

    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [8, 1, 1]
    DCN_MESH_SHAPE = [8, 1, 1]


class GPT5B(Gpt126M):
    """GPT-3 with 5 billion weights on 32 nodes of 8 GPUs (h100x256), fully sharded."""

    tags = ("multislice",)

    NUM_LAYERS = 24
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16384
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    INIT_STD = 0.01
    LAYER_INPUT_DROPOUT_RATE = 0.1
    USE_REPEATED_LAYER = True
    CHECKPOINT_POLICY = "dots_no_batch"
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 32, 1]
    LEARNING_RATE = 1.6e-4
    WARMUP_STEPS = 115
    DECAY_START = 116
    DECAY_END = 62_500
    MAX_STEPS = 75_000
    SUMMARY_INTERVAL_STEPS = 10
    CHECKPOINT_EVERY_N_STEPS = 250


class GPT175B(Gpt126M):
    """GPT-3 with 175 billion weights on 32 nodes of 8 GPUs (h100x256), fully sharded."""

    tags = ("multislice",)

    NUM_LAYERS = 96
    MODEL_DIMS = 12288
    HIDDEN_DIMS = 49152
    NUM_HEADS = 96
    DIMS_PER_HEAD = 128
    VOCAB_SIZE = 50257
    USE_REPEATED_LAYER = True
    CHECKPOINT_POLICY = "full"
    PERCORE_BATCH_SIZE = 6.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 32, 1]
    LEARNING_RATE = 2e-5
    WARMUP_STEPS = 265
    DECAY_START = 266
    DECAY_END = 108_600
    MAX_STEPS = 75_000
    SUMMARY_INTERVAL_STEPS = 10
    CHECKPOINT_EVERY_N_STEPS = 100


class Synthetic126M(Pile126M):
    """GPT-3 Small on synthetic tokens, on 8 nodes of 8 GPUs (h100x64)."""

    DATA_FORMAT = "synthetic"
    MAX_STEPS = 100
    SUMMARY_INTERVAL_STEPS = 100


class Synthetic5B(GPT5B):
    """GPT-3 with 5 billion weights on synthetic tokens, on 32 nodes of 8 GPUs (h100x256)."""

    DATA_FORMAT = "synthetic"
    MAX_STEPS = 100
    SUMMARY_INTERVAL_STEPS = 10


class Synthetic175B(GPT175B):
    """GPT-3 with 175 billion weights on synthetic tokens, on 32 nodes of 8 GPUs (h100x256)."""

    DATA_FORMAT = "synthetic"
    MAX_STEPS = 100
    SUMMARY_INTERVAL_STEPS = 10


# Other published names of the classes.
Pile5B = GPT5B
Pile175B = GPT175B


class Lambada126M(Gpt126M):
    """GPT-3 Small, evaluated on LAMBADA's last words, zero-shot."""

    trained_by = Pile126M
    tags = ("eval_only",)

    TARGET_LENGTH: int = 64
    """Positions for the last word; the other positions hold the passage before it."""
    PERCORE_BATCH_SIZE = 4.0
    EVAL_NUM_BATCHES = None
    PACKED_INPUT = False

    tfds_name = "lambada:1.0.0"
    unused_fields = ("PROMPTS_PER_DEVICE", "PROMPT_LENGTH")
    reduced_fields: ClassVar[Mapping[str, Any]] = {"DATA_FORMAT": "seqio", "TARGET_LENGTH": 16}

    readers = lambada_readers
    datasets = lambada

    def task(self) -> Config:
        """Return the task with the share of words whose every token is the most probable."""
        task = super().task()
        task.metrics = {"last_word_accuracy": Mean.HParams.config(value="outputs/exact_match")}
        return task
