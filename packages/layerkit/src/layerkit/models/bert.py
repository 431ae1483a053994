"""BertModel: a Transformer that reads both ways and finds the tokens that were hidden from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from layerkit.base_model import NATS_PER_TOKEN, BaseModel, Metrics
from layerkit.config import sub_config_field
from layerkit.layers.masked_lm import MaskedLmAugmenter
from layerkit.models.token_metrics import token_metrics
from layerkit.models.transformer_lm import TransformerLm
from layerkit.nested_map import NestedMap


class BertModel(BaseModel):
    """Masked language modelling (Devlin et al., 2018, arXiv:1810.04805).

    A batch has `ids` int32 `[batch, length]`, and either `paddings` `[batch, length]` (1 is
    padding) or, for packed rows, `segment_ids` and `segment_pos`. What is hidden is drawn here,
    unless the batch brings it as `masked_ids` int32 and `masked_weights` float32
    `[batch, length]`. Nothing is hidden in rows whose `eval_sample_weights` `[batch]` are 0.

    Attributes:
      lm_tpl: The network, with `is_causal=False`.
      augmenter_tpl: What is hidden.
      unmasked_ids: Ids that are never hidden, such as those of separators.

    Raises:
      ValueError: a causal network, or one mask field of a batch without the other.
    """

    reported_metric: ClassVar[str | None] = "xent"
    metric_units: ClassVar[Mapping[str, str]] = {"xent": NATS_PER_TOKEN}

    lm_tpl: Any = sub_config_field(TransformerLm.HParams, is_causal=False)
    augmenter_tpl: Any = sub_config_field(MaskedLmAugmenter.HParams)
    unmasked_ids: tuple[int, ...] = ()

    def setup(self) -> None:
        self.create_child("lm", self.lm_tpl)
        self.create_child("augmenter", self.augmenter_tpl, vocab_size=self.lm.vocab_size)
        if self.lm.is_causal:
            raise ValueError(
                f"{self.path_name}: lm_tpl.is_causal=True, but what is hidden is found from both"
                " sides; set is_causal=False"
            )

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Predictions of the hidden tokens.

        Args:
          batch: `ids` `[batch, length]` and the others named above.

        Returns:
          What the softmax reports (see `FullSoftmax.fprop`), and `weights` `[batch, length]`.
        """
        segments = batch.get("segment_ids")
        if segments is None and "paddings" in batch:
            segments = (batch.paddings == 0).astype(jnp.int32)
        seen, weights = self._hide(batch, segments)
        outputs = self.lm(
            seen,
            labels=batch.ids,
            weights=weights,
            segment_ids=segments,
            segment_pos=batch.get("segment_pos"),
        )
        outputs.weights = weights
        return outputs

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Metrics `loss`, `xent` (nats) and `accuracy` of the hidden tokens; xent of each token."""
        return token_metrics(predictions, predictions.weights)

    def _hide(self, batch: NestedMap, segments: Any) -> tuple[Any, Any]:
        brought = [name for name in ("masked_ids", "masked_weights") if name in batch]
        if len(brought) == 1:
            raise ValueError(
                f"the batch has {brought[0]} without the other of masked_ids and"
                " masked_weights; bring both, or neither"
            )
        if brought:
            return batch.masked_ids, batch.masked_weights
        can_mask = jnp.ones(batch.ids.shape, bool) if segments is None else segments != 0
        if "eval_sample_weights" in batch:  # 0 for rows that only fill up the batch
            can_mask &= batch.eval_sample_weights[:, None] != 0
        for token in self.unmasked_ids:
            can_mask &= batch.ids != token
        hidden = self.augmenter(batch.ids, can_mask=can_mask)
        return hidden.ids, hidden.weights
