"""A small Conformer that recognizes synthetic spoken digits, with and without pre-training."""

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
    DECODE_INTERVAL_STEPS: int | None = 250
    CHECKPOINT_EVERY_N_STEPS = 250


class DigitsBestRq(Digits):
    """BEST-RQ pre-training of the Conformer of Digits on spoken digits without transcripts."""

    LOSS = "best_rq"
    NUM_CODES = 64
    NUM_CODEBOOKS = 4
    MASK_PROB = 0.03
    MASK_FRAMES = 12
    MAX_STEPS = 1000
    DECODE_INTERVAL_STEPS = None


class DigitsFewLabels(Digits):
    """Digits with 64 transcripts; INIT_FROM is a run of DigitsBestRq, or None."""

    NUM_TRAIN = 64
    MAX_STEPS = 150
    EVAL_INTERVAL_STEPS = 150
    DECODE_INTERVAL_STEPS = 150
    CHECKPOINT_EVERY_N_STEPS = 150
