"""The first run: a language model on this machine's own text, in minutes, without downloads."""

from __future__ import annotations

from layerkit_experiments.lm.recipes.data import LocalFiles
from layerkit_experiments.lm.recipes.experiment import LmExperiment
from layerkit_experiments.lm.recipes.optimization import AdamWCosine
from layerkit_experiments.lm.recipes.parallelism import Spmd


class LocalText(AdamWCosine, Spmd, LocalFiles, LmExperiment):
    """A rotary decoder of a million parameters on the bytes of Python's standard library."""

    VOCAB_SIZE = 259
    NUM_LAYERS = 4
    MODEL_DIMS = 128
    HIDDEN_DIMS = 512
    NUM_HEADS = 4
    NORM = "rms_norm"
    ACTIVATION = "silu"
    USE_GATED_ACTIVATION = True
    POSITIONS = "rotary"
    PERCORE_BATCH_SIZE = 16.0
    MAX_SEQ_LEN = 256
    MAX_STEPS = 600
    SUMMARY_INTERVAL_STEPS = 10
    EVAL_INTERVAL_STEPS = 200
    CHECKPOINT_EVERY_N_STEPS = 200
    TEMPERATURE = 0.7
    MAX_DECODE_STEPS = 256
