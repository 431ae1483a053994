"""Decoder, optimizer and schedule of NVIDIA's speed tests in Pax."""

from __future__ import annotations

from layerkit.base.weights import WeightInit
from layerkit.config import Config, Partial
from layerkit_experiments.lm.pax import CappedDecoder
from layerkit_experiments.recipes.local_files import SyntheticTokens
from layerkit_experiments.recipes.optimizers import AdamExponential
from layerkit_experiments.recipes.published_optimizers import pax_adafactor
from layerkit_experiments.recipes.quantization import Fp8Field
from layerkit_runner.optim.schedules import linear_warmup_cosine_decay


class NvidiaDecoder(Fp8Field, SyntheticTokens, CappedDecoder, abstract=True):
    """Capped decoder of synthetic tokens with learned positions and one first deviation."""

    POSITIONS = "trainable"
    INIT_STD = 0.023
    VOCAB_SIZE = 51_200
    MAX_SEQ_LEN = 2048
    MAX_POSITIONS: int | None = 2048

    def model(self) -> Config:
        """Return the config of the LanguageModel, whose embedding vectors start with length 1."""
        model = super().model()
        model.lm_tpl.softmax_tpl.weight_init = WeightInit.Gaussian(self.MODEL_DIMS**-0.5)
        return model


class NvidiaLlamaDecoder(NvidiaDecoder, abstract=True):
    """LLaMA 2 with the embedding, the biases and the capped logits of the capped decoder."""

    NORM = "rms_norm"
    POSITIONS = "rotary"
    MAX_POSITIONS = None
    ACTIVATION = "silu"
    USE_GATED_ACTIVATION = True
    ATTENTION_BIAS = True
    ATTENTION_LOGIT_CAP = None
    PER_DIM_SCALE = False
    COMBINE_QKV = False
    MAX_SEQ_LEN = 4096


class CappedCosine(AdamExponential):
    """Adam or Adafactor with an update cap; a cosine from the first step on, down to a tenth."""

    LEARNING_RATE = 6e-4
    ADAM_BETA2 = 0.95
    ADAM_EPSILON = 1e-8
    CLIP_GRADIENT_NORM = 1.0
    USE_ADAFACTOR: bool = False
    """Use Pax's `ShardedAdafactor`, with a momentum in int8 and factors of the second moment."""
    WARMUP_STEPS = 0
    DECAY_START = 1
    DECAY_END = 500_000
    MAX_STEPS = 500_000
    CHECKPOINT_EVERY_N_STEPS = 100_000

    def optimizer(self) -> Partial:
        """Return Adam or Adafactor."""
        return pax_adafactor(self, decay_adam=0.99) if self.USE_ADAFACTOR else super().optimizer()

    def schedule(self) -> Config:
        """Return the config of the cosine."""
        return self.schedule_of(linear_warmup_cosine_decay)
