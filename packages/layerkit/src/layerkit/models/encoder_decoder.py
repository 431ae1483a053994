"""TransformerEncoderDecoder: from a source and target ids to hidden states, logits and losses.

The encoder attends to the source in both directions. The decoder attends to the target up to each
position and, by cross-attention, to the encoder's output (Vaswani et al., 2017, arXiv:1706.03762).
Both stacks have the options of the stacks of decoder-only models.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base.base_layer import CACHE, BaseLayer
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import require
from layerkit.config.hparams import Conditions
from layerkit.config.nested_map import NestedMap
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.basic.embeddings import ClassSoftmax, SharedEmbeddingSoftmax
from layerkit.layers.basic.normalizations import BaseNormalization, LayerNorm
from layerkit.layers.transformer.stacks import StackedTransformer
from layerkit.layers.transformer.transformer import Transformer, gather_positions
from layerkit.models.transformer_lm import (
    TIED_EMBEDDING_CONDITIONS,
    create_token_layers,
    embed_tokens,
    locate_in_stack,
    stack_sizes,
)
from layerkit.ops.attention.masks import AttentionMask, row_positions, segments_from_paddings

_SOURCE_SEGMENTS = "source_segment_ids"
_DECODER_LAYER = Transformer.HParams.config(cross_attention_tpl=CrossAttention.HParams.config())


class TransformerEncoderDecoder(BaseLayer):
    """An encoder over source ids, or of features, and a decoder over target ids.

    The sizes and the softmax are those of `TransformerLm`.

    Attributes:
      vocab_size: Number of token ids of the target, and of the source by default.
      source_vocab_size: Number of token ids of the source, if it has a separate embedding
        (`source_embedding_tpl`).
      num_encoder_layers: Depth of the encoder.
      num_decoder_layers: Depth of the decoder.
      embedding_tpl: Embedding of target ids; None to tie it to the softmax.
      source_embedding_tpl: Embedding of source ids; None to use that of the target.
      position_tpl: Positional embedding that is added to the embeddings of both sides, with
        separate weights; None for models whose attention encodes positions.
      embedding_norm_tpl: Norm of the embeddings of both sides before the stacks, with separate
        weights (BART); None for no norm.
      encoder_tpl: Encoder of features, such as `ConformerEncoder`, in place of the layers over
        source ids; `position_tpl` and `embedding_norm_tpl` are then those of the target. None for
        source ids.
      encoder_stack_tpl: Layers of the encoder.
      decoder_stack_tpl: Layers of the decoder, with a `cross_attention_tpl`.
      encoder_norm_tpl: Norm after the encoder; None if its layers end in a norm (`post`).
      decoder_norm_tpl: Norm before the softmax; None if the decoder's layers end in a norm.
      dropout_rate: Dropout rate of the embeddings and of both stacks' outputs in training.
      output_dropout_rate: Dropout rate of both stacks' outputs; None for `dropout_rate`.

    Raises:
      ConfigError: `embedding_tpl` is None although the softmax cannot embed ids, or the source has
        another vocabulary but no embedding.
    """

    used_only_if: ClassVar[Conditions] = {
        **TIED_EMBEDDING_CONDITIONS,
        "num_encoder_layers": "not encoder_tpl",
        "source_embedding_tpl": "not encoder_tpl",
        "encoder_stack_tpl": "not encoder_tpl",
        "encoder_norm_tpl": "not encoder_tpl",
    }

    vocab_size: int = 0
    source_vocab_size: int | None = None
    model_dims: int = 0
    hidden_dims: int = 0
    num_encoder_layers: int = 1
    num_decoder_layers: int = 1
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    softmax_tpl: Config[ClassSoftmax] = sub_config_field(SharedEmbeddingSoftmax.HParams)
    embedding_tpl: Config[BaseLayer] | None = sub_config_field(None)
    source_embedding_tpl: Config[BaseLayer] | None = sub_config_field(None)
    position_tpl: Config[BaseLayer] | None = sub_config_field(None)
    embedding_norm_tpl: Config[BaseNormalization] | None = sub_config_field(None)
    encoder_tpl: Config[BaseLayer] | None = sub_config_field(None)
    encoder_stack_tpl: Config[BaseLayer] = sub_config_field(StackedTransformer.HParams)
    decoder_stack_tpl: Config[BaseLayer] = sub_config_field(
        StackedTransformer.HParams, layer_tpl=_DECODER_LAYER
    )
    encoder_norm_tpl: Config[BaseNormalization] | None = sub_config_field(LayerNorm.HParams)
    decoder_norm_tpl: Config[BaseNormalization] | None = sub_config_field(LayerNorm.HParams)
    dropout_rate: float = 0.0
    output_dropout_rate: float | None = None

    def setup(self) -> None:
        """Create the embeddings, both stacks, the norms and the softmax."""
        self._create_embeddings()
        for name in ("position", "embedding_norm"):
            if (template := getattr(self, f"{name}_tpl")) is not None:
                for side in ("source", "target") if self.encoder_tpl is None else ("target",):
                    self.create_child(f"{side}_{name}", template, dims=self.model_dims)
        if self.encoder_tpl is not None:
            self.create_child("encoder", self.encoder_tpl)
        for side in ("encoder", "decoder") if self.encoder_tpl is None else ("decoder",):
            template = getattr(self, f"{side}_stack_tpl")
            num_layers = getattr(self, f"num_{side}_layers")
            self.create_child(side, template, **stack_sizes(self, num_layers=num_layers))
            if (norm_tpl := getattr(self, f"{side}_norm_tpl")) is not None:
                self.create_child(f"{side}_norm", norm_tpl, dims=self.model_dims)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))
        if (rate := self.output_dropout_rate) is not None:
            self.create_child("output_dropout", Dropout.HParams.config(rate=rate))

    def fprop(
        self,
        source: jax.Array,
        target_ids: jax.Array,
        *,
        labels: jax.Array,
        weights: jax.Array,
        source_segment_ids: jax.Array | None = None,
        source_segment_pos: jax.Array | None = None,
        target_segment_ids: jax.Array | None = None,
        target_segment_pos: jax.Array | None = None,
        segments_are_runs: bool = True,
    ) -> NestedMap:
        """Compute the losses of predicting `labels`.

        Args:
          source: See `hidden`, as for the segments and positions.
          target_ids: Inputs of the decoder, int32 `[batch, target]`.
          labels: Next token of each position, int32 `[batch, target]`.
          weights: Token weights float32 `[batch, target]`; 0 excludes a token.
          source_segment_ids: Documents of the source.
          source_segment_pos: Positions of the source.
          target_segment_ids: Documents of the target.
          target_segment_pos: Positions of the target.
          segments_are_runs: False if padding may split a document; see `AttentionMask`.

        Returns:
          Outputs of the softmax; see `FullSoftmax.fprop`. With an `encoder_tpl` also its outputs
          `encoded` `[batch, frames, dims]` and `encoded_segment_ids` int32 `[batch, frames]`.
        """
        memory = self._encode(
            source, source_segment_ids, source_segment_pos, segments_are_runs=segments_are_runs
        )
        target = target_segment_ids, target_segment_pos
        hidden = self._decode(target_ids, *memory, *target, segments_are_runs=segments_are_runs)
        outputs: NestedMap = self.softmax(hidden, labels=labels, weights=weights)
        if self.encoder_tpl is not None:
            outputs.encoded, outputs.encoded_segment_ids = memory
        return outputs

    def logits(self, source: jax.Array, target_ids: jax.Array, **packing: Any) -> jax.Array:
        """Compute logits float32 `[batch, target, vocab]`; see `hidden` for the arguments."""
        return self.softmax.logits(self.hidden(source, target_ids, **packing))

    def hidden(
        self,
        source: jax.Array,
        target_ids: jax.Array,
        *,
        source_segment_ids: jax.Array | None = None,
        source_segment_pos: jax.Array | None = None,
        target_segment_ids: jax.Array | None = None,
        target_segment_pos: jax.Array | None = None,
        segments_are_runs: bool = True,
    ) -> jax.Array:
        """Compute normalized hidden states of the decoder, `[batch, target, dims]`.

        Args:
          source: Source ids int32 `[batch, source]`, or features `[batch, source, dims]` of one
            document each for an `encoder_tpl`.
          target_ids: Inputs of the decoder, int32 `[batch, target]`.
          source_segment_ids: Number of each token's document in its row, int32 `[batch, source]`,
            from 1; 0 is padding. A target document attends to the source document of its number.
          source_segment_pos: Position within the document, int32 `[batch, source]`; None counts
            from the start of the row.
          target_segment_ids: Number of each token's document in its row, int32 `[batch, target]`.
          target_segment_pos: Position within the document, int32 `[batch, target]`.
          segments_are_runs: False if padding may split a document; see `AttentionMask`.
        """
        memory = self._encode(
            source, source_segment_ids, source_segment_pos, segments_are_runs=segments_are_runs
        )
        target = target_segment_ids, target_segment_pos
        return self._decode(target_ids, *memory, *target, segments_are_runs=segments_are_runs)

    def encode(
        self,
        source: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        segment_pos: jax.Array | None = None,
        segments_are_runs: bool = True,
    ) -> jax.Array:
        """Compute the encoder's output `[batch, source, dims]`.

        Args:
          source: Source ids or features; see `hidden`.
          segment_ids: Number of each token's document, int32 `[batch, source]`; 0 is padding.
          segment_pos: Position within the document, int32 `[batch, source]`; None counts from the
            start of the row.
          segments_are_runs: See `hidden`.
        """
        runs = {"segments_are_runs": segments_are_runs}
        return self._encode(source, segment_ids, segment_pos, **runs)[0]

    def init_cache(
        self,
        source: jax.Array,
        max_length: int,
        *,
        segment_ids: jax.Array | None = None,
        segments_are_runs: bool = True,
    ) -> None:
        """Encode the source and create an empty cache for targets.

        Args:
          source: Source ids or features with one document per row; see `hidden`.
          max_length: Largest number of tokens of a target.
          segment_ids: 1 for tokens and 0 for padding, int32 `[batch, source]`; None for no padding.
          segments_are_runs: See `hidden`.

        Raises:
          ConfigError: The model has fewer positions than `max_length`.
        """
        if segment_ids is None:
            segment_ids = jnp.ones(source.shape[:2], jnp.int32)
        batch = source.shape[0]
        if self.position_tpl is not None:
            # A table of positions raises for rows that are too long. A single step is never too
            # long.
            self.target_position(row_positions(batch, max_length))
        memory, segments = self._encode(
            source, segment_ids, None, segments_are_runs=segments_are_runs
        )
        self.put_variable(CACHE, _SOURCE_SEGMENTS, segments)
        self.decoder.init_cache(batch, max_length, memory=memory)

    def extend_step(self, ids: jax.Array, *, time_step: jax.Array) -> jax.Array:
        """Run the decoder on the next tokens of cached targets.

        Args:
          ids: Tokens at positions time_step … time_step + t − 1, int32 `[batch, t]`.
          time_step: Number of tokens in the cache, int32 scalar.

        Returns:
          Logits float32 `[batch, t, vocab]`.
        """
        positions = jnp.broadcast_to(time_step + jnp.arange(ids.shape[1]), ids.shape)
        segments: jax.Array = self.get_variable(CACHE, _SOURCE_SEGMENTS)
        (batch, num_queries), num_keys = ids.shape, segments.shape[1]
        memory_mask = AttentionMask.cross_mask(batch, num_queries, num_keys, key_segments=segments)
        x = self.decoder.extend_step(
            self._embed("target", ids, positions),
            time_step=time_step,
            positions=positions,
            memory_mask=memory_mask,
        )
        return self.softmax.logits(self._normalize("decoder", x))

    @nn.nowrap
    def locate_layer(self, layer: int, *, side: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return where a layer of a side, `encoder` or `decoder`, is; see `locate_in_stack`."""
        return locate_in_stack(
            self,
            layer,
            child=side,
            template=f"{side}_stack_tpl",
            num_layers=getattr(self, f"num_{side}_layers"),
        )

    def _encode(
        self,
        source: jax.Array,
        segment_ids: jax.Array | None,
        segment_pos: jax.Array | None,
        *,
        segments_are_runs: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the encoder's output `[batch, frames, dims]` and its segments; see `encode`."""
        batch, length = source.shape[:2]
        if self.encoder_tpl is not None:
            expected = "rows of one document each, for an encoder of features"
            require(segment_pos is None, self, "source_segment_pos", "packed rows", expected)
            if segment_ids is None:
                segment_ids = jnp.ones((batch, length), jnp.int32)
            outputs = self.encoder(source, paddings=jnp.float32(segment_ids == 0))
            return outputs.encoded, segments_from_paddings(outputs.paddings)
        positions = row_positions(batch, length) if segment_pos is None else segment_pos
        mask = AttentionMask.bidirectional_mask(
            batch, length, segment_ids=segment_ids, segments_are_runs=segments_are_runs
        )
        x = self.encoder(self._embed("source", source, segment_pos), mask=mask, positions=positions)
        return self._normalize("encoder", x), segment_ids

    def _decode(
        self,
        ids: jax.Array,
        memory: jax.Array,
        memory_segments: jax.Array | None,
        segment_ids: jax.Array | None,
        segment_pos: jax.Array | None,
        *,
        segments_are_runs: bool,
    ) -> jax.Array:
        """Return hidden states `[batch, target, dims]` from the outputs of `_encode`."""
        batch, length = ids.shape
        x = self.decoder(
            self._embed("target", ids, segment_pos),
            mask=AttentionMask.causal_mask(
                batch, length, segment_ids=segment_ids, segments_are_runs=segments_are_runs
            ),
            positions=row_positions(batch, length) if segment_pos is None else segment_pos,
            memory=memory,
            memory_mask=self._memory_mask(ids, memory, segment_ids, memory_segments),
        )
        return self._normalize("decoder", x)

    def _memory_mask(
        self,
        targets: jax.Array,
        memory: jax.Array,
        target_segments: jax.Array | None,
        source_segments: jax.Array | None,
    ) -> AttentionMask:
        if source_segments is None and target_segments is not None:
            # Only the target is padded: the source is one document without padding.
            source_segments = jnp.ones(memory.shape[:2], jnp.int32)
        (batch, num_queries), num_keys = targets.shape, memory.shape[1]
        return AttentionMask.cross_mask(
            batch,
            num_queries,
            num_keys,
            query_segments=target_segments,
            key_segments=source_segments,
        )

    def _create_embeddings(self) -> None:
        create_token_layers(self)
        if self.source_embedding_tpl is not None:
            size = self.source_vocab_size or self.vocab_size
            self.create_child(
                "source_embedding",
                self.source_embedding_tpl,
                num_classes=size,
                input_dims=self.model_dims,
            )
        else:
            other, expected = self.source_vocab_size, "None, or a source_embedding_tpl"
            require(other in (None, self.vocab_size), self, "source_vocab_size", other, expected)

    def _normalize(self, side: str, x: jax.Array) -> jax.Array:
        if getattr(self, f"{side}_norm_tpl") is not None:
            x = getattr(self, f"{side}_norm")(x)
        drop = self.dropout if self.output_dropout_rate is None else self.output_dropout
        outputs: jax.Array = drop(gather_positions(self, x))
        return outputs

    def _embed(self, side: str, ids: jax.Array, positions: jax.Array | None) -> jax.Array:
        if side == "source" and self.source_embedding_tpl is not None:
            x = self.source_embedding(ids)
        else:
            x = embed_tokens(self, ids)
        if self.position_tpl is not None:
            if positions is None:
                positions = row_positions(*ids.shape)
            x = x + getattr(self, f"{side}_position")(positions)
        if self.embedding_norm_tpl is not None:
            x = getattr(self, f"{side}_embedding_norm")(x)
        x = self.dropout(self.cast(x))
        return self.constrain(x, "batch", "residual_length", "act_embed")
