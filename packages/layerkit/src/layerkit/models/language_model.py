"""LanguageModel: a TransformerLm with a loss and a decoder, and the prompts of its batches."""

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
from layerkit.decoding.cached_network import CachedPrompts, cache_prompts
from layerkit.decoding.decoder import Decoder
from layerkit.decoding.loop import SampleDecoder, SampledRows
from layerkit.layers.transformer.transformer import drop_none
from layerkit.models.transformer_lm import TransformerLm
from layerkit.models.weighted_metrics import token_metrics, token_weights


class DecodedLm(BaseModel):
    """Base class of models with a network that predicts the next token, and a decoder.

    For decoding, a batch has left-aligned prompts: `ids` `[batch, prompt]` and `prompt_lengths`
    int32 `[batch]`, which is 0 for rows of padding. Prompts with images have them in `images`.

    Attributes:
      lm_tpl: Network.
      decoder: Decoder that continues prompts, a `SampleDecoder` or `BeamSearch`.
    """

    lm_tpl: Config[BaseLayer] = sub_config_field(TransformerLm.HParams)
    decoder: Annotated[Any, Decoder] = instance_field(SampleDecoder.HParams)

    def setup(self) -> None:
        """Create the network."""
        self.create_child("lm", self.lm_tpl)

    def decode(self, batch: NestedMap) -> NestedMap:
        """Continue the prompts of a batch.

        Args:
          batch: `ids` `[batch, prompt]`, `prompt_lengths` `[batch]` if prompts do not fill their
            rows, and optionally `images`, `max_steps`, `temperature`, `top_k`, `top_p` and
            `row_ids` `[batch]`; see `extend_prompts` and `RowOptions`.

        Returns:
          Outputs of `layerkit.decoding.extend_prompts`: `ids`, `lengths`, `log_probs`, `scores`,
          `prompt_lengths` and, if the decoder returns several continuations, `candidates`.

        Raises:
          ConfigError: The decoder draws but has no random key, rows are packed, there is padding
            without `prompt_lengths`, or the model has fewer positions than tokens.
        """
        return self._prompts(batch).decode()

    def start_decoding(self, batch: NestedMap) -> SampledRows:
        """Return the rows of a batch of prompts `[batch, prompt]` before their first token.

        `layerkit.decoding.advance_rows` continues them.
        """
        return self._prompts(batch).start()

    def _prompts(self, batch: NestedMap) -> CachedPrompts:
        """Return the prompts of a batch, with an empty cache."""
        for name in ("segment_ids", "segment_pos"):
            require(name not in batch, self, name, "packed rows", "a batch with a prompt per row")
        lengths = batch.get("prompt_lengths")
        if lengths is None:
            expected = "the length of each prompt, since the batch has paddings"
            require("paddings" not in batch, self, "prompt_lengths", None, expected)
            rows, width = batch.ids.shape
            lengths = jnp.full((rows,), width, jnp.int32)
        options: dict[str, Any] = {"drafts": True} if self.decoder.drafts else {}

        def init_cache(lm: TransformerLm, inputs: dict[str, jax.Array], max_length: int) -> None:
            images = drop_none(images=inputs.get("images"))
            lm.init_cache(inputs["ids"].shape[0], max_length, **options, **images)

        return cache_prompts(
            self,
            self.lm,
            batch,
            init_cache=init_cache,
            inputs=drop_none(ids=batch.ids, images=batch.get("images")),
            prompts=(batch.ids, lengths),
            prefix_lengths=lengths if getattr(self, "is_prefix_lm", False) else None,
        )


class LanguageModel(DecodedLm):
    """A model that predicts the next token.

    A batch has `ids`, `labels` int32 and `weights` float32 `[batch, length]`, and for packed rows
    `segment_ids` and `segment_pos`. Instead of `labels` it may have soft targets, such as those of
    a teacher: `class_probabilities` float32 `[batch, length, vocab]`. For a network with
    `images_tpl` it may have `images`; see `TransformerLm.hidden`. Labels that are placeholders of
    images count nothing.

    Attributes:
      is_prefix_lm: Use bidirectional attention within the inputs of a row, and causal attention for
        its targets (prefix language models; Raffel et al., 2020, arXiv:1910.10683). A batch then
        also has `inputs_indicator` `[batch, length]`, which is 1 on inputs. The SeqIO converter
        `prefix_lm`, for example, provides it. Prompts are inputs.
      apply_eval_sample_weights: True to multiply the weights of tokens by `eval_sample_weights`
        `[batch]`, where a batch has them, as evaluations do.
    """

    reported_metric: ClassVar[str | None] = "xent"
    metric_units: ClassVar[Mapping[str, str]] = {"xent": NATS_PER_TOKEN}

    is_prefix_lm: bool = False
    apply_eval_sample_weights: bool = False

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Return the outputs of `TransformerLm.fprop` for a batch.

        Raises:
          MissingKeyError: The batch lacks `ids`, `labels` or `weights`, or `inputs_indicator`
            although the model is a prefix language model.
        """
        targets = "class_probabilities" if "class_probabilities" in batch else "labels"
        in_prefix = batch.inputs_indicator != 0 if self.is_prefix_lm else None
        return self.lm(
            batch.ids,
            **{targets: batch[targets]},
            weights=self._token_weights(batch),
            segment_ids=batch.get("segment_ids"),
            segment_pos=batch.get("segment_pos"),
            **drop_none(in_prefix=in_prefix, images=batch.get("images")),
        )

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute `loss` (with label smoothing), `xent` (cross-entropy in nats) and `accuracy`."""
        return token_metrics(predictions, self._token_weights(batch))

    def _token_weights(self, batch: NestedMap) -> jax.Array:
        weights = token_weights(batch.weights, batch, apply=self.apply_eval_sample_weights)
        images: Any = getattr(self.lm_tpl, "images_tpl", None)
        if images is None or "labels" not in batch:
            return weights
        return jnp.where(batch.labels == images.token_id, 0, weights)
