"""The Conformer: Transformer layers with a convolution, and an encoder of speech made of them.

Source: Gulati et al., 2020 (arXiv:2005.08100). A layer is

    x = x + feed_forward_start(norm(x)) / 2
    x = x + attention(norm(x))
    x = x + conv(norm(x))
    x = x + feed_forward(norm(x)) / 2
    y = norm(x)

Cached steps compute the same as whole rows under a causal mask, which makes convolutions causal
too. With `MultiHeadAttention.look_ahead` a step is a chunk, whose frames see one another.

Rows hold one utterance each, since convolutions would mix those that are packed in one row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_divisible, require
from layerkit.config.nested_map import NestedMap
from layerkit.layers.attention.cache import Axes, extend_cache, read_cache, write_cache
from layerkit.layers.attention.transformer_xl import TransformerXLAttention
from layerkit.layers.basic.batch_norm import BatchNorm, GroupNorm
from layerkit.layers.basic.elementwise import BaseActivation, Dropout, Identity, ReLU, SiLU
from layerkit.layers.basic.linears import FeedForward, Linear
from layerkit.layers.basic.normalizations import BaseNormalization
from layerkit.layers.transformer.stacks import StackedTransformer
from layerkit.layers.transformer.transformer import Transformer, TransformerFeedForward, drop_none
from layerkit.layers.vision.convolutions import Conv
from layerkit.ops.attention.masks import MASKED_LOGIT, AttentionMask, row_positions

# Dense layers without activation, into the hidden dimension and back.
_INTO_HIDDEN = {"activation_tpl": Identity.HParams.config()}
_INTO_EMBED = {"linear_tpl": Linear.HParams.config(weight_axes=("mlp", "embed")), **_INTO_HIDDEN}


class LightConv1D(BaseLayer):
    """A gated depth-wise convolution over frames: `[batch, length, dims]` → the same shape.

        up(activation(norm(conv(value(x) · sigmoid(gate(x))))))

    Attributes:
      input_dims: Size of the model dimension.
      kernel_size: Number of frames that an output reads.
      linear_tpl: Dense layers of the values and the gates.
      up_tpl: Dense layer of the outputs.
      conv_tpl: Depth-wise convolution.
      norm_tpl: Norm of the outputs of the convolution. `GroupNorm` has no cached steps.
      activation_tpl: Activation.
    """

    input_dims: int = 0
    kernel_size: int = 32
    linear_tpl: Config[BaseLayer] = sub_config_field(FeedForward.HParams, **_INTO_HIDDEN)
    up_tpl: Config[BaseLayer] = sub_config_field(FeedForward.HParams, **_INTO_EMBED)
    conv_tpl: Config[BaseLayer] = sub_config_field(Conv.HParams)
    norm_tpl: Config[BaseNormalization] = sub_config_field(BatchNorm.HParams)
    activation_tpl: Config[BaseActivation] = sub_config_field(SiLU.HParams)

    def setup(self) -> None:
        """Create the linear maps, the convolution, the norm and the activation."""
        sizes = {"input_dims": self.input_dims, "output_dims": self.input_dims}
        for name in ("value", "gate"):
            self.create_child(name, self.linear_tpl, **sizes)
        self.create_child("up", self.up_tpl, **sizes)
        one_axis = {"kernel_size": (self.kernel_size,), "padding": "VALID"}
        self.create_child("conv", self.conv_tpl, num_groups=self.input_dims, **one_axis, **sizes)
        self.create_child("norm", self.norm_tpl, dims=self.input_dims)
        self.create_child("activation", self.activation_tpl)

    def fprop(
        self, x: jax.Array, *, is_token: jax.Array | None = None, is_causal: bool = False
    ) -> jax.Array:
        """Convolve whole rows.

        Args:
          x: `[batch, length, input_dims]`.
          is_token: bool `[batch, length]`, False for padding, which no output reads.
          is_causal: True to read no later frame; False for as many frames before as after.
        """
        x = self._gate(x)
        if is_token is not None:
            x = jnp.where(is_token[..., None], x, 0.0)
        return self._finish(pad_frames(x, self.kernel_size, is_causal=is_causal), is_token)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Create the cache of the frames before the next one, `[batch, kernel_size - 1, dims]`."""
        del max_length
        has_steps, expected = not isinstance(self.norm, GroupNorm), "a norm of single positions"
        require(has_steps, self, "norm_tpl", "GroupNorm", expected)
        init_frames(self, "frames", (batch_size, self.kernel_size - 1, self.input_dims))

    def extend_step(self, x: jax.Array) -> jax.Array:
        """Convolve the next frames `[batch, t, input_dims]` of cached rows."""
        return self._finish(extend_frames(self, "frames", self._gate(x)), None)

    def _gate(self, x: jax.Array) -> jax.Array:
        gated: jax.Array = self.value(x) * jax.nn.sigmoid(self.gate(x))
        return gated

    def _finish(self, frames: jax.Array, is_token: jax.Array | None) -> jax.Array:
        x = self.conv(frames)
        masked = isinstance(self.norm, BatchNorm | GroupNorm)
        x = self.norm(x, is_token=is_token) if masked else self.norm(x)
        outputs: jax.Array = self.up(self.activation(x))
        return outputs


