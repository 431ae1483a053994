"""BertModel: masked language modeling with a bidirectional Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import NATS_PER_TOKEN, BaseModel, Metrics
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.masked_lm_augmenter import MaskedLmAugmenter
from layerkit.layers.transformer.transformer import drop_none
from layerkit.models.transformer_lm import TransformerLm
from layerkit.models.weighted_metrics import token_metrics
from layerkit.ops.attention.masks import read_segments


class BertModel(BaseModel):
    """A masked language model (Devlin et al., 2018, arXiv:1810.04805).

    A batch has `ids` int32 `[batch, length]`, and either `paddings` `[batch, length]` (1 is
    padding, which may be between tokens) or, for packed rows, `segment_ids`, which are runs of
    tokens, and `segment_pos`. For networks with types of tokens it may have `token_type_ids` int32
    `[batch, length]`. The model draws which tokens are masked, unless the batch has `masked_ids`
    int32 and `masked_weights` float32 `[batch, length]`. Rows whose `eval_sample_weights` `[batch]`
    are 0 are not masked.

    Attributes:
      lm_tpl: Network, with `is_causal=False`.
      augmenter_tpl: Layer that masks tokens.
      unmasked_ids: Ids that are never masked, such as those of separators.

    Raises:
      ConfigError: The network is causal, or a batch has only one of `masked_ids` and
        `masked_weights`.
    """

    reported_metric: ClassVar[str | None] = "xent"
    metric_units: ClassVar[Mapping[str, str]] = {"xent": NATS_PER_TOKEN}

    lm_tpl: Config[BaseLayer] = sub_config_field(TransformerLm.HParams, is_causal=False)
    augmenter_tpl: Config[BaseLayer] = sub_config_field(MaskedLmAugmenter.HParams)
    unmasked_ids: tuple[int, ...] = ()

    def setup(self) -> None:
        """Create the network and the augmenter."""
        self.create_child("lm", self.lm_tpl)
        self.create_child("augmenter", self.augmenter_tpl, vocab_size=self.lm.vocab_size)
        is_causal, expected = self.lm.is_causal, "False, to predict tokens from both sides"
        require(not is_causal, self, "lm_tpl.is_causal", is_causal, expected)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Predict the masked tokens.

        Args:
          batch: `ids` `[batch, length]` and the other entries that the class lists.

        Returns:
          Outputs of the softmax (see `FullSoftmax.fprop`), and `weights` `[batch, length]`.
        """
        segments, are_runs = read_segments(batch)
        masked_ids, weights = self._mask_tokens(batch, segments)
        outputs = self.lm(
            masked_ids,
            labels=batch.ids,
            weights=weights,
            segment_ids=segments,
            segment_pos=batch.get("segment_pos"),
            segments_are_runs=are_runs,
            **drop_none(token_type_ids=batch.get("token_type_ids")),
        )
        outputs.weights = weights
        return outputs

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute `loss`, `xent` (nats) and `accuracy` of the masked tokens, and xent per token."""
        return token_metrics(predictions, predictions.weights)

    def _mask_tokens(self, batch: NestedMap, segments: Any) -> tuple[Any, Any]:
        if "masked_ids" in batch or "masked_weights" in batch:
            return batch.masked_ids, batch.masked_weights
        can_mask = jnp.ones(batch.ids.shape, bool) if segments is None else segments != 0
        if "eval_sample_weights" in batch:  # 0 for rows of padding
            can_mask &= batch.eval_sample_weights[:, None] != 0
        for token in self.unmasked_ids:
            can_mask &= batch.ids != token
        masked = self.augmenter(batch.ids, can_mask=can_mask)
        return masked.ids, masked.weights
