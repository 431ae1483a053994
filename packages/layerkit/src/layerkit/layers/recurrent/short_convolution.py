"""ShortConvolution: a gated convolution over the last tokens, as a mixer (LFM2)."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_last_axis, check_sizes
from layerkit.layers.attention.base_attention import HeadProjection, OutputProjection
from layerkit.layers.attention.cache import Axes
from layerkit.layers.recurrent.mixer_parts import CausalConvolution
from layerkit.layers.recurrent.token_mixer import State, TokenMixer


class ShortConvolution(TokenMixer):
    """A gated depth-wise convolution of the last tokens (LFM2: Liquid AI, 2025, arXiv:2511.23404).

        output(output_gate(x) · convolve(input_gate(x) · input(x)))

    Attributes:
      width: Number of tokens that a token reads, itself included.
      use_bias: True to add biases in the projections and the convolution.
      projection_tpl: Projections to the gates and the inputs of the convolution.
      conv_tpl: Convolution.
      output_tpl: Projection to the output.
    """

    state_axes: ClassVar[dict[str, Axes]] = {"history": ("batch", None, None, "act_mlp")}

    width: int = 3
    use_bias: bool = False
    projection_tpl: Config[BaseLayer] = sub_config_field(
        HeadProjection.HParams,
        weight_axes=("embed", None, "mlp"),
        activation_axes=("batch", "length", None, "act_mlp"),
    )
    conv_tpl: Config[BaseLayer] = sub_config_field(
        CausalConvolution.HParams, weight_axes=(None, None, "mlp")
    )
    output_tpl: Config[BaseLayer] = sub_config_field(
        OutputProjection.HParams, weight_axes=(None, "mlp", "embed")
    )

    def setup(self) -> None:
        """Check the fields and create the children, with all channels in one head."""
        check_sizes(self, input_dims=self.input_dims, width=self.width)
        sizes = {"num_heads": 1, "head_dim": self.input_dims, "use_bias": self.use_bias}
        for name in ("input_gate", "output_gate", "input"):
            self.create_child(name, self.projection_tpl, input_dims=self.input_dims, **sizes)
        self.create_child("conv", self.conv_tpl, width=self.width, **sizes)
        self.create_child("output", self.output_tpl, output_dims=self.input_dims, **sizes)

    def initial_state(self, batch_size: int) -> State:
        """Return the empty history of the convolution, `[batch, width - 1, 1, input_dims]`."""
        shape = (batch_size, self.width - 1, 1, self.input_dims)
        return {"history": jnp.zeros(shape, self.compute_dtype)}

    def mix(
        self, x: jax.Array, state: State, *, segments: jax.Array | None
    ) -> tuple[jax.Array, State]:
        """Continue rows `[batch, t, input_dims]`; see `TokenMixer.mix`."""
        check_last_axis(self, x, input_dims=self.input_dims)
        x = self.cast(x)
        values = self.input_gate(x) * self.input(x)
        mixed, history = self.conv(values, state["history"], segments=segments)
        return self.output(self.output_gate(x) * mixed), {"history": history}
