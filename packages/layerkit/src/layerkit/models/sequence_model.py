"""SequenceModel: an encoder-decoder as a model that a task can train and decode with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base_model import NATS_PER_TOKEN, BaseModel, Metrics
from layerkit.config import instance_field, sub_config_field
from layerkit.decoding.cached_network import decode_with_cache
from layerkit.decoding.loop import SampleDecoder
from layerkit.decoding.split_rows import pad_columns, row_parts
from layerkit.layers.masks import segments_from_paddings
from layerkit.models.encoder_decoder import TransformerEncoderDecoder
from layerkit.models.token_metrics import token_metrics
from layerkit.nested_map import NestedMap


class SequenceModel(BaseModel):
    """From one sequence to another: translation, summaries, T5's text to text.

    A batch has `src` with `ids` int32 `[batch, source]`, and `tgt` with `ids` (the decoder's
    inputs), `labels` int32 and `weights` float32 `[batch, target]`. Padding of the source is told
    by `src.paddings` (1 is padding) or `src.segment_ids` (0 is padding); packed rows have
    `segment_ids` and `segment_pos` on both sides. For decoding `tgt` is not needed; a row whose
    source is all padding only fills up the batch.

    Attributes:
      model_tpl: The network.
      decoder: How targets are chosen: `SampleDecoder` or `BeamSearch`.
      start_id: The decoder's first input.
    """

    reported_metric: ClassVar[str | None] = "xent"
    metric_units: ClassVar[Mapping[str, str]] = {"xent": NATS_PER_TOKEN}

    model_tpl: Any = sub_config_field(TransformerEncoderDecoder.HParams)
    decoder: Any = instance_field(SampleDecoder.HParams)
    start_id: int = 0

    def setup(self) -> None:
        self.create_child("model", self.model_tpl)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """What `TransformerEncoderDecoder.fprop` returns, for each token `[batch, target]`."""
        return self.model(
            batch.src.ids,
            batch.tgt.ids,
            labels=batch.tgt.labels,
            weights=batch.tgt.weights,
            source_segment_ids=_segments(batch.src),
            source_segment_pos=batch.src.get("segment_pos"),
            target_segment_ids=_segments(batch.tgt),
            target_segment_pos=batch.tgt.get("segment_pos"),
        )

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Metrics `loss` (what is trained), `xent` (plain cross-entropy, nats) and `accuracy`."""
        return token_metrics(predictions, batch.tgt.weights)

    def decode(self, batch: NestedMap) -> NestedMap:
        """Chooses targets for the sources of a batch.

        Args:
          batch: `src`, of rows `[batch, source]` with one document each.

        Returns:
          See `layerkit.decoding.extend_prompts`; the prompt of each row is `start_id`, which its
          `ids` and `lengths` count. Besides, `source` has the `ids` `[batch, source]` that were
          read and their `lengths` `[batch]`.

        Raises:
          ValueError: no random key where the decoder draws, packed sources, or fewer positions than
            tokens.
        """
        if "segment_pos" in batch.src:
            raise ValueError("src.segment_pos: packed sources cannot be decoded, one target a row")
        segments = _segments(batch.src)
        if segments is None:
            segments = jnp.ones(batch.src.ids.shape, jnp.int32)
        parts = row_parts(self)
        source = NestedMap(ids=batch.src.ids, segment_ids=segments)

        def init_cache(
            model: TransformerEncoderDecoder, source: NestedMap, max_length: int
        ) -> None:
            model.init_cache(source.ids, max_length, segment_ids=source.segment_ids)

        outputs = decode_with_cache(
            self,
            self.model,
            batch,
            init_cache=init_cache,
            inputs=jax.tree.map(lambda x: pad_columns(x, parts), source),
            prompts=jnp.full((segments.shape[0], 1), self.start_id, jnp.int32),
            prompt_lengths=jnp.any(segments != 0, axis=1).astype(jnp.int32),
        )
        num_tokens = jnp.sum(segments != 0, axis=1, dtype=jnp.int32)
        outputs.source = NestedMap(ids=batch.src.ids, lengths=num_tokens)
        return outputs


def _segments(side: NestedMap) -> jax.Array | None:
    if "segment_ids" in side:
        segments: jax.Array = side.segment_ids
        return segments
    return segments_from_paddings(side.paddings) if "paddings" in side else None
