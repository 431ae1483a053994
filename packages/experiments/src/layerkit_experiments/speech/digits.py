"""A small Conformer that recognizes synthetic spoken digits."""

from __future__ import annotations

from layerkit_experiments.speech.conformer_ctc import SpeechExperiment


class Digits(SpeechExperiment):
    """Strings of three to five digits, recognized by CTC within minutes on two cores."""

    NUM_LAYERS = 2
    MODEL_DIMS = 96
    NUM_HEADS = 4
    KERNEL_SIZE = 7
    NUM_CHANNELS = 16
    CONV_NORM = "layer"
    DROPOUT_RATE = 0.0
    SAMPLE_RATE = 8000
    NUM_BINS = 40
    TIME_MASKS = 1
    DATA_FORMAT = "digits"
    MAX_SECONDS = 2.75
    MAX_LABELS = 9
    PERCORE_BATCH_SIZE = 16.0
    LEARNING_RATE = 2e-3
    ADAM_BETA2 = 0.98
    WEIGHT_DECAY = 1e-3
    WARMUP_STEPS = 50
    MAX_STEPS = 500
    EVAL_INTERVAL_STEPS = 100
    DECODE_INTERVAL_STEPS = 250
    CHECKPOINT_EVERY_N_STEPS = 250
