"""PaxLm, the base class of Pax's language models on TPUs.

Its decoder has the defaults of Praxis: sinusoidal positions, capped logits, and biases outside
attention. The optimizer is Pax's Adam with an update cap, whose rate decays to a tenth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit_experiments.recipes.language_model import TEXT_FIELDS, DataFormat, LmExperiment
from layerkit_experiments.recipes.optimizers import adam_exponential


class PaxLm(LmExperiment, abstract=True):
    """A pre-norm decoder with capped logits and full rematerialization, on synthetic tokens."""

    ATTENTION_LOGIT_CAP: float | None = 50.0
    SOFTMAX_LOGIT_CAP: float | None = 30.0
    FEED_FORWARD_BIAS = True
    PER_DIM_SCALE = True
    SOFTMAX_BIAS = True
    SCALE_EMBEDDING = True
    WEIGHT_INIT = "xavier_last_axes"
    # The optimizer caps the update of the three projections as that of one weight.
    COMBINE_QKV = True
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    DATA_FORMAT: DataFormat = "synthetic"
    EVAL_NUM_BATCHES: int | None = 1
    EOS_ID: int | None = None

    ADAM_BETA2 = 0.99
    ADAM_EPSILON = 1e-6
    WEIGHT_DECAY = 1e-3
    CLIP_GRADIENT_NORM = 5.0
    UPDATE_RMS_CAP: float | None = 1.0
    WARMUP_STEPS = 4000
    DECAY_START = 4001
    DECAY_END = 300_000

    unused_fields: ClassVar[tuple[str, ...]] = ("OPTIMIZER", "DECAYED_WEIGHTS", *TEXT_FIELDS)
    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "DECAY_START": 6,
        "DECAY_END": 200,
        "MAX_SEQ_LEN": 64,
        "VOCAB_SIZE": 64,
    }

    learner = adam_exponential