class Conformer(Transformer):
    """A Conformer layer: `[batch, length, dims]` → the same shape.

    The other fields are those of `Transformer`.

    Attributes:
      feed_forward_start_tpl: Feed-forward block before the attention; None for none. Blocks with
        equal configs and one `shared_weight_id` share their weights.
      conv_tpl: Convolution.
      conv_first: True for the convolution before the attention.
      final_norm_tpl: Norm of the outputs; None for `norm_tpl`.
    """

    attention_tpl: Config[BaseLayer] = sub_config_field(
        TransformerXLAttention.HParams, use_bias=True
    )
    feed_forward_tpl: Config[BaseLayer] = sub_config_field(
        TransformerFeedForward.HParams, has_bias=True, activation_tpl=SiLU.HParams.config()
    )
    feed_forward_residual_weight: float = 0.5
    feed_forward_start_tpl: Config[BaseLayer] | None = sub_config_field(
        TransformerFeedForward.HParams, has_bias=True, activation_tpl=SiLU.HParams.config()
    )
    conv_tpl: Config[BaseLayer] = sub_config_field(LightConv1D.HParams)
    conv_first: bool = False
    final_norm_tpl: Config[BaseNormalization] | None = sub_config_field(None)

    def setup(self) -> None:
        """Create the branches and norms."""
        super().setup()
        if self.feed_forward_start_tpl is not None:
            wide = {"input_dims": self.input_dims, "hidden_dims": self.hidden_dims}
            self._create_branch("feed_forward_start", self.feed_forward_start_tpl, **wide)
        self._create_branch("conv", self.conv_tpl, input_dims=self.input_dims)
        norm_tpl = self.norm_tpl if self.final_norm_tpl is None else self.final_norm_tpl
        self.create_child("final_norm", norm_tpl, dims=self.input_dims)

    def init_cache(self, batch_size: int, max_length: int, memory: jax.Array | None = None) -> None:
        """Create empty caches; see `Transformer.init_cache` `[batch, max_length, …]`."""
        super().init_cache(batch_size, max_length, memory)
        self.conv.init_cache(batch_size, max_length)

    def _order_branches(self, branches: Any, *, mask: AttentionMask | None = None) -> Any:
        conv, start = self.conv.extend_step, {}
        segments = None if mask is None else mask.query_segments
        is_token = None if segments is None else segments != 0
        if mask is not None:
            conv = partial(self.conv, is_token=is_token, is_causal=mask.causal)
        if self.feed_forward_start_tpl is not None:
            feed_forward = partial(self.feed_forward_start, **drop_none(is_token=is_token))
            start = {"feed_forward_start": feed_forward}
        end = {"feed_forward": branches.pop("feed_forward")}
        middle = {"conv": conv, **branches} if self.conv_first else {**branches, "conv": conv}
        return {**start, **middle, **end}

    def _add_branches(self, x: jax.Array, branches: Any, **rest: Any) -> jax.Array:
        normed: jax.Array = self.final_norm(super()._add_branches(x, branches, **rest))
        return normed


