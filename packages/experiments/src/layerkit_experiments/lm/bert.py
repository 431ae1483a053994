"""BERT: masked language modeling (Devlin et al., 2018; arXiv:1810.04805).

The published model also predicts the next sentence, with sentence embeddings and a pooler. RoBERTa
(arXiv:1907.11692) shows that this does not help, and it is omitted here. The head is the embedding
and a bias for each token.

The models of Pax are its decoders without the causal mask. Pax reads the rows that MLPerf prepared
from Wikipedia, with 103 as the mask token; here they read C4 in rows of the same length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.layers import LayerNorm
from layerkit.models import BertModel
from layerkit_experiments.lm.pax import PaxLm
from layerkit_experiments.recipes.language_model import REDUCED_TEXT, LmExperiment, decoder
from layerkit_experiments.recipes.meshes import pmap
from layerkit_experiments.recipes.optimizers import (
    adafactor_exponential,
    adam_exponential,
    adamw_linear,
)

_INIT_STD = 0.02


def masked_lm(fields: Any) -> Config:
    """Return the config of a BertModel with bidirectional attention.

    Args:
      fields: Experiment with MASK_ID and UNMASKED_IDS.
    """
    lm = decoder(fields).lm_tpl
    lm.is_causal = False
    model: Config = BertModel.HParams.config(
        lm_tpl=lm, fprop_dtype=fields.FPROP_DTYPE, unmasked_ids=tuple(fields.UNMASKED_IDS)
    )
    mask_id = fields.VOCAB_SIZE - 1 if fields.MASK_ID is None else fields.MASK_ID
    model.augmenter_tpl.mask_token_id = mask_id
    return model


class Bert(LmExperiment, abstract=True):
    """Norms after the residual; a million steps of 256 rows of 512 tokens."""

    tags: ClassVar[tuple[str, ...]] = ("masked_lm",)

    MASK_ID: int | None = None
    """Id of the mask token, which the text does not contain; None for the last id."""
    UNMASKED_IDS: list[int] = [0, 1, 2]
    """Ids that are never masked: padding, start and end tokens."""

    POSITIONS = "trainable"
    NORM_EPSILON = 1e-12
    ACTIVATION = "gelu_exact"
    ATTENTION_BIAS = True
    FEED_FORWARD_BIAS = True
    DROPOUT_RATE = 0.1
    VOCAB_SIZE = 30_522
    MAX_SEQ_LEN = 512
    FPROP_DTYPE = "bfloat16"
    LEARNING_RATE = 1e-4
    ADAM_BETA2 = 0.999
    ADAM_EPSILON = 1e-6
    WEIGHT_DECAY = 0.01
    WARMUP_STEPS = 10_000
    MAX_STEPS = 1_000_000

    unused_fields = ("DECAYED_WEIGHTS",)
    reduced_fields: ClassVar[Mapping[str, Any]] = {**REDUCED_TEXT, "DROPOUT_RATE": 0.0}
    learner = adamw_linear

    def model(self) -> Config:
        """Return the config of the BertModel."""
        model = masked_lm(self)
        lm = model.lm_tpl
        layer = lm.stack_tpl.layer_tpl
        layer.norm_policy = "post"
        layer.attention_tpl.dropout_rate = self.DROPOUT_RATE
        lm.set(
            final_norm_tpl=None,
            embedding_norm_tpl=LayerNorm.HParams.config(epsilon=self.NORM_EPSILON),
            params_init=WeightInit.TruncatedGaussian(_INIT_STD),
        )
        lm.softmax_tpl.set(use_bias=True, weight_init=WeightInit.TruncatedGaussian(_INIT_STD))
        lm.position_tpl.weight_init = WeightInit.TruncatedGaussian(_INIT_STD)
        return model


class BertBase(Bert):
    """BERT base, 110M weights, on 16 chips (v5p:2x2x4)."""

    NUM_LAYERS = 12
    MODEL_DIMS = 768
    HIDDEN_DIMS = 3072
    NUM_HEADS = 12
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [16, 1, 1]


class BertLarge(Bert):
    """BERT large, 340M weights, on 64 chips (v5p:4x4x4)."""

    NUM_LAYERS = 24
    MODEL_DIMS = 1024
    HIDDEN_DIMS = 4096
    NUM_HEADS = 16
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [64, 1, 1]


class PaxBert(PaxLm, abstract=True):
    """Base of the models of Pax, with unrolled layers and the sizes of 100 billion weights."""

    tags: ClassVar[tuple[str, ...]] = ("masked_lm",)

    MASK_ID: int | None = None
    """Id of the mask token, which the text does not contain; None for the last id."""
    UNMASKED_IDS: list[int] = [0, 1, 2]
    """Ids that are never masked: padding, start and end tokens."""
    LABEL_SMOOTHING: float = 0.1
    """Probability that the label of a masked token gives to all others, in equal parts."""

    DATA_FORMAT = "seqio"
    EVAL_NUM_BATCHES = 8
    EOS_ID = 1
    NUM_LAYERS = 33
    MODEL_DIMS = 12_288
    HIDDEN_DIMS: int | None = 98_304
    NUM_HEADS = 128
    DIMS_PER_HEAD = 96
    ACTIVATION = "relu"
    USE_REPEATED_LAYER = False
    MAX_SEQ_LEN = 512
    PERCORE_BATCH_SIZE = 4.0
    LEARNING_RATE = 2.5e-4
    WEIGHT_DECAY = 1e-2
    DECAY_END = 100_000
    MAX_STEPS = 100_000

    unused_fields: ClassVar[tuple[str, ...]] = ("OPTIMIZER", "DECAYED_WEIGHTS", "ADAM_EPSILON")
    reduced_fields: ClassVar[Mapping[str, Any]] = {**REDUCED_TEXT, "DROPOUT_RATE": 0.0}
    learner = adafactor_exponential
    shards_features = True

    def model(self) -> Config:
        """Return the config of the BertModel."""
        model = masked_lm(self)
        # The layer spreads its probability over all classes, the label's too.
        others = max(1, self.VOCAB_SIZE - 1)
        model.lm_tpl.softmax_tpl.label_smoothing = self.LABEL_SMOOTHING * self.VOCAB_SIZE / others
        return model


class BertAdamL4H128(PaxBert):
    """4 layers of 128 dimensions under pmap."""

    tags = ("pmap",)

    NUM_LAYERS = 4
    MODEL_DIMS = 128
    HIDDEN_DIMS = None
    NUM_HEADS = 8
    DIMS_PER_HEAD = 16
    COMBINE_QKV = False
    CHECKPOINT_POLICY = "none"
    LABEL_SMOOTHING = 0.0
    PERCORE_BATCH_SIZE = 8.0
    LEARNING_RATE = 1e-3
    WEIGHT_DECAY = 1e-3
    DECAY_END = 300_000
    MAX_STEPS = 300_000

    unused_fields = (
        *("OPTIMIZER", "DECAYED_WEIGHTS"),
        *("ICI_MESH_SHAPE", "DCN_MESH_SHAPE", "SEQUENCE_PARALLEL"),
    )

    learner = adam_exponential
    partitioner = pmap


class BertSpmdL4H128(PaxBert):
    """4 layers of 128 dimensions, sharded by fsdp and tensor over 8 chips (v5p:2x2x2)."""

    NUM_LAYERS = 4
    MODEL_DIMS = 128
    HIDDEN_DIMS = None
    NUM_HEADS = 8
    DIMS_PER_HEAD = 16
    CHECKPOINT_POLICY = "none"
    LABEL_SMOOTHING = 0.0
    WEIGHT_DECAY = 1e-3
    ICI_MESH_SHAPE = [1, 4, 2]


class BertSpmdL33H12kBiggerBatch(PaxBert):
    """100 billion weights with 2048 rows on 512 chips (v4:8x8x8)."""

    CHECKPOINT_POLICY = "dots_no_batch"  # all activations take 49 GB on a device
    ICI_MESH_SHAPE = [1, 64, 8]
    CHECKPOINT_EVERY_N_STEPS = 1000


class BertSpmdL33H12kBiggerBatch8x8x16(PaxBert):
    """100 billion weights with 4096 rows on 1024 chips (v4:8x8x16)."""

    CHECKPOINT_POLICY = "dots_no_batch"
    ICI_MESH_SHAPE = [1, 64, 16]
    CHECKPOINT_EVERY_N_STEPS = 500


class BertSpmdL66H12kBiggerBatch8x8x16(PaxBert):
    """200 billion weights with 4096 rows on 1024 chips (v4:8x8x16)."""

    NUM_LAYERS = 66
    ICI_MESH_SHAPE = [1, 64, 16]
    CHECKPOINT_POLICY = "projections"
    CHECKPOINT_EVERY_N_STEPS = 200
    CHECKPOINT_MAX_TO_KEEP = 20


class BertSpmdL66H12kBiggerBatch8x8x8(PaxBert):
    """200 billion weights with 512 rows on 512 chips (v4:8x8x8)."""

    NUM_LAYERS = 66
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 64, 8]
    CHECKPOINT_POLICY = "dots_no_batch"
    CHECKPOINT_EVERY_N_STEPS = 200
    CHECKPOINT_MAX_TO_KEEP = 20
