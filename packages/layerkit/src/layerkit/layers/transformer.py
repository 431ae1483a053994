"""The Transformer: feed-forward block, one layer, and stacks of layers.

One layer is pre-norm (Xiong et al., 2020):

    x = x + attention(norm(x))
    x = x + feed_forward(norm(x))

Sizes are said once, on the stack or the model, and handed down. `extend_step` is the same
computation as `fprop`, for the next positions of a cached sequence.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from layerkit.base_layer import BaseLayer, derive_fields
from layerkit.config import Config, sub_config_field
from layerkit.layers.activations import ReLU
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.linears import Bias, Linear
from layerkit.layers.masks import AttentionMask
from layerkit.layers.normalizations import LayerNorm
from layerkit.layers.products import constrain_tokens, merge_tokens
from layerkit.layers.remat import check_remat_policy, remat
from layerkit.layers.repeat import Repeat
from layerkit.layers.sizes import check_sizes
from layerkit.layers.stochastic import Dropout
from layerkit.weights import WeightInit


class TransformerFeedForward(BaseLayer):
    """Two projections with an activation between: `[batch, length, dims]` → the same.

    Attributes:
      input_dims: Size of the model dimension.
      hidden_dims: Size of the wide dimension.
      has_bias: Adds a bias after both projections.
      use_gate: Multiplies the activation by a second projection (Shazeer, 2020: SwiGLU with SiLU).
      activation_tpl: The non-linearity.
      dropout_rate: Of the activation, in training.
      linear_tpl: The projections.
      down_init: Initialiser of the projection back; None for that of the others.
    """

    input_dims: int = 0
    hidden_dims: int = 0
    has_bias: bool = False
    use_gate: bool = False
    linear_tpl: Any = sub_config_field(Linear.HParams)
    bias_tpl: Any = sub_config_field(Bias.HParams)
    activation_tpl: Any = sub_config_field(ReLU.HParams)
    dropout_rate: float = 0.0
    down_init: WeightInit | None = None

    def setup(self) -> None:
        wide = {"input_dims": self.input_dims, "output_dims": self.hidden_dims}
        self.create_child("up", self.linear_tpl, **wide, weight_axes=("embed", "mlp"))
        if self.use_gate:
            self.create_child("gate", self.linear_tpl, **wide, weight_axes=("embed", "mlp"))
        down_tpl = self.linear_tpl
        if self.down_init is not None:
            down_tpl = down_tpl.clone(weight_init=self.down_init)
        self.create_child(
            "down",
            down_tpl,
            input_dims=self.hidden_dims,
            output_dims=self.input_dims,
            weight_axes=("mlp", "embed"),
        )
        if self.has_bias:
            self.create_child("up_bias", self.bias_tpl, dims=self.hidden_dims, axes=("mlp",))
            self.create_child("down_bias", self.bias_tpl, dims=self.input_dims, axes=("embed",))
        self.create_child("activation", self.activation_tpl)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    def fprop(self, x: jax.Array) -> jax.Array:
        """`[batch, length, input_dims]` → the same."""
        tokens = merge_tokens(self, x)
        hidden = self._widen(self.up, tokens)
        if self.has_bias:
            hidden = self.up_bias(hidden)
        if self.use_gate:
            hidden = self.activation(self._widen(self.gate, tokens)) * hidden
        else:
            hidden = self.activation(hidden)
        output = self.down(self.dropout(hidden))
        if self.has_bias:
            output = self.down_bias(output)
        return output.reshape(x.shape)

    @nn.nowrap
    def _widen(self, linear: Any, tokens: jax.Array) -> jax.Array:
        return constrain_tokens(self, linear(tokens), "act_mlp")


class Transformer(BaseLayer):
    """One pre-norm layer: attention and feed-forward, each around a residual.

    Attributes:
      input_dims: Size of the model dimension.
      hidden_dims: Size of the feed-forward's wide dimension.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; None for as many as query heads.
      dim_per_head: None for input_dims / num_heads.
      dropout_rate: Of both residual branches, in training.
    """

    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    norm_tpl: Any = sub_config_field(LayerNorm.HParams)
    attention_tpl: Any = sub_config_field(MultiHeadAttention.HParams)
    feed_forward_tpl: Any = sub_config_field(TransformerFeedForward.HParams)
    dropout_rate: float = 0.0

    def setup(self) -> None:
        self.create_child("attention_norm", self.norm_tpl, dims=self.input_dims)
        self.create_child(
            "attention",
            self.attention_tpl,
            input_dims=self.input_dims,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            dim_per_head=self.dim_per_head,
        )
        self.create_child("feed_forward_norm", self.norm_tpl, dims=self.input_dims)
        self.create_child(
            "feed_forward",
            self.feed_forward_tpl,
            input_dims=self.input_dims,
            hidden_dims=self.hidden_dims,
        )
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    def fprop(self, x: jax.Array, *, mask: AttentionMask, positions: jax.Array) -> jax.Array:
        """`x` `[batch, length, dims]`, positions int32 `[batch, length]` → the shape of `x`."""
        attended = self.attention(self.attention_norm(x), mask=mask, positions=positions)
        return self._add_branches(x, attended)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Creates an empty cache of keys and values."""
        self.attention.init_cache(batch_size, max_length)

    def extend_step(self, x: jax.Array, *, time_step: jax.Array, positions: jax.Array) -> jax.Array:
        """The outputs of the next positions `[batch, t, dims]` of a cached sequence."""
        attended = self.attention.extend_step(
            self.attention_norm(x), time_step=time_step, positions=positions
        )
        return self._add_branches(x, attended)

    @nn.nowrap
    def _add_branches(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = self._constrain_residual(x + self.dropout(attended))
        branch = self.feed_forward(self.feed_forward_norm(x))
        return self._constrain_residual(x + self.dropout(branch))

    @nn.nowrap
    def _constrain_residual(self, x: jax.Array) -> jax.Array:
        return self.constrain(x, "batch", "length", "act_embed")


class StackedTransformer(BaseLayer):
    """`num_layers` layers in a row, each compiled on its own.

    Attributes:
      layer_tpl: The layer that is stacked.
      num_layers: How many.
      remat: Name of the rematerialisation policy around each layer; see `layerkit.layers.remat`.
      Others: handed to every layer, so that `layer_tpl` leaves its sizes out or agrees; where
        `num_kv_heads` and `dim_per_head` are None, it may set them.
    """

    layer_tpl: Any = sub_config_field(Transformer.HParams)
    num_layers: int = 1
    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    remat: str = "none"

    def setup(self) -> None:
        sizes = self._checked_sizes()
        self.create_children("layers", [self.layer_tpl] * self.num_layers, **sizes)

    @nn.nowrap
    def _checked_sizes(self) -> dict[str, Any]:
        """What every layer is given, after refusing what a stack of any kind cannot be."""
        check_sizes(self, num_layers=self.num_layers)
        check_remat_policy(self.remat, owner=self.path_name)
        return {
            "input_dims": self.input_dims,
            "hidden_dims": self.hidden_dims,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "dim_per_head": self.dim_per_head,
        }

    def fprop(self, x: jax.Array, *, mask: AttentionMask, positions: jax.Array) -> jax.Array:
        """`x` `[batch, length, dims]`, positions int32 `[batch, length]` → the shape of `x`."""

        def body(layer: Any, x: jax.Array, mask: Any, positions: Any) -> jax.Array:
            return layer(x, mask=mask, positions=positions)

        run = remat(body, self.remat, in_scan=False)
        for layer in self.layers:
            x = run(layer, x, mask, positions)
        return x

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Creates the empty caches of all layers."""
        for layer in self.layers:
            layer.init_cache(batch_size, max_length)

    def extend_step(self, x: jax.Array, *, time_step: jax.Array, positions: jax.Array) -> jax.Array:
        """The outputs of the next positions `[batch, t, dims]` of a cached sequence."""
        for layer in self.layers:
            x = layer.extend_step(x, time_step=time_step, positions=positions)
        return x


class StackedTransformerRepeated(StackedTransformer):
    """The same stack as one scan: weights stacked on a `layers` axis, compiled once.

    Attributes:
      unroll: How many layers one iteration of the loop holds.
    """

    unroll: int = 1

    def setup(self) -> None:
        sizes = self._checked_sizes()
        repeat: Config = Repeat.HParams.config(
            sub_tpl=derive_fields(self.layer_tpl, f"{self.path_name}.layer_tpl", **sizes),
            num_repeats=self.num_layers,
            remat=self.remat,
            unroll=self.unroll,
        )
        self.create_child("repeat", repeat)

    def fprop(self, x: jax.Array, *, mask: AttentionMask, positions: jax.Array) -> jax.Array:
        return self.repeat(x, mask=mask, positions=positions)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        self.repeat.init_cache(batch_size, max_length)

    def extend_step(self, x: jax.Array, *, time_step: jax.Array, positions: jax.Array) -> jax.Array:
        return self.repeat.run("extend_step", x, time_step=time_step, positions=positions)
