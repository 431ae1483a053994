"""The base and the big Transformer of 2017 on WMT14 English-German (arXiv:1706.03762).

A batch is the published 25,000 tokens of each side, 192 rows of 128. `--fdl.TOKENIZER=ende.model`
names the shared vocabulary of both languages.
"""

from __future__ import annotations

from layerkit_experiments.recipes.meshes import Spmd
from layerkit_experiments.recipes.published_optimizers import AdamInverseSqrt
from layerkit_experiments.translation.experiment import TranslationExperiment, Translations


class WmtEnDe(AdamInverseSqrt, Spmd, Translations, TranslationExperiment, abstract=True):
    """Common values of both sizes; data are two files per split and a shared vocabulary."""

    DATA_FOLDER = "wmt14"
    VOCAB_SIZE = 37_000
    MAX_SEQ_LEN = 128
    PERCORE_BATCH_SIZE = 24.0
    FPROP_DTYPE = "bfloat16"
    BEAM_SIZE = 4
    MAX_DECODE_STEPS = 128
    ICI_MESH_SHAPE = [8, 1, 1]
    WARMUP_STEPS = 4000


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
