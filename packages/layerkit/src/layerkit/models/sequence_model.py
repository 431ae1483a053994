"""SequenceModel: an encoder-decoder as a model that a task can train and decode with."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base_layer import CACHE
from layerkit.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import instance_field, sub_config_field
from layerkit.decoding.cache_rows import row_axes
from layerkit.decoding.loop import SampleDecoder, extend_prompts
from layerkit.decoding.split_rows import pad_columns, round_up, row_parts
from layerkit.layers.losses import weighted_mean
from layerkit.layers.masks import segments_from_paddings
from layerkit.models.encoder_decoder import TransformerEncoderDecoder
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
        weight = predictions.total_weight
        accuracy = weighted_mean(predictions.correct.astype(jnp.float32), batch.tgt.weights)
        metrics = {
            "loss": WeightedScalar.of(predictions.loss, weight),
            "xent": WeightedScalar.of(predictions.xent, weight),
            "accuracy": WeightedScalar.of(accuracy, weight),
        }
        return metrics, NestedMap(per_token_xent=predictions.per_token_xent)

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
        model, variables = self.model.unbind()
        segments = _segments(batch.src)
        if segments is None:
            segments = jnp.ones(batch.src.ids.shape, jnp.int32)
        parts = row_parts(self)
        source = NestedMap(ids=batch.src.ids, segment_ids=segments)
        source = jax.tree.map(lambda x: pad_columns(x, parts), source)

        def init_cache(source: NestedMap) -> Any:
            _, state = model.apply(
                variables,
                source.ids,
                round_up(1 + self.decoder.max_decode_steps, parts),
                segment_ids=source.segment_ids,
                method="init_cache",
                mutable=[CACHE],
            )
            return state[CACHE]

        def extend(cache: Any, ids: jax.Array, time_step: jax.Array) -> tuple[Any, jax.Array]:
            logits, state = model.apply(
                {**variables, CACHE: cache},
                ids,
                time_step=time_step,
                method="extend_step",
                mutable=[CACHE],
            )
            return state[CACHE], logits

        num_rows = source.ids.shape[0]
        outputs = extend_prompts(
            self.decoder,
            extend,
            init_cache(source),
            prompts=jnp.full((num_rows, 1), self.start_id, jnp.int32),
            prompt_lengths=jnp.any(segments != 0, axis=1).astype(jnp.int32),
            key=self.next_prng_key() if self.decoder.needs_key else None,
            cache_axes=row_axes(init_cache, source),
            row_ids=batch.get("row_ids"),
            max_steps=batch.get("max_steps"),
            row_parts=parts,
        )
        num_tokens = jnp.sum(segments != 0, axis=1, dtype=jnp.int32)
        outputs.source = NestedMap(ids=batch.src.ids, lengths=num_tokens)
        return outputs


def _segments(side: NestedMap) -> jax.Array | None:
    if "segment_ids" in side:
        segments: jax.Array = side.segment_ids
        return segments
    return segments_from_paddings(side.paddings) if "paddings" in side else None
