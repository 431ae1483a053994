"""Families of decoders with their published schedules, without sizes.

`PaxDecoder` has the defaults of Praxis: sinusoidal positions, a capped attention, and biases
outside attention. `CappedDecoder` is the decoder of Pax's SPMD language models. `Gpt3Decoder` is
GPT-3 (Brown et al., 2020, arXiv:2005.14165) as trained by NVIDIA and MLPerf: learned positions,
biases, no caps.
"""

from __future__ import annotations

from layerkit_experiments.lm.experiment import LmExperiment
from layerkit_experiments.recipes.optimizers import AdamWCosine


class PaxDecoder(LmExperiment, abstract=True):
    """Pre-norm decoder with the defaults of Praxis, which has biases outside attention."""

    ATTENTION_LOGIT_CAP: float | None = 50.0
    FEED_FORWARD_BIAS = True
    PER_DIM_SCALE = True
    SOFTMAX_BIAS = True
    POSITIONS = "sinusoidal"
    SCALE_EMBEDDING = True
    WEIGHT_INIT = "xavier_last_axes"


class CappedDecoder(PaxDecoder, abstract=True):
    """Pre-norm decoder with capped logits and full rematerialization."""

    SOFTMAX_LOGIT_CAP = 30.0
    ACTIVATION = "gelu"
    # The optimizer caps the update of the three projections as that of one weight.
    COMBINE_QKV = True
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"


class Gpt3Decoder(LmExperiment, abstract=True):
    """Pre-norm decoder with learned positions and biases; subclasses set INIT_STD."""

    ACTIVATION = "gelu"
    POSITIONS = "trainable"
    ATTENTION_BIAS = True
    FEED_FORWARD_BIAS = True
    NORM_EPSILON = 1e-5
    FPROP_DTYPE = "bfloat16"


class Gpt3Schedule(AdamWCosine):
    """AdamW that decays every weight; linear warmup, then a cosine down to a tenth."""

    ADAM_BETA1 = 0.9
    ADAM_BETA2 = 0.95
    ADAM_EPSILON = 1e-8
    WEIGHT_DECAY = 0.1
    DECAYED_WEIGHTS = "all"
    CLIP_GRADIENT_NORM = 1.0
    MIN_LEARNING_RATE_RATIO = 0.1
