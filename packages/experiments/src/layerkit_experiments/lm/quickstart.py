"""The quickstart: a language model trained on text of this machine in minutes."""

from __future__ import annotations

from layerkit_experiments.recipes.language_model import LmExperiment
from layerkit_experiments.recipes.local_files import LocalFiles


class LocalText(LocalFiles, LmExperiment):
    """A rotary decoder of a million parameters on the bytes of Python's standard library."""

    TOKENIZER = "bytes"
    VOCAB_SIZE = 259
    NUM_LAYERS = 4
    MODEL_DIMS = 128
    HIDDEN_DIMS = 512
    NUM_HEADS = 2
    NUM_KV_HEADS = 1
    NORM = "rms_norm"
    ACTIVATION = "silu"
    USE_GATED_ACTIVATION = True
    POSITIONS = "rotary"
    WEIGHT_INIT = "fan_in"
    SCALE_RESIDUAL_INIT = True

    PERCORE_BATCH_SIZE = 8.0
    MAX_SEQ_LEN = 128
    MAX_STEPS = 2000
    LEARNING_RATE = 2e-3
    ADAM_BETA2 = 0.98
    WEIGHT_DECAY = 0.05
    WARMUP_STEPS = 200

    EVAL_INTERVAL_STEPS = 500
    CHECKPOINT_EVERY_N_STEPS = 500
    TEMPERATURE = 0.7
    # Prompt and continuation fit into the trained length.
    PROMPT_LENGTH = 32
    MAX_DECODE_STEPS = 96
    EOS_ID = 2
