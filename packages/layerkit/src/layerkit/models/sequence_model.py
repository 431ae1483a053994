"""SequenceModel: an encoder-decoder with a loss and a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import NATS_PER_TOKEN, BaseModel, Metrics
from layerkit.config import Config, instance_field, sub_config_field
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.cache_rows import pad_columns, row_parts
from layerkit.decoding.cached_network import CachedPrompts, cache_prompts
from layerkit.decoding.decoder import Decoder
from layerkit.decoding.loop import SampleDecoder, SampledRows
from layerkit.models.encoder_decoder import TransformerEncoderDecoder
from layerkit.models.weighted_metrics import token_metrics, token_weights
from layerkit.ops.attention.masks import read_segments


class SequenceModel(BaseModel):
    """A model from sequences to sequences, as in translation, summarization or T5.

    A batch has `src` with `ids` int32 `[batch, source]`, or `features` `[batch, source, dims]` for
    a network with an `encoder_tpl`, and `tgt` with `ids` (the decoder's inputs), `labels` int32 and
    `weights` float32 `[batch, target]`. Padding of the source is marked by `src.paddings` (1 is
    padding, which may be between tokens) or `src.segment_ids` (0 is padding, which may not). Packed
    rows have `segment_ids` and `segment_pos` on both sides. Decoding does not need `tgt`, and
    treats a row whose source is all padding as a row of padding.

    Attributes:
      model_tpl: Network.
      decoder: Decoder of targets, a `SampleDecoder` or `BeamSearch`.
      start_id: First input of the decoder.
      prompt_ids: Ids that follow `start_id` in decoding, such as those of a language and a task.
      apply_eval_sample_weights: True to multiply the weights of tokens by `eval_sample_weights`
        `[batch]`, where a batch has them, as evaluations do.
    """

    reported_metric: ClassVar[str | None] = "xent"
    metric_units: ClassVar[Mapping[str, str]] = {"xent": NATS_PER_TOKEN}

    model_tpl: Config[BaseLayer] = sub_config_field(TransformerEncoderDecoder.HParams)
    decoder: Annotated[Any, Decoder] = instance_field(SampleDecoder.HParams)
    start_id: int = 0
    prompt_ids: tuple[int, ...] = ()
    apply_eval_sample_weights: bool = False

    def setup(self) -> None:
        """Create the network."""
        self.create_child("model", self.model_tpl)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Return the outputs of `TransformerEncoderDecoder.fprop`, per token `[batch, target]`."""
        source_segments, source_runs = read_segments(batch.src)
        target_segments, target_runs = read_segments(batch.tgt)
        return self.model(
            _inputs(batch.src),
            batch.tgt.ids,
            labels=batch.tgt.labels,
            weights=token_weights(batch.tgt.weights, batch, apply=self.apply_eval_sample_weights),
            source_segment_ids=source_segments,
            source_segment_pos=batch.src.get("segment_pos"),
            target_segment_ids=target_segments,
            target_segment_pos=batch.tgt.get("segment_pos"),
            segments_are_runs=source_runs and target_runs,
        )

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute `loss` (with label smoothing), `xent` (cross-entropy in nats) and `accuracy`."""
        apply = self.apply_eval_sample_weights
        return token_metrics(predictions, token_weights(batch.tgt.weights, batch, apply=apply))

    def decode(self, batch: NestedMap) -> NestedMap:
        """Decode targets for the sources of a batch.

        Args:
          batch: `src` with rows `[batch, source]` of one document each.

        Returns:
          Outputs of `layerkit.decoding.extend_prompts`. The prompt of each row is `start_id` and
          `prompt_ids`, which `ids` and `lengths` include. `source` has the source `ids` `[batch,
          source]` and their `lengths` `[batch]`; it is left out for features.

        Raises:
          ConfigError: The decoder draws but has no random key, sources are packed, or the model has
            fewer positions than tokens.
        """
        outputs = self._prompts(batch).decode()
        if "ids" in batch.src:
            lengths = jnp.sum(_source_segments(batch) != 0, axis=1, dtype=jnp.int32)
            outputs.source = NestedMap(ids=batch.src.ids, lengths=lengths)
        return outputs

    def start_decoding(self, batch: NestedMap) -> SampledRows:
        """Return the rows of targets before their first token, for sources `[batch, source]`.

        `layerkit.decoding.advance_rows` continues them.
        """
        return self._prompts(batch).start()

    def _prompts(self, batch: NestedMap) -> CachedPrompts:
        expected = "a batch with one source per row"
        require("segment_pos" not in batch.src, self, "src.segment_pos", "packed rows", expected)
        segments, parts = _source_segments(batch), row_parts(self)
        source = NestedMap(inputs=_inputs(batch.src), segment_ids=segments)

        def init_cache(
            model: TransformerEncoderDecoder, source: NestedMap, max_length: int
        ) -> None:
            _, are_runs = read_segments(batch.src)
            model.init_cache(
                source.inputs,
                max_length,
                segment_ids=source.segment_ids,
                segments_are_runs=are_runs,
            )

        first = jnp.array([self.start_id, *self.prompt_ids], jnp.int32)
        ids = jnp.broadcast_to(first, (segments.shape[0], len(first)))
        lengths = jnp.where(jnp.any(segments != 0, axis=1), len(first), 0)
        return cache_prompts(
            self,
            self.model,
            batch,
            init_cache=init_cache,
            inputs=jax.tree.map(lambda x: pad_columns(x, parts), source),
            prompts=(ids, lengths.astype(jnp.int32)),
        )


def _source_segments(batch: NestedMap) -> jax.Array:
    segments, _ = read_segments(batch.src)
    return jnp.ones(_inputs(batch.src).shape[:2], jnp.int32) if segments is None else segments


def _inputs(src: NestedMap) -> jax.Array:
    inputs: jax.Array = src.ids if "ids" in src else src.features
    return inputs
