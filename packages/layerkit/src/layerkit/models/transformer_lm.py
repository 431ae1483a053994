"""TransformerLm: token ids to hidden states, logits and losses.

Embedding (+ positions) → dropout → stack of Transformer layers → norm → softmax. The embedding is
the softmax's own weight (tied; Press and Wolf, 2017) unless `embedding_tpl` is set. What the layers
are is the business of the stack, which may be a row, a scan or a pipeline.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base_layer import BaseLayer
from layerkit.config import sub_config_field
from layerkit.field_checks import Conditions
from layerkit.layers.embeddings import SharedEmbeddingSoftmax
from layerkit.layers.masks import AttentionMask, row_positions
from layerkit.layers.normalizations import LayerNorm
from layerkit.layers.stacks import StackedTransformer
from layerkit.layers.stochastic import Dropout
from layerkit.layers.transformer import given
from layerkit.models.transformer_parts import (
    TIED_EMBEDDING_CONDITIONS,
    create_token_layers,
    embed_tokens,
    locate_in_stack,
    stack_sizes,
)
from layerkit.nested_map import NestedMap


class TransformerLm(BaseLayer):
    """A Transformer over token ids: a decoder, or with `is_causal=False` an encoder.

    Attributes:
      vocab_size: Number of token ids.
      model_dims: Size of the model dimension.
      hidden_dims: Size of the feed-forward's wide dimension.
      num_layers: Depth of the stack.
      num_heads: Query heads per layer.
      num_kv_heads: Key and value heads; None for as many as query heads.
      dim_per_head: None for model_dims / num_heads.
      softmax_tpl: Output layer; a tied one also embeds.
      embedding_tpl: A separate input embedding; None to tie it to the softmax.
      position_tpl: Added to the embeddings; None where attention itself knows positions (rotary).
      embedding_norm_tpl: Normalises what goes into the stack (BERT, BLOOM); None leaves it.
      stack_tpl: The layers; `StackedTransformer`, `StackedTransformerRepeated`, or another with
        their interface.
      final_norm_tpl: Before the softmax; None where the layers end in a norm (`post`).
      is_causal: A position sees those up to itself. Otherwise it sees its whole document, as a
        masked language model does, and nothing can be decoded.
      dropout_rate: Of the embeddings, in training.

    Raises:
      ValueError: nothing embeds the ids.
    """

    used_only_if: ClassVar[Conditions] = TIED_EMBEDDING_CONDITIONS

    vocab_size: int = 0
    model_dims: int = 0
    hidden_dims: int = 0
    num_layers: int = 1
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    softmax_tpl: Any = sub_config_field(SharedEmbeddingSoftmax.HParams)
    embedding_tpl: Any = sub_config_field(None)
    position_tpl: Any = sub_config_field(None)
    embedding_norm_tpl: Any = sub_config_field(None)
    stack_tpl: Any = sub_config_field(StackedTransformer.HParams)
    final_norm_tpl: Any = sub_config_field(LayerNorm.HParams)
    is_causal: bool = True
    dropout_rate: float = 0.0

    def setup(self) -> None:
        create_token_layers(self)
        if self.position_tpl is not None:
            self.create_child("position", self.position_tpl, dims=self.model_dims)
        if self.embedding_norm_tpl is not None:
            self.create_child("embedding_norm", self.embedding_norm_tpl, dims=self.model_dims)
        self.create_child("stack", self.stack_tpl, **stack_sizes(self, num_layers=self.num_layers))
        if self.final_norm_tpl is not None:
            self.create_child("final_norm", self.final_norm_tpl, dims=self.model_dims)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    @nn.nowrap
    def locate_layer(self, layer: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Where the variables of a layer lie in those of this model.

        Args:
          layer: Counted from 0 at the input.

        Returns:
          The path of its subtree, and the indices into the leading axes of every leaf there; see
          `StackedTransformer.locate_layer`.

        Raises:
          IndexError: there is no such layer.
        """
        return locate_in_stack(
            self, layer, child="stack", template="stack_tpl", num_layers=self.num_layers
        )

    def fprop(
        self,
        ids: jax.Array,
        *,
        labels: jax.Array,
        weights: jax.Array,
        segment_ids: jax.Array | None = None,
        segment_pos: jax.Array | None = None,
        in_prefix: jax.Array | None = None,
    ) -> NestedMap:
        """Losses of predicting `labels`.

        Args:
          ids: int32 `[batch, length]`.
          labels: int32 `[batch, length]`, the token that follows each position.
          weights: float32 `[batch, length]`, 0 where a prediction does not count.
          segment_ids: int32 `[batch, length]`, documents packed in a row from 1; 0 is padding.
          segment_pos: int32 `[batch, length]`, position within the document; None counts from the
            start of the row.
          in_prefix: bool `[batch, length]`, which tokens the whole of their document sees, in a
            prefix language model. None: each token is seen from its own position on.

        Returns:
          What the softmax reports; see `FullSoftmax.fprop`.

        Raises:
          ValueError: a prefix for a model that sees the whole document anyway.
        """
        hidden = self.hidden(
            ids, segment_ids=segment_ids, segment_pos=segment_pos, in_prefix=in_prefix
        )
        return self.softmax(hidden, labels=labels, weights=weights)

    def logits(
        self,
        ids: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        segment_pos: jax.Array | None = None,
        in_prefix: jax.Array | None = None,
    ) -> jax.Array:
        """Logits float32 `[batch, length, vocab]` of the token after each position."""
        hidden = self.hidden(
            ids, segment_ids=segment_ids, segment_pos=segment_pos, in_prefix=in_prefix
        )
        return self.softmax.logits(hidden)

    def hidden(
        self,
        ids: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        segment_pos: jax.Array | None = None,
        in_prefix: jax.Array | None = None,
    ) -> jax.Array:
        """Normalised hidden states `[batch, length, dims]`; see `fprop` for the arguments."""
        batch, length = ids.shape
        if segment_pos is None:
            segment_pos = row_positions(batch, length)
        if self.is_causal:
            mask = AttentionMask.causal_mask(
                batch, length, segment_ids=segment_ids, in_prefix=in_prefix
            )
        elif in_prefix is None:
            mask = AttentionMask.bidirectional_mask(batch, length, segment_ids=segment_ids)
        else:
            raise ValueError(
                f"{self.path_name}: in_prefix with is_causal=False, where every token is seen by"
                " the whole document"
            )
        x = self._embed(ids, segment_pos)
        return self._normalize(self.stack(x, mask=mask, positions=segment_pos))

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Creates an empty cache for sequences of at most `max_length` tokens.

        Raises:
          ValueError: more tokens than there are positions, or a model that is not causal.
        """
        if not self.is_causal:
            raise ValueError(
                f"{self.path_name}: is_causal=False: what a position holds depends on what comes"
                " after it, so tokens cannot be added to a cache one by one"
            )
        if self.position_tpl is not None:
            # A table of positions refuses rows that are too long, but a step is never long.
            self.position(row_positions(batch_size, max_length))
        self.stack.init_cache(batch_size, max_length)

    def extend_step(
        self, ids: jax.Array, *, time_step: jax.Array, prefix_lengths: jax.Array | None = None
    ) -> jax.Array:
        """Feeds the next tokens of cached sequences.

        Args:
          ids: int32 `[batch, t]`, the tokens at positions time_step … time_step + t − 1.
          time_step: int32 scalar, how many tokens the cache holds.
          prefix_lengths: int32 `[batch]`, how many tokens from the first on see one another, in a
            prefix language model; the first step must bring them all. None for none.

        Returns:
          Logits float32 `[batch, t, vocab]`.
        """
        positions = jnp.broadcast_to(time_step + jnp.arange(ids.shape[1]), ids.shape)
        x = self._embed(ids, positions)
        x = self.stack.extend_step(
            x, time_step=time_step, positions=positions, **given(prefix_lengths=prefix_lengths)
        )
        return self.softmax.logits(self._normalize(x))

    @nn.nowrap
    def _normalize(self, x: jax.Array) -> jax.Array:
        return x if self.final_norm_tpl is None else self.final_norm(x)

    @nn.nowrap
    def _embed(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = embed_tokens(self, ids)
        if self.position_tpl is not None:
            x = x + self.position(positions)
        if self.embedding_norm_tpl is not None:
            x = self.embedding_norm(x)
        x = self.dropout(self.cast(x))
        return self.constrain(x, "batch", "length", "act_embed")
