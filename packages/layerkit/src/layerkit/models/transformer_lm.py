"""TransformerLm: a Transformer from token ids to hidden states, logits and losses.

Embedding (+ positions) → dropout → stack of Transformer layers → norm (→ head) → softmax. The
embedding is tied to the weight of the softmax (Press and Wolf, 2017) unless `embedding_tpl` is set.
The stack may unroll, scan or pipeline its layers. The functions below are shared with
encoder-decoders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base.base_layer import CACHE, BaseLayer
from layerkit.config import Config, build, sub_config_field
from layerkit.config.checks import require
from layerkit.config.hparams import Conditions, derive_fields
from layerkit.config.nested_map import NestedMap
from layerkit.layers.attention.cache import extend_cache, read_cache, write_cache
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.basic.embeddings import ClassSoftmax, SharedEmbeddingSoftmax
from layerkit.layers.basic.normalizations import BaseNormalization, LayerNorm
from layerkit.layers.basic.positions import switching_length
from layerkit.layers.transformer.stacks import StackedTransformer
from layerkit.layers.transformer.transformer import drop_none, gather_positions
from layerkit.ops.attention.masks import AttentionMask, row_positions

if TYPE_CHECKING:  # Most models read no images.
    from layerkit.layers.vision.image_embedding import PlacedImages

_HIDDEN_AXES = ("batch", "length", "act_embed")
# A tied softmax does not embed if there is a separate embedding.
TIED_EMBEDDING_CONDITIONS: Conditions = {
    "softmax_tpl.scale_by_sqrt_dims": "not embedding_tpl",
    "softmax_tpl.embedding_axes": "not embedding_tpl",
}


class TransformerLm(BaseLayer):
    """A Transformer over token ids: a decoder, or an encoder with `is_causal=False`.

    Attributes:
      vocab_size: Number of token ids.
      model_dims: Size of the model dimension.
      hidden_dims: Size of the hidden dimension of the feed-forward.
      num_layers: Depth of the stack.
      num_heads: Query heads per layer.
      num_kv_heads: Key and value heads; None for as many as query heads.
      dim_per_head: Size of a head; None for model_dims / num_heads.
      softmax_tpl: Output layer; a tied one also embeds.
      embedding_tpl: Separate input embedding; None to tie it to the softmax.
      embedding_multiplier: Factor of the token embeddings (Granite).
      ngrammer_tpl: `NGrammer`, which augments the token embeddings by those of bigrams; None for
        none.
      position_tpl: Positional embedding that is added to the token embeddings; None for models
        whose attention encodes positions (rotary).
      token_type_tpl: Embedding of the type of each token, such as its sentence (BERT), with its
        number of types (`num_classes`); it is added to the token embeddings. None for no types.
      embedding_norm_tpl: Norm of the embeddings before the stack (BERT, BLOOM); None for no norm.
      images_tpl: `ImageEmbedding`, whose vectors of images replace the embeddings of placeholders;
        None for a model of text.
      layer_inputs_tpl: `LayerInputs`, which embeds the tokens for each layer, where the branch
        `layer_input_tpl` reads them (Gemma 4); None for none.
      stack_tpl: Stack of layers, such as `StackedTransformer` or `StackedTransformerRepeated`.
      final_norm_tpl: Norm before the softmax; None if the layers end in a norm (`post`).
      head_tpl: Layer between the hidden states and the softmax, such as `NormalizedFeedForward`
        (BERT); None for none.
      is_causal: True lets a position attend to positions up to itself. False lets it attend to its
        whole document, as in a masked language model, which cannot decode.
      mtp_tpl: `MultiTokenPrediction`, which adds a loss in training; None for none.
      dropout_rate: Dropout rate of the embeddings in training.

    Raises:
      ConfigError: `embedding_tpl` is None although the softmax cannot embed ids.
    """

    used_only_if: ClassVar[Conditions] = {
        **TIED_EMBEDDING_CONDITIONS,
        "ngrammer_tpl": "not mtp_tpl",
    }

    vocab_size: int = 0
    model_dims: int = 0
    hidden_dims: int = 0
    num_layers: int = 1
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    softmax_tpl: Config[ClassSoftmax] = sub_config_field(SharedEmbeddingSoftmax.HParams)
    embedding_tpl: Config[BaseLayer] | None = sub_config_field(None)
    embedding_multiplier: float = 1.0
    ngrammer_tpl: Config[BaseLayer] | None = sub_config_field(None)
    position_tpl: Config[BaseLayer] | None = sub_config_field(None)
    token_type_tpl: Config[BaseLayer] | None = sub_config_field(None)
    embedding_norm_tpl: Config[BaseNormalization] | None = sub_config_field(None)
    images_tpl: Config[BaseLayer] | None = sub_config_field(None)
    layer_inputs_tpl: Config[BaseLayer] | None = sub_config_field(None)
    stack_tpl: Config[BaseLayer] = sub_config_field(StackedTransformer.HParams)
    final_norm_tpl: Config[BaseNormalization] | None = sub_config_field(LayerNorm.HParams)
    head_tpl: Config[BaseLayer] | None = sub_config_field(None)
    is_causal: bool = True
    mtp_tpl: Config[BaseLayer] | None = sub_config_field(None)
    dropout_rate: float = 0.0

    def setup(self) -> None:
        """Create the embeddings, the stack, the norms, the softmax and further predictions."""
        create_token_layers(self)
        if self.ngrammer_tpl is not None:
            takes_ids = self.ngrammer_tpl.quantizer_tpl is None
            sizes = {"vocab_size": self.vocab_size} if takes_ids else {}
            self.create_child("ngrammer", self.ngrammer_tpl, input_dims=self.model_dims, **sizes)
        if self.position_tpl is not None:
            self.create_child("position", self.position_tpl, dims=self.model_dims)
        if self.token_type_tpl is not None:
            self.create_child("token_type", self.token_type_tpl, input_dims=self.model_dims)
        if self.embedding_norm_tpl is not None:
            self.create_child("embedding_norm", self.embedding_norm_tpl, dims=self.model_dims)
        if self.images_tpl is not None:
            self.create_child("images", self.images_tpl, output_dims=self.model_dims)
        if self.layer_inputs_tpl is not None:
            self.create_child(
                "layer_inputs",
                self.layer_inputs_tpl,
                num_classes=self.vocab_size,
                input_dims=self.model_dims,
                num_layers=self.num_layers,
            )
        self.create_child("stack", self.stack_tpl, **stack_sizes(self, num_layers=self.num_layers))
        if self.final_norm_tpl is not None:
            self.create_child("final_norm", self.final_norm_tpl, dims=self.model_dims)
        if self.head_tpl is not None:
            sizes = {"input_dims": self.model_dims, "output_dims": self.model_dims}
            self.create_child("head", self.head_tpl, **sizes)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))
        if self.mtp_tpl is not None:
            self.create_child("mtp", self._sized_modules())

    def _sized_modules(self) -> Config:
        expected = "None for a causal model without relative biases in its stack"
        is_valid = self.is_causal and getattr(self.stack_tpl, "relative_bias_tpl", None) is None
        require(self.images_tpl is None, self, "mtp_tpl", "MultiTokenPrediction", "None for images")
        require(is_valid, self, "mtp_tpl", "MultiTokenPrediction", expected)
        stack, template = cast(Any, self.stack_tpl), cast(Any, self.mtp_tpl).clone()
        pattern = stack.block_tpls or (stack.layer_tpl,)
        sizes = {**layer_sizes(self), "hidden_dims": self.hidden_dims or None}
        if template.module_tpl.layer_tpl is None:
            last = self.num_layers - len(stack.first_tpls or ()) - 1
            sizes["layer_tpl"] = pattern[last % len(pattern)].clone()
        template.module_tpl = derive_fields(template.module_tpl, self.path_name, **sizes)
        result: Config = template
        return result

    @nn.nowrap
    def locate_layer(self, layer: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return where the variables of a layer are; see `locate_in_stack`."""
        return locate_in_stack(
            self, layer, child="stack", template="stack_tpl", num_layers=self.num_layers
        )

    def fprop(
        self,
        ids: jax.Array,
        *,
        labels: jax.Array | None = None,
        weights: jax.Array,
        class_probabilities: jax.Array | None = None,
        **packing: Any,
    ) -> NestedMap:
        """Compute the losses of predicting `labels`.

        Args:
          ids: Token ids int32 `[batch, length]`.
          labels: Next token of each position, int32 `[batch, length]`; None with
            class_probabilities.
          weights: Token weights float32 `[batch, length]`; 0 excludes a token.
          class_probabilities: Soft targets of each position, float32 `[batch, length, vocab]`, in
            the place of labels.
          **packing: Segments, positions, prefix and images; see `hidden`.

        Returns:
          Outputs of the softmax; see `FullSoftmax.fprop`.
        """
        hidden = self.hidden(ids, **packing)
        targets = drop_none(labels=labels, class_probabilities=class_probabilities)
        if self.mtp_tpl is not None and self.is_training and self.mtp.loss_weight:
            self.mtp(
                hidden,
                ids,
                targets=targets,
                weights=weights,
                embed=self._embed,
                softmax=lambda x, **inputs: self.softmax(self._apply_head(x), **inputs),
                segment_ids=packing.get("segment_ids"),
                segment_pos=packing.get("segment_pos"),
            )
        return self.softmax(self._apply_head(hidden), weights=weights, **targets)

    def logits(self, ids: jax.Array, **packing: Any) -> jax.Array:
        """Compute the logits float32 `[batch, length, vocab]` of the token after each position."""
        return self.softmax.logits(self.predictors(ids, **packing))

    def predictors(self, ids: jax.Array, **packing: Any) -> jax.Array:
        """Compute the inputs `[batch, length, dims]` of the softmax; see `hidden`."""
        return self._apply_head(self.hidden(ids, **packing))

    def hidden(
        self,
        ids: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        segment_pos: jax.Array | None = None,
        in_prefix: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        images: jax.Array | None = None,
        segments_are_runs: bool = True,
    ) -> jax.Array:
        """Compute normalized hidden states `[batch, length, dims]`.

        Args:
          ids: Token ids int32 `[batch, length]`.
          segment_ids: Number of each token's document in its row, int32 `[batch, length]`, from 1;
            0 is padding.
          segment_pos: Position within the document, int32 `[batch, length]`; None counts from the
            start of the row.
          in_prefix: True for tokens of the prefix, bool `[batch, length]`. All positions of the
            document attend to the prefix in a prefix language model. None for no prefix.
          token_type_ids: Type of each token, int32 `[batch, length]`; None for type 0.
          images: Images of the placeholders of each row, `[batch, num_images, height, width,
            channels]`, as `ImageEmbedding` reads them; None for rows of text.
          segments_are_runs: False if padding may split a document; see `AttentionMask`.

        Raises:
          ConfigError: `in_prefix` is given although the model is not causal, `token_type_ids`
            although the model has no `token_type_tpl`, or `images` although it has no `images_tpl`.
        """
        batch, length = ids.shape
        if segment_pos is None:
            segment_pos = row_positions(batch, length)
        self._check_images(images)
        placed = None
        if images is not None:
            placed = self.images.place(ids, images, positions=segment_pos)
        runs = {"segments_are_runs": segments_are_runs}
        if self.is_causal:
            ends = None if placed is None else placed.ends(row_positions(batch, length))
            mask = AttentionMask.causal_mask(
                batch, length, segment_ids=segment_ids, in_prefix=in_prefix, query_ends=ends, **runs
            )
        else:
            is_causal, expected = self.is_causal, "True for inputs with a prefix (in_prefix)"
            require(in_prefix is None, self, "is_causal", is_causal, expected)
            mask = AttentionMask.bidirectional_mask(batch, length, segment_ids=segment_ids, **runs)
        x = self._embed(ids, segment_pos, token_type_ids, images=placed, segments=segment_ids)
        if segment_ids is not None and switching_length(self.stack_tpl) is not None:
            # Padding makes no row longer.
            segment_pos = jnp.where(segment_ids > 0, segment_pos, 0)
        positions = segment_pos if placed is None else placed.positions(segment_pos)
        more = self._embed_for_layers(ids, x)
        return self._normalize(self.stack(x, mask=mask, positions=positions, **more))

    def init_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        drafts: bool = False,
        images: jax.Array | None = None,
    ) -> None:
        """Create an empty cache for sequences of at most `max_length` tokens.

        Args:
          batch_size: Number of rows.
          max_length: Number of tokens of a row.
          drafts: True to cache what `draft_step` reads, the hidden states of all positions.
          images: Images of the rows, `[batch, num_images, …]`; see `hidden`. The first step must
            contain an image whose placeholders attend to one another.

        Raises:
          ConfigError: The model is not causal, has fewer positions than tokens, drafts without
            multi-token prediction, or has no `images_tpl` for images.
        """
        expected = "True, since cached states must not depend on later tokens"
        require(self.is_causal, self, "is_causal", self.is_causal, expected)
        if self.position_tpl is not None:
            # A table of positions raises for rows that are too long. A single step is never too
            # long.
            self.position(row_positions(batch_size, max_length))
        self.stack.init_cache(batch_size, max_length)
        self._check_images(images)
        if images is not None:
            self.images.init_cache(batch_size, max_length, images)
        if self.ngrammer_tpl is not None:
            self.ngrammer.init_cache(batch_size)
        if drafts:
            expected = "MultiTokenPrediction, to draft tokens"
            require(self.mtp_tpl is not None, self, "mtp_tpl", self.mtp_tpl, expected)
            shape = (batch_size, max_length, self.model_dims)
            write_cache(self, "hidden", jnp.zeros(shape, self.compute_dtype), _HIDDEN_AXES)
            self.mtp.layers[0].init_cache(batch_size, max_length)

    def extend_step(
        self, ids: jax.Array, *, time_step: jax.Array, prefix_lengths: jax.Array | None = None
    ) -> jax.Array:
        """Run the model on the next tokens of cached sequences.

        Args:
          ids: Tokens at positions time_step … time_step + t − 1, int32 `[batch, t]`.
          time_step: Number of tokens in the cache, int32 scalar.
          prefix_lengths: Number of leading tokens with bidirectional attention in a prefix language
            model, int32 `[batch]`. The first step must contain all of them. None for no prefix.

        Returns:
          Logits float32 `[batch, t, vocab]`.
        """
        positions = jnp.broadcast_to(time_step + jnp.arange(ids.shape[1]), ids.shape)
        placed = None
        if self.images_tpl is not None:
            placed = self.images.extend_step(ids, time_step=time_step)
        ends = None if placed is None else placed.ends(positions)
        if prefix_lengths is not None:
            ends = jnp.maximum(positions if ends is None else ends, prefix_lengths[:, None] - 1)
        x = self._embed(ids, positions, images=placed, time_step=time_step)
        if placed is not None:
            positions = placed.positions(positions)
        more = drop_none(query_ends=ends) | self._embed_for_layers(ids, x)
        x = self.stack.extend_step(x, time_step=time_step, positions=positions, **more)
        hidden = self._normalize(x)
        if self.has_variable(CACHE, "hidden"):
            extend_cache(self, "hidden", hidden, _HIDDEN_AXES, time_step=time_step)
            # `draft_step` writes the slot of the last token anew, once the token after it is known.
            self.draft_step(jnp.roll(ids, -1, axis=1), time_step=time_step)
        return self.softmax.logits(self._apply_head(hidden))

    def draft_step(self, ids: jax.Array, *, time_step: jax.Array) -> jax.Array:
        """Predict the tokens after the next ones of cached rows by the first module.

        Args:
          ids: Tokens at positions time_step + 1 … time_step + t, int32 `[batch, t]`.
          time_step: Position of the first hidden state, which `extend_step` has computed, int32
            scalar.

        Returns:
          Logits float32 `[batch, t, vocab]` of the tokens at positions time_step + 2 ….
        """
        hidden = read_cache(self, "hidden", made_by="init_cache(…, drafts=True)")
        hidden = jax.lax.dynamic_slice_in_dim(hidden, time_step, ids.shape[1], axis=1)
        positions = jnp.broadcast_to(time_step + jnp.arange(ids.shape[1]), ids.shape)
        drafted = self.mtp.layers[0].extend_step(
            hidden, self._embed(ids, positions), time_step=time_step, positions=positions
        )
        return self.softmax.logits(self._apply_head(drafted))

    def _normalize(self, x: jax.Array) -> jax.Array:
        x = x if self.final_norm_tpl is None else self.final_norm(x)
        return gather_positions(self, x)

    def _apply_head(self, hidden: jax.Array) -> jax.Array:
        return hidden if self.head_tpl is None else self.head(hidden)

    def _embed_for_layers(self, ids: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
        return {} if self.layer_inputs_tpl is None else {"layer_inputs": self.layer_inputs(ids, x)}

    def _check_images(self, images: jax.Array | None) -> None:
        is_read = images is None or self.images_tpl is not None
        require(is_read, self, "images_tpl", None, "ImageEmbedding, for a batch with images")

    def _embed(
        self,
        ids: jax.Array,
        positions: jax.Array,
        token_type_ids: jax.Array | None = None,
        *,
        images: PlacedImages | None = None,
        segments: jax.Array | None = None,
        time_step: jax.Array | None = None,
    ) -> jax.Array:
        x = embed_tokens(self, ids)
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        if self.ngrammer_tpl is not None and time_step is None:
            x = self.ngrammer(ids, x, segments=segments)
        elif self.ngrammer_tpl is not None:
            x = self.ngrammer.extend_step(ids, x, time_step=time_step)
        if images is not None:
            x = images.put(x)
        if self.position_tpl is not None:
            x = x + self.position(positions)
        if self.token_type_tpl is not None:
            types = jnp.zeros_like(ids) if token_type_ids is None else token_type_ids
            x = x + self.token_type(types)
        else:
            expected = "a template, for token_type_ids"
            require(token_type_ids is None, self, "token_type_tpl", None, expected)
        if self.embedding_norm_tpl is not None:
            x = self.embedding_norm(x)
        x = self.dropout(self.cast(x))
        return self.constrain(x, "batch", "residual_length", "act_embed")


def create_token_layers(model: Any) -> None:
    """Create the children `softmax` and, unless the embedding is tied, `embedding`.

    Args:
      model: Layer with fields `vocab_size`, `model_dims`, `softmax_tpl` and `embedding_tpl`.

    Raises:
      ConfigError: `embedding_tpl` is None although the softmax cannot embed ids.
    """
    classes = {"num_classes": model.vocab_size, "input_dims": model.model_dims}
    model.create_child("softmax", model.softmax_tpl, **classes)
    if model.embedding_tpl is not None:
        model.create_child("embedding", model.embedding_tpl, **classes)
    else:
        expected = f"Embedding, since softmax_tpl is a {type(model.softmax).__name__}"
        require(hasattr(model.softmax, "embed"), model, "embedding_tpl", None, expected)


def embed_tokens(model: Any, ids: jax.Array) -> jax.Array:
    """Embed ids int32 `[batch, length]` as vectors `[batch, length, dims]`."""
    embed = model.softmax.embed if model.embedding_tpl is None else model.embedding
    vectors: jax.Array = embed(ids)
    return vectors


def stack_sizes(model: Any, *, num_layers: int) -> dict[str, Any]:
    """Return the fields that a model passes to a stack of `num_layers` layers."""
    return {"num_layers": num_layers, **layer_sizes(model)}


def layer_sizes(model: Any) -> dict[str, Any]:
    """Return the sizes that a model passes to its layers."""
    return {
        "input_dims": model.model_dims,
        "hidden_dims": model.hidden_dims,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "dim_per_head": model.dim_per_head,
    }


def locate_in_stack(
    model: Any, layer: int, *, child: str, template: str, num_layers: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the location of a layer's variables in those of an unbound model.

    Args:
      model: Model with the sizes of its stacks.
      layer: Index of the layer, from 0 at the input of the stack.
      child: Name of the stack.
      template: Name of the field with the stack's template.
      num_layers: Depth of the stack.

    Returns:
      The path of the layer's subtree, and the indices into the leading axes of each leaf there; see
      `StackedTransformer.locate_layer`.
    """
    sizes = stack_sizes(model, num_layers=num_layers)
    where = f"{type(model).__qualname__}.{template}"
    stack = build(derive_fields(getattr(model, template), where, **sizes))
    path, indices = stack.locate_layer(layer)
    return (child, *path), indices
