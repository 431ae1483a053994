"""LanguageModel: a TransformerLm as a model that a task can train and decode with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from layerkit.base_model import NATS_PER_TOKEN, BaseModel, Metrics
from layerkit.config import instance_field, sub_config_field
from layerkit.decoding.loop import SampleDecoder
from layerkit.layers.transformer import given
from layerkit.models.prompt_decoding import continue_prompts
from layerkit.models.token_metrics import token_metrics
from layerkit.models.transformer_lm import TransformerLm
from layerkit.nested_map import NestedMap


class LanguageModel(BaseModel):
    """Next-token prediction.

    A batch has `ids`, `labels` int32 and `weights` float32 `[batch, length]`, and for packed rows
    `segment_ids` and `segment_pos`. For decoding it has `ids` `[batch, prompt]` and
    `prompt_lengths` int32 `[batch]` (left-aligned prompts; 0 where a row only fills up the batch).

    Attributes:
      lm_tpl: The network.
      is_prefix_lm: What a row is given reads both ways, and only what it is asked for from left to
        right (prefix language models; Raffel et al., 2020, arXiv:1910.10683). Then a batch has
        `inputs_indicator` `[batch, length]` as well, 1 on what is given, and a prompt is read so.
      decoder: How continuations are chosen: `SampleDecoder` or `BeamSearch`.
    """

    reported_metric: ClassVar[str | None] = "xent"
    metric_units: ClassVar[Mapping[str, str]] = {"xent": NATS_PER_TOKEN}

    lm_tpl: Any = sub_config_field(TransformerLm.HParams)
    is_prefix_lm: bool = False
    decoder: Any = instance_field(SampleDecoder.HParams)

    def setup(self) -> None:
        self.create_child("lm", self.lm_tpl)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """What `TransformerLm.fprop` returns.

        Raises:
          ValueError: a batch without `ids`, `labels` or `weights`, or a prefix model and a batch
            that does not say what is given.
        """
        self.check_batch(batch, "ids", "labels", "weights")
        return self.lm(
            batch.ids,
            labels=batch.labels,
            weights=batch.weights,
            segment_ids=batch.get("segment_ids"),
            segment_pos=batch.get("segment_pos"),
            **given(in_prefix=self._prefix_of(batch)),
        )

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Metrics `loss` (what is trained), `xent` (plain cross-entropy, nats) and `accuracy`."""
        return token_metrics(predictions, batch.weights)

    def decode(self, batch: NestedMap) -> NestedMap:
        """Continues the prompts of a batch.

        Args:
          batch: `ids` `[batch, prompt]` and, where they do not fill their rows, `prompt_lengths`
            `[batch]`. It may have `max_steps` and `row_ids` `[batch]` too; see `extend_prompts`.

        Returns:
          See `layerkit.decoding.extend_prompts`: `ids`, `lengths`, `log_probs`, `scores`,
          `prompt_lengths` and, where several continuations were asked for, `candidates`.

        Raises:
          ValueError: no random key where the decoder draws, packed rows, padding without
            `prompt_lengths`, or fewer positions than tokens.
        """
        return continue_prompts(self, self.lm, batch, reads_prompts_both_ways=self.is_prefix_lm)

    def _prefix_of(self, batch: NestedMap) -> jax.Array | None:
        if not self.is_prefix_lm:
            return None
        if "inputs_indicator" not in batch:
            raise ValueError(
                f"{self.path_name}: is_prefix_lm=True, but the batch has no inputs_indicator, which"
                f" says what is read both ways; it has {', '.join(sorted(batch))}. Inputs that have"
                " inputs and targets give it, such as those of SeqIO with a prefix_lm converter."
            )
        return batch.inputs_indicator != 0
