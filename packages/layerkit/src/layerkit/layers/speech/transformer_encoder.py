"""An encoder of speech by two convolutions over frames and a Transformer, as in Whisper.

Source: Radford et al., 2022 (arXiv:2212.04356, section 2.2).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.elementwise import GELU, BaseActivation, Dropout
from layerkit.layers.basic.normalizations import BaseNormalization, LayerNorm
from layerkit.layers.basic.positions import PositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformer
from layerkit.layers.vision.convolutions import Conv
from layerkit.ops.attention.masks import AttentionMask, row_positions


class SpeechTransformerEncoder(BaseLayer):
    """An encoder of features: `[batch, frames, bins]` → `[batch, ⌈frames / 2⌉, dims]`.

    Two convolutions over frames, the second of stride 2, positions, a stack of layers, and a norm.

    Attributes:
      num_bins: Number of bins of the features.
      num_layers: Number of layers.
      model_dims: Size of the model dimension, also that of the convolutions.
      hidden_dims: Size of the hidden dimension of the feed-forward.
      num_heads: Number of heads of the attention.
      conv_tpl: Convolutions of three frames.
      activation_tpl: Activation of the convolutions.
      position_tpl: Positional embedding that is added to the outputs of the convolutions; None for
        layers that encode positions.
      stack_tpl: Stack of layers.
      final_norm_tpl: Norm of the outputs.
      dropout_rate: Dropout rate of the inputs of the stack in training.
    """

    num_bins: int = 80
    num_layers: int = 1
    model_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    conv_tpl: Config[BaseLayer] = sub_config_field(Conv.HParams, use_bias=True)
    activation_tpl: Config[BaseActivation] = sub_config_field(GELU.HParams, approximate=False)
    position_tpl: Config[BaseLayer] | None = sub_config_field(PositionalEmbedding.HParams)
    stack_tpl: Config[BaseLayer] = sub_config_field(StackedTransformer.HParams)
    final_norm_tpl: Config[BaseNormalization] = sub_config_field(LayerNorm.HParams)
    dropout_rate: float = 0.0

    def setup(self) -> None:
        """Create the convolutions, the positions, the stack and the norm."""
        dims = self.model_dims
        window: dict[str, Any] = {"kernel_size": (3,), "padding": ((1, 1),), "output_dims": dims}
        self.create_child("conv_0", self.conv_tpl, input_dims=self.num_bins, **window)
        self.create_child("conv_1", self.conv_tpl, input_dims=dims, strides=2, **window)
        self.create_child("activation", self.activation_tpl)
        if self.position_tpl is not None:
            self.create_child("position", self.position_tpl, dims=dims)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))
        sizes = {"input_dims": dims, "hidden_dims": self.hidden_dims}
        sizes |= {"num_layers": self.num_layers, "num_heads": self.num_heads}
        self.create_child("stack", self.stack_tpl, **sizes)
        self.create_child("final_norm", self.final_norm_tpl, dims=dims)

    def fprop(self, features: jax.Array, *, paddings: jax.Array) -> NestedMap:
        """Encode whole utterances.

        Args:
          features: `[batch, frames, num_bins]`.
          paddings: `[batch, frames]`, 1 for frames of padding, which are last.

        Returns:
          A NestedMap of `encoded` `[batch, ⌈frames / 2⌉, model_dims]` and its `paddings`.
        """
        x = features
        for conv in (self.conv_0, self.conv_1):
            x = self.activation(conv(jnp.where(paddings[..., None] == 0, x, 0.0)))
        paddings = paddings[:, ::2]
        (batch, length), segments = paddings.shape, (paddings == 0).astype(jnp.int32)
        positions = row_positions(batch, length)
        if self.position_tpl is not None:
            x = x + self.position(positions)
        mask = AttentionMask.bidirectional_mask(batch, length, segment_ids=segments)
        x = self.stack(self.dropout(x), mask=mask, positions=positions)
        return NestedMap(encoded=self.final_norm(x), paddings=paddings)
