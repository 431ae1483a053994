"""Multi-token prediction: modules behind a language model that predict tokens further ahead.

Module k of DeepSeek V3 (2024, arXiv:2412.19437, section 2.2) predicts token i + k + 1 from the
hidden state of position i and the token i + k, where t is a token and the embeddings and the
softmax are those of the model:

    x_i^k = projection([embedding_norm(embed(t_{i+k})), hidden_norm(h_i^{k-1})])
    h_i^k = norm(layer(x^k)_i)              p(t_{i+k+1}) = softmax(h_i^k)

h^0 are the normalized hidden states of the model. Each module is causal, as the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_non_negative, check_sizes
from layerkit.layers.basic.linears import Linear
from layerkit.layers.basic.normalizations import BaseNormalization, RmsNorm
from layerkit.ops.attention.masks import AttentionMask, row_positions


class MultiTokenModule(BaseLayer):
    """A module of `MultiTokenPrediction` that predicts the tokens one position further ahead.

    Attributes:
      input_dims: Size of the model dimension.
      hidden_dims: Size of the hidden dimension of the feed-forward; None if the layer sets it.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; None for as many as query heads.
      dim_per_head: Size of a head; None for input_dims / num_heads.
      norm_tpl: All norms.
      projection_tpl: Projection of a token's embedding and of a hidden state to the layer.
      layer_tpl: Layer; None for the template of the last layer of the model.
    """

    input_dims: int = 0
    hidden_dims: int | None = None
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    norm_tpl: Config[BaseNormalization] = sub_config_field(RmsNorm.HParams)
    projection_tpl: Config[BaseLayer] = sub_config_field(Linear.HParams)
    layer_tpl: Config[BaseLayer] | None = sub_config_field(None)

    def setup(self) -> None:
        """Create the norms, the projection and the layer."""
        dims = self.input_dims
        for name in ("embedding_norm", "hidden_norm", "norm"):
            self.create_child(name, self.norm_tpl, dims=dims)
        sizes = {"input_dims": 2 * dims, "output_dims": dims, "weight_axes": ("embed", None)}
        self.create_child("projection", self.projection_tpl, **sizes)
        self.create_child(
            "layer",
            self.layer_tpl,
            input_dims=dims,
            hidden_dims=self.hidden_dims,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            dim_per_head=self.dim_per_head,
        )

    def fprop(
        self, hidden: jax.Array, embedded: jax.Array, *, mask: AttentionMask, positions: jax.Array
    ) -> jax.Array:
        """Compute the next hidden states `[batch, length, input_dims]`.

        Args:
          hidden: Hidden states of the module before, `[batch, length, input_dims]`.
          embedded: Embeddings of the tokens ahead, of the same shape.
          mask: Causal mask.
          positions: int32 `[batch, length]`.
        """
        x = self._join(hidden, embedded)
        out: jax.Array = self.norm(self.layer(x, mask=mask, positions=positions))
        return out

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Create an empty cache of the layer."""
        self.layer.init_cache(batch_size, max_length)

    def extend_step(
        self, hidden: jax.Array, embedded: jax.Array, *, time_step: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Compute the next hidden states `[batch, t, input_dims]` of cached rows; see `fprop`."""
        x = self._join(hidden, embedded)
        out: jax.Array = self.norm(
            self.layer.extend_step(x, time_step=time_step, positions=positions)
        )
        return out

    def _join(self, hidden: jax.Array, embedded: jax.Array) -> jax.Array:
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        x = self.projection(jnp.concatenate(parts, axis=-1))
        return self.constrain(x, "batch", "residual_length", "act_embed")


class MultiTokenPrediction(BaseLayer):
    """Modules that predict tokens further ahead, with their training losses.

    Attributes:
      depth: Number of modules, which is that of further tokens that each position predicts.
      loss_weight: Weight λ of the mean of the losses of the modules in the training loss. DeepSeek
        V3 has 0.3 at first and 0.1 for the last third of its tokens; 0 for no losses, as in a
        `PreferenceModel`.
      module_tpl: Module, with weights of its own for each depth.
    """

    depth: int = 1
    loss_weight: float = 0.1
    module_tpl: Config[MultiTokenModule] = sub_config_field(MultiTokenModule.HParams)

    def setup(self) -> None:
        """Create the modules."""
        check_sizes(self, depth=self.depth)
        check_non_negative(self, loss_weight=self.loss_weight)
        self.create_children("layers", [self.module_tpl] * self.depth)

    @property
    def num_layers(self) -> int:
        """Number of modules."""
        return self.depth

    @nn.nowrap
    def locate_layer(self, layer: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the location of a module's variables; see `StackedTransformer.locate_layer`."""
        return (f"layers_{layer}",), ()

    def fprop(
        self,
        hidden: jax.Array,
        ids: jax.Array,
        *,
        targets: Mapping[str, jax.Array],
        weights: jax.Array,
        embed: Callable[[jax.Array, jax.Array], jax.Array],
        softmax: Callable[..., Any],
        segment_ids: jax.Array | None = None,
        segment_pos: jax.Array | None = None,
    ) -> None:
        """Add the losses of all modules to the training loss.

        A position has no target, and no module reads it, where the token ahead belongs to another
        document or is behind the end of the row.

        Args:
          hidden: Normalized hidden states of the model, `[batch, length, input_dims]`.
          ids: Token ids int32 `[batch, length]`.
          targets: Labels `[batch, length]` or soft targets `[batch, length, vocab]` of the model.
          weights: Token weights `[batch, length]` of the model.
          embed: Function from ids and positions `[batch, length]` to embeddings.
          softmax: Softmax of the model; see `FullSoftmax.fprop`.
          segment_ids: Number of each token's document, int32 `[batch, length]`; 0 is padding. None
            for one document per row.
          segment_pos: Position within the document, int32 `[batch, length]`; None counts from the
            start of the row.
        """
        segments = jnp.ones_like(ids) if segment_ids is None else segment_ids
        positions = row_positions(*ids.shape) if segment_pos is None else segment_pos
        for depth, module in enumerate(self.layers, start=1):
            is_inside = _shift(segments, depth) == segments
            mask = AttentionMask.causal_mask(
                *ids.shape, segment_ids=jnp.where(is_inside, segments, 0)
            )
            embedded = embed(_shift(ids, depth), positions)
            hidden = module(hidden, embedded, mask=mask, positions=positions)
            losses = softmax(
                hidden,
                weights=_shift(weights, depth) * is_inside,
                **{name: _shift(values, depth) for name, values in targets.items()},
            )
            self.add_summary(f"xent_{depth}", losses.xent)
            weight = self.loss_weight / self.depth
            self.add_aux_loss(f"loss_{depth}", weight * losses.loss, weight=losses.total_weight)


def _shift(values: jax.Array, by: int) -> jax.Array:
    """Return values `[batch, length, ...]` of the position `by` steps ahead; 0 behind the end."""
    ahead = values[:, by:]
    return jnp.pad(ahead, [(0, 0), (0, by), *[(0, 0)] * (values.ndim - 2)])