class ConformerEncoder(BaseLayer):
    """An encoder of features: `[batch, frames, bins]` → `[batch, ⌈frames / 4⌉, dims]`.

    Two convolutions of stride 2 over frames and bins, a linear map, and a stack of layers.

    Attributes:
      num_bins: Number of bins of the features, a multiple of 4.
      num_channels: Number of channels of the convolutions.
      num_layers: Number of layers.
      model_dims: Size of the model dimension.
      hidden_dims: Size of the hidden dimension of the feed-forward blocks.
      num_heads: Number of heads of the attention.
      is_causal: True for layers and convolutions that read no later frame, as streaming needs.
      conv_tpl: Convolutions over frames and bins.
      activation_tpl: Activation of the convolutions.
      linear_tpl: Map from channels and bins to the model dimension.
      stack_tpl: Stack of layers.
      dropout_rate: Dropout rate of the inputs of the stack in training.
    """

    num_bins: int = 80
    num_channels: int = 256
    num_layers: int = 1
    model_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    is_causal: bool = False
    conv_tpl: Config[BaseLayer] = sub_config_field(Conv.HParams, use_bias=True)
    activation_tpl: Config[BaseActivation] = sub_config_field(ReLU.HParams)
    linear_tpl: Config[BaseLayer] = sub_config_field(FeedForward.HParams, **_INTO_EMBED)
    stack_tpl: Config[BaseLayer] = sub_config_field(
        StackedTransformer.HParams, layer_tpl=Conformer.HParams.config()
    )
    dropout_rate: float = 0.0

    def setup(self) -> None:
        """Create the convolutions, the linear map and the stack."""
        check_divisible(self, by=("the factor of subsampling,", 4), num_bins=self.num_bins)
        window = {"kernel_size": (3, 3), "strides": 2, "padding": ((0, 0), (1, 1))}
        for name, channels in (("conv_0", 1), ("conv_1", self.num_channels)):
            sizes = {"input_dims": channels, "output_dims": self.num_channels}
            self.create_child(name, self.conv_tpl, **sizes, **window)
        self.create_child("activation", self.activation_tpl)
        flat = self.num_channels * self.num_bins // 4
        sizes = {"input_dims": flat, "output_dims": self.model_dims}
        self.create_child("linear", self.linear_tpl, **sizes)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))
        self.create_child(
            "stack",
            self.stack_tpl,
            num_layers=self.num_layers,
            input_dims=self.model_dims,
            hidden_dims=self.hidden_dims,
            num_heads=self.num_heads,
        )

    def fprop(self, features: jax.Array, *, paddings: jax.Array) -> NestedMap:
        """Encode whole utterances.

        Args:
          features: `[batch, frames, num_bins]`.
          paddings: `[batch, frames]`, 1 for frames of padding, which are last.

        Returns:
          A NestedMap of `encoded` `[batch, ⌈frames / 4⌉, model_dims]` and its `paddings`.
        """
        x = features[..., None]
        for conv in (self.conv_0, self.conv_1):
            x = jnp.where(paddings[..., None, None] == 0, x, 0.0)
            x = self.activation(conv(pad_frames(x, 3, is_causal=self.is_causal)))
            paddings = paddings[:, ::2]
        (batch, length), segments = paddings.shape, (paddings == 0).astype(jnp.int32)
        make = AttentionMask.causal_mask if self.is_causal else AttentionMask.bidirectional_mask
        encoded = self.stack(
            self._project(x),
            mask=make(batch, length, segment_ids=segments),
            positions=row_positions(batch, length),
        )
        return NestedMap(encoded=encoded, paddings=paddings)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Create empty caches for at most `max_length` outputs of each row.

        Raises:
          ConfigError: The encoder is not causal.
        """
        require(self.is_causal, self, "is_causal", self.is_causal, "True for cached steps")
        init_frames(self, "conv_0_frames", (batch_size, 2, self.num_bins, 1))
        channels = (self.num_bins // 2, self.num_channels)
        init_frames(self, "conv_1_frames", (batch_size, 2, *channels))
        write_cache(self, "paddings", jnp.zeros((batch_size, max_length)), ("batch", None))
        self.stack.init_cache(batch_size, max_length)

    def extend_step(
        self, features: jax.Array, *, time_step: jax.Array, paddings: jax.Array | None = None
    ) -> jax.Array:
        """Encode the next frames of cached rows.

        Args:
          features: `[batch, 4·t, num_bins]`.
          time_step: int32 scalar, number of outputs so far.
          paddings: `[batch, 4·t]`, 1 for frames behind the end of a row, which `look_ahead` would
            read; None for none.

        Returns:
          `[batch, t, model_dims]`, as `fprop` of whole rows.
        """
        check_divisible(self, by=("the factor of subsampling,", 4), frames=features.shape[1])
        x, bias = features[..., None], None
        for name in ("conv_0", "conv_1"):
            frames = extend_frames(self, f"{name}_frames", self.cast(x))
            x = self.activation(getattr(self, name)(frames))
        (batch, length), axes = x.shape[:2], ("batch", None)
        if paddings is not None:
            new = paddings[:, ::4]
            hidden = extend_cache(self, "paddings", new, axes, time_step=time_step)
            shape = (batch, 1, length, hidden.shape[1])
            bias = jnp.broadcast_to(MASKED_LOGIT * hidden[:, None, None], shape)
        encoded: jax.Array = self.stack.extend_step(
            self._project(x),
            time_step=time_step,
            positions=time_step + row_positions(batch, length),
            bias=bias,
        )
        return encoded

    def _project(self, x: jax.Array) -> jax.Array:
        projected: jax.Array = self.dropout(self.linear(x.reshape(*x.shape[:2], -1)))
        return projected


def pad_frames(x: jax.Array, kernel_size: int, *, is_causal: bool) -> jax.Array:
    """Pad the frames of `[batch, length, …]` with zeros for a window of `kernel_size` frames."""
    before = kernel_size - 1 if is_causal else (kernel_size - 1) // 2
    widths = [(0, 0)] * x.ndim
    widths[1] = (before, kernel_size - 1 - before)
    return jnp.pad(x, widths)


def init_frames(layer: BaseLayer, name: str, shape: tuple[int, ...]) -> None:
    """Create the cache `name` `[batch, frames, …]` of the frames before those of a step."""
    write_cache(layer, name, jnp.zeros(shape, layer.compute_dtype), _frame_axes(len(shape)))


def extend_frames(layer: BaseLayer, name: str, x: jax.Array) -> jax.Array:
    """Return the cached frames and those of `x` `[batch, t, …]`, and keep the last in the cache."""
    before = read_cache(layer, name)
    frames = jnp.concatenate([before, x], axis=1)
    write_cache(layer, name, frames[:, x.shape[1] :], _frame_axes(x.ndim))
    return frames


def _frame_axes(rank: int) -> Axes:
    return ("batch", *(None,) * (rank - 1))
