"""Translation of synthetic number words from English to German."""

from __future__ import annotations

from layerkit_experiments.translation.experiment import TranslationExperiment


class EnglishToGermanNumbers(TranslationExperiment):
    """Byte-level translation of "four hundred and twenty-one" to "vierhunderteinundzwanzig"."""

    DATA_FORMAT = "number_words"
    PERCORE_BATCH_SIZE = 16.0
    MAX_SEQ_LEN = 128
    NUM_ENCODER_LAYERS = 2
    NUM_DECODER_LAYERS = 2
    MODEL_DIMS = 128
    HIDDEN_DIMS = 256
    NUM_HEADS = 4
    NORM_POLICY = "pre"
    DROPOUT_RATE = 0.0
    LABEL_SMOOTHING = 0.0
    MAX_DECODE_STEPS = 48
    LEARNING_RATE = 2e-3
    ADAM_BETA2 = 0.98
    WARMUP_STEPS = 100
    MAX_STEPS = 400
    SUMMARY_INTERVAL_STEPS = 20
    EVAL_INTERVAL_STEPS = 100
    CHECKPOINT_EVERY_N_STEPS = 200
