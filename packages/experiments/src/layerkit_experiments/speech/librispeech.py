"""Conformers of the published sizes on LibriSpeech, as transducers, and by BEST-RQ.

Sizes, dropout, SpecAugment, Adam and the schedule are those of Gulati et al., 2020
(arXiv:2005.08100, table 1 and section 3.2): transducers over 1,024 word pieces, trained with a peak
rate of 0.05/√dims. Their predictor is an LSTM of one layer; here it reads the last two labels, and
`JOINT_DIMS` is the size of their decoder. Batch size and number of steps are not published.

`DATA_FOLDER` has the folders of LibriSpeech as `train` and `heldout`; FLAC needs soundfile.
`--fdl.TOKENIZER=FILE.model` is a SentencePiece model of 1,024 pieces; byte transcripts are the
default.

`ConformerXLBestRq` has the values of Chiu et al., 2022 (arXiv:2202.01855, section 4.1) and the size
of Zhang et al., 2020 (arXiv:2010.10504). Libri-Light is its data there, and the number of steps is
not published. Recordings need transcripts, which may be empty.
"""

from __future__ import annotations

from layerkit_experiments.speech.conformer_ctc import SpeechExperiment


class ConformerS(SpeechExperiment):
    """Conformer (S) on 8 GPUs (h100x8), data parallel."""

    LOSS = "transducer"
    NUM_LAYERS = 16
    MODEL_DIMS = 144
    NUM_HEADS = 4
    KERNEL_SIZE = 32
    NUM_CHANNELS = 144
    JOINT_DIMS = 320
    VOCAB_SIZE = 1024
    DROPOUT_RATE = 0.1
    FPROP_DTYPE = "bfloat16"
    DATA_FOLDER = "librispeech"
    PERCORE_BATCH_SIZE = 32.0
    LEARNING_RATE = 0.05 / 144**0.5
    LEARNING_RATE_SCHEDULE = "inverse_sqrt"
    ADAM_BETA1 = 0.9
    ADAM_BETA2 = 0.98
    ADAM_EPSILON = 1e-9
    WEIGHT_DECAY = 1e-6
    WARMUP_STEPS = 10_000
    MAX_STEPS = 100_000
    EVAL_INTERVAL_STEPS = 5000
    DECODE_INTERVAL_STEPS: int | None = 5000
    ICI_MESH_SHAPE = [8, 1, 1]


class ConformerM(ConformerS):
    """Conformer (M) on 8 GPUs (h100x8), data parallel."""

    MODEL_DIMS = 256
    NUM_CHANNELS = 256
    JOINT_DIMS = 640
    LEARNING_RATE = 0.05 / 256**0.5


class ConformerL(ConformerS):
    """Conformer (L) on 8 GPUs (h100x8), data parallel."""

    NUM_LAYERS = 17
    MODEL_DIMS = 512
    NUM_HEADS = 8
    NUM_CHANNELS = 512
    JOINT_DIMS = 640
    LEARNING_RATE = 0.05 / 512**0.5


class ConformerXLBestRq(ConformerS):
    """BEST-RQ pre-training of a Conformer of 0.6 billion weights (h100x128), data parallel."""

    LOSS = "best_rq"  # type: ignore[assignment]  # mypy narrows the field to "transducer"
    NUM_LAYERS = 24
    MODEL_DIMS = 1024
    NUM_HEADS = 8
    KERNEL_SIZE = 5
    NUM_CHANNELS = 256
    LEARNING_RATE = 0.004
    WARMUP_STEPS = 25_000
    MAX_STEPS = 400_000
    DECODE_INTERVAL_STEPS = None
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [128, 1, 1]
