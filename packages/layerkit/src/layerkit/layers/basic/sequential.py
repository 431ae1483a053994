"""Layers in sequence, blocks of dense layers, and stacking of neighboring frames."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, sub_config_field, target_of
from layerkit.config.checks import check_integers, check_sizes, require
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.elementwise import BaseActivation, Identity, ReLU
from layerkit.layers.basic.linears import FeedForward


class Sequential(BaseLayer):
    """A sequence of layers, each applied to the outputs of the previous one.

    Attributes:
      layer_tpls: Templates of the layers, at least one.

    Raises:
      ConfigError: The sequence is empty.
    """

    layer_tpls: tuple[Config[BaseLayer], ...] | None = sub_config_field(None)

    def setup(self) -> None:
        """Create the layers."""
        require(self.layer_tpls, self, "layer_tpls", self.layer_tpls, "at least one layer")
        self.create_children("layers", self.layer_tpls or ())

    def fprop(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply all layers and return the outputs of the last.

        Args:
          inputs: Inputs of the first layer, such as `[batch, ..., dims]`.
          *args: Further arguments of every layer.
          **kwargs: Further keyword arguments of every layer.
        """
        outputs = inputs
        for layer in self.layers:
            outputs = layer(outputs, *args, **kwargs)
        return outputs


class MLPBlock(BaseLayer):
    """A sequence of dense layers: `[..., input_dims]` → `[..., output_dims]`.

    Attributes:
      input_dims: Size of the last axis of the inputs.
      hidden_dims: Sizes between the layers.
      output_dims: Size of the last axis of the outputs.
      layer_tpl: Template of every layer, without the fields that the block sets.
      activate_output: True if the last layer has an activation too.
      has_bias: True if every layer has a bias.
      activation_tpl: Activation of the layers.

    Raises:
      ConfigError: A size is below one, or `layer_tpl` sets a different bias or activation.
    """

    input_dims: int = 0
    hidden_dims: tuple[int, ...] = ()
    output_dims: int = 0
    layer_tpl: Config[BaseLayer] = sub_config_field(FeedForward.HParams)
    activate_output: bool = False
    has_bias: bool = True
    activation_tpl: Config[BaseActivation] = sub_config_field(ReLU.HParams)

    def setup(self) -> None:
        """Create the layers."""
        sizes = [self.input_dims, *self.hidden_dims, self.output_dims]
        hidden = {f"hidden_dims[{number}]": size for number, size in enumerate(self.hidden_dims)}
        check_sizes(self, input_dims=self.input_dims, **hidden, output_dims=self.output_dims)
        default = Config(target_of(self.layer_tpl))
        for field in ("has_bias", "activation_tpl"):
            value, expected = getattr(self.layer_tpl, field), f"the value of the block's {field}"
            is_valid = value in (getattr(default, field), getattr(self, field))
            require(is_valid, self, f"layer_tpl.{field}", value, expected)
        for number, (before, after) in enumerate(itertools.pairwise(sizes)):
            is_active = number < len(self.hidden_dims) or self.activate_output
            self.create_child(
                f"layers_{number}",
                self.layer_tpl,
                input_dims=before,
                output_dims=after,
                has_bias=self.has_bias,
                activation_tpl=self.activation_tpl if is_active else Identity.HParams.config(),
            )

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[..., input_dims]` to `[..., output_dims]`."""
        outputs = inputs
        for number in range(len(self.hidden_dims) + 1):
            outputs = getattr(self, f"layers_{number}")(outputs)
        return outputs


class StackingOverTime(BaseLayer):
    """Concatenation of neighboring frames, which speech models use to shorten their inputs.

    Frame t of `[batch, length, dims]` becomes [x[t − left], …, x[t], …, x[t + right]], with
    zeros or copies of the edge beyond the ends. Every `stride`-th result is kept:
    `[batch, ⌈length / stride⌉, (left + 1 + right)·dims]`.

    Attributes:
      left: Number of preceding frames.
      right: Number of following frames.
      stride: Distance of the results that are kept.
      pad_with_left_frame: True for copies of the first frame before it; False for zeros.
      pad_with_right_frame: True for copies of the last frame after it; False for zeros.
      padding_reduce_option: `reduce_min` if a result is padding only if all of its frames are;
        `reduce_max` if it is padding as soon as one of them is.

    Raises:
      ConfigError: A negative context, a stride below 1, or an unknown option.
    """

    used_only_if: ClassVar[Conditions] = {
        "pad_with_left_frame": "left",
        "pad_with_right_frame": "right",
    }

    left: int = 0
    right: int = 0
    stride: int = 1
    pad_with_left_frame: bool = False
    pad_with_right_frame: bool = False
    padding_reduce_option: Literal["reduce_min", "reduce_max"] = "reduce_min"

    def setup(self) -> None:
        """Check the fields."""
        check_integers(self, minimum=0, left=self.left, right=self.right)
        check_sizes(self, stride=self.stride)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[batch, length, dims]` to `[batch, ⌈length/stride⌉, (left + 1 + right)·dims]`."""
        return jnp.concatenate(self._shifted(self.cast(inputs), fill=0), axis=-1)

    def stack_paddings(self, paddings: jax.Array) -> jax.Array:
        """Return the paddings `[batch, ⌈length/stride⌉]` of the results.

        Args:
          paddings: 1 for frames of padding and 0 for others, `[batch, length]`. Frames beyond the
            ends are padding, and copies of an edge are what the edge is.
        """
        is_min = self.padding_reduce_option == "reduce_min"
        stacked = jnp.stack(self._shifted(paddings, fill=1), axis=-1)
        return jnp.min(stacked, axis=-1) if is_min else jnp.max(stacked, axis=-1)

    def _shifted(self, x: jax.Array, *, fill: float) -> list[jax.Array]:
        """Return every stride-th frame of `[batch, length, ...]` at each offset of the context."""
        before = jnp.repeat(x[:, :1], self.left, axis=1)
        after = jnp.repeat(x[:, -1:], self.right, axis=1)
        if not self.pad_with_left_frame:
            before = jnp.full_like(before, fill)
        if not self.pad_with_right_frame:
            after = jnp.full_like(after, fill)
        padded, length = jnp.concatenate([before, x, after], axis=1), x.shape[1]
        offsets = range(self.left + 1 + self.right)
        return [padded[:, offset : offset + length : self.stride] for offset in offsets]
