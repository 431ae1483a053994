"""GLaM at the sizes of its table 4 (Du et al., 2021; arXiv:2112.06905).

A decoder with relative positions in each layer and RMS norms. The first of every two layers has
experts, of which a token uses two; the others have a gated GELU. Batches are the published million
tokens: 1024 rows of 1024.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.layers import RelativeBias
from layerkit_experiments.lm.experiment import LmExperiment
from layerkit_experiments.recipes.corpora import C4
from layerkit_experiments.recipes.experts import MixtureOfExperts, SpmdExperts
from layerkit_experiments.recipes.published_optimizers import AdafactorSqrt


class RelativePositions(LmExperiment, abstract=True):
    """Relative position biases in each layer (T5; arXiv:1910.10683) as the only positions."""

    POSITIONS = "none"

    def model(self) -> Config:
        """Return the config of the LanguageModel."""
        model = super().model()
        bias = RelativeBias.HParams.config()
        model.lm_tpl.stack_tpl.layer_tpl.attention_tpl.relative_bias_tpl = bias
        return model


class Glam(MixtureOfExperts, AdafactorSqrt, SpmdExperts, C4, RelativePositions, abstract=True):
    """Common values of the family: 64 experts, of which each token uses two."""

    VOCAB_SIZE = 256_000
    MAX_SEQ_LEN = 1024
    NORM = "rms_norm"
    ACTIVATION = "gelu"
    USE_GATED_ACTIVATION = True
    WEIGHT_INIT = "fan_in"
    NUM_EXPERTS = 64
    EXPERT_PERIOD = 2
    # As many slots as choices, so that balanced routing drops nothing.
    CAPACITY_FACTOR = 2.0
    SOFTMAX_CHUNK_SIZE = 256
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    MAX_STEPS = 500_000


class Glam126M64E(Glam):
    """GLaM 0.1B/64E: 1.9B weights without the embedding, on 64 chips (v5p:4x4x4)."""

    NUM_LAYERS = 12
    MODEL_DIMS = 768
    HIDDEN_DIMS = 3072
    NUM_HEADS = 12
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [1, 1, 64, 1]


class Glam8B64E(Glam):
    """GLaM 8B/64E: 143B weights, 9.8B of them for each token, on 256 chips (v5p:8x8x4)."""

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 16384
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [1, 4, 64, 1]


class Glam64B64E(Glam):
    """GLaM 64B/64E: 1.2T weights, 96.6B of them for each token, on 1024 chips (v4:8x8x16)."""

    NUM_LAYERS = 64
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 32768
    NUM_HEADS = 128
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 16, 8, 8]
