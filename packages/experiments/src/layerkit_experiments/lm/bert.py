"""BERT: masked language modeling (Devlin et al., 2018; arXiv:1810.04805).

The published model also predicts the next sentence, with sentence embeddings and a pooler. RoBERTa
(arXiv:1907.11692) shows that this does not help, and it is omitted here. The head is the embedding
and a bias for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.layers import LayerNorm
from layerkit.models import BertModel
from layerkit.weights import WeightInit
from layerkit_experiments.lm.recipes.corpora import C4
from layerkit_experiments.lm.recipes.experiment import LmExperiment
from layerkit_experiments.lm.recipes.parallelism import Spmd
from layerkit_experiments.lm.recipes.published_optimizers import AdamWLinear

_INIT_STD = 0.02


class MaskedLm(LmExperiment, abstract=True):
    """A BertModel with bidirectional attention and norms after the residual."""

    tags: ClassVar[tuple[str, ...]] = ("masked_lm",)

    POSITIONS = "trainable"
    NORM_EPSILON = 1e-12
    ACTIVATION = "gelu_exact"
    ATTENTION_BIAS = True
    FEED_FORWARD_BIAS = True
    DROPOUT_RATE = 0.1
    MASK_ID: int | None = None
    """Id of the mask token, which the text does not contain; None for the last id."""
    UNMASKED_IDS: list[int] = [0, 1, 2]
    """Ids that are never masked: padding, start and end tokens."""

    def model(self) -> Config:
        """Return the config of the BertModel."""
        lm = super().model().lm_tpl
        layer = lm.stack_tpl.layer_tpl
        layer.norm_policy = "post"
        layer.attention_tpl.dropout_rate = self.DROPOUT_RATE
        lm.set(
            is_causal=False,
            final_norm_tpl=None,
            embedding_norm_tpl=LayerNorm.HParams.config(epsilon=self.NORM_EPSILON),
            params_init=WeightInit.TruncatedGaussian(_INIT_STD),
        )
        lm.softmax_tpl.set(use_bias=True, weight_init=WeightInit.TruncatedGaussian(_INIT_STD))
        lm.position_tpl.weight_init = WeightInit.TruncatedGaussian(_INIT_STD)
        model = BertModel.HParams.config(
            lm_tpl=lm, fprop_dtype=self.FPROP_DTYPE, unmasked_ids=tuple(self.UNMASKED_IDS)
        )
        mask_id = self.VOCAB_SIZE - 1 if self.MASK_ID is None else self.MASK_ID
        model.augmenter_tpl.mask_token_id = mask_id
        return model


class Bert(AdamWLinear, Spmd, C4, MaskedLm, abstract=True):
    """Training of both sizes: a million steps of 256 rows of 512 tokens."""

    VOCAB_SIZE = 30_522
    MAX_SEQ_LEN = 512
    FPROP_DTYPE = "bfloat16"
    LEARNING_RATE = 1e-4
    WARMUP_STEPS = 10_000
    MAX_STEPS = 1_000_000

    # 259 ids of bytes and the mask token.
    reduced_fields: ClassVar[Mapping[str, Any]] = {"VOCAB_SIZE": 260, "DROPOUT_RATE": 0.0}


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
