"""The base and the big Transformer of 2017 on WMT14 English-German (arXiv:1706.03762).

A batch is the published 25,000 tokens of each side, 192 rows of 128. `--fdl.TOKENIZER=ende.model`
names the shared vocabulary of both languages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit_experiments.recipes.optimizers import adam_inverse_sqrt
from layerkit_experiments.translation.experiment import TranslationExperiment


class WmtEnDe(TranslationExperiment, abstract=True):
    """Common values of both sizes; data are two files per split and a shared vocabulary."""

    LEARNING_RATE_SCALE: float = 1.0
    ADAM_BETA2 = 0.98
    ADAM_EPSILON = 1e-9
    CLIP_GRADIENT_NORM = None
    WARMUP_STEPS = 4000
    DATA_FOLDER = "wmt14"
    VOCAB_SIZE = 37_000
    MAX_SEQ_LEN = 128
    PERCORE_BATCH_SIZE = 24.0
    FPROP_DTYPE = "bfloat16"
    BEAM_SIZE = 4
    MAX_DECODE_STEPS = 128
    ICI_MESH_SHAPE = [8, 1, 1]

    unused_fields = (
        *("OPTIMIZER", "LEARNING_RATE", "WEIGHT_DECAY", "DECAYED_WEIGHTS"),
        *("DECAY_START", "DECAY_END", "MIN_LEARNING_RATE_RATIO", "LEARNING_RATE_SCHEDULE"),
    )
    reduced_fields: ClassVar[Mapping[str, Any]] = {"LEARNING_RATE_SCALE": 0.1, "WARMUP_STEPS": 10}

    learner = adam_inverse_sqrt


class TransformerBase(WmtEnDe):
    """65M weights, 100,000 steps on 8 GPUs (h100x8)."""

    MAX_STEPS = 100_000


class TransformerBig(WmtEnDe):
    """213M weights, 300,000 steps on 8 GPUs (h100x8)."""

    MODEL_DIMS = 1024
    HIDDEN_DIMS = 4096
    NUM_HEADS = 16
    DROPOUT_RATE = 0.3
    MAX_STEPS = 300_000
