"""The feed-forward block of a Transformer."""

from __future__ import annotations

from typing import ClassVar

import jax

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.activations import BaseActivation, ReLU
from layerkit.layers.basic.dots import constrain_tokens, merge_tokens
from layerkit.layers.basic.dropout import Dropout
from layerkit.layers.basic.linears import Bias, Linear
from layerkit.ops.remat import name_activation


class TransformerFeedForward(BaseLayer):
    """A feed-forward block: `[batch, length, dims]` → the same shape.

        down(activation(up(x)))             without a gate
        down(activation(gate(x)) · up(x))   with a gate

    With a gate (Shazeer, 2020, arXiv:2002.05202) the activation selects the variant: SiLU is
    SwiGLU, GELU is GEGLU, ReLU is ReGLU, Sigmoid is GLU, Identity is bilinear.

    Attributes:
      input_dims: Size of the model dimension.
      hidden_dims: Size of the hidden dimension.
      has_bias: True to add a bias after each projection, including the gate's.
      use_gate: True to multiply the hidden activations by a gate.
      activation_tpl: Activation.
      dropout_rate: Dropout rate of the hidden activations in training.
      linear_tpl: Projections.
      bias_tpl: Biases.
      down_init: Initializer of the `down` projection; None for that of the others.
    """

    used_only_if: ClassVar[Conditions] = {"bias_tpl": "has_bias"}

    input_dims: int = 0
    hidden_dims: int = 0
    has_bias: bool = False
    use_gate: bool = False
    linear_tpl: Config[BaseLayer] = sub_config_field(Linear.HParams)
    bias_tpl: Config[BaseLayer] = sub_config_field(Bias.HParams)
    activation_tpl: Config[BaseActivation] = sub_config_field(ReLU.HParams)
    dropout_rate: float = 0.0
    down_init: WeightInit | None = None

    def setup(self) -> None:
        """Create the projections, biases, activation and dropout."""
        wide = {"input_dims": self.input_dims, "output_dims": self.hidden_dims}
        widening = ("up", "gate") if self.use_gate else ("up",)
        for name in widening:
            self.create_child(name, self.linear_tpl, **wide, weight_axes=("embed", "mlp"))
            if self.has_bias:
                bias = {"dims": self.hidden_dims, "axes": ("mlp",)}
                self.create_child(f"{name}_bias", self.bias_tpl, **bias)
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
            self.create_child("down_bias", self.bias_tpl, dims=self.input_dims, axes=("embed",))
        self.create_child("activation", self.activation_tpl)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    def fprop(self, x: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """Map `[batch, length, input_dims]` to the same shape.

        Args:
          x: Activations `[batch, length, input_dims]`.
          is_token: bool `[batch, length]`, False for padding. It has no effect here, since every
            position is computed separately. Layers in which positions share something, such as the
            capacity of experts, exclude padding.
        """
        del is_token
        tokens = merge_tokens(self, x)
        hidden = self._widen("up", tokens)
        if self.use_gate:
            hidden = self.activation.gate(self._widen("gate", tokens), hidden)
        else:
            hidden = self.activation(hidden)
        hidden = name_activation(hidden, "feed_forward_hidden")
        output = self.down(self.dropout(hidden))
        if self.has_bias:
            output = self.down_bias(output)
        return output.reshape(x.shape)

    def _widen(self, name: str, tokens: jax.Array) -> jax.Array:
        wide = constrain_tokens(self, getattr(self, name)(tokens), "act_mlp")
        return getattr(self, f"{name}_bias")(wide) if self.has_bias else wide
