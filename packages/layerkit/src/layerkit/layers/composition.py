"""Layers made of layers: one after another, dense blocks, and frames laid side by side."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_sizes
from layerkit.config import Config, sub_config_field, target_of
from layerkit.layers.activations import Identity, ReLU
from layerkit.layers.linears import FeedForward


class Sequential(BaseLayer):
    """Applies layers in order, each to what the one before gave.

    Attributes:
      layer_tpls: The layers, at least one.

    Raises:
      ValueError: no layers.
    """

    layer_tpls: tuple[Any, ...] | None = sub_config_field(None)

    def setup(self) -> None:
        if not self.layer_tpls:
            raise ValueError(
                f"{self.path_name}: layer_tpls={self.layer_tpls}, expected at least one layer"
            )
        self.create_children("layers", self.layer_tpls)

    def fprop(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Inputs of the first layer, such as `[batch, ..., dims]` → outputs of the last.

        Args:
          inputs: Of the first layer; each further one takes what the one before gave.
          *args: Further arguments, given to every layer.
          **kwargs: Likewise.
        """
        outputs = inputs
        for layer in self.layers:
            outputs = layer(outputs, *args, **kwargs)
        return outputs


class MLPBlock(BaseLayer):
    """Dense layers one after another: `[..., input_dims]` → `[..., output_dims]`.

    Attributes:
      input_dims: Size of the last axis of the inputs.
      hidden_dims: Sizes between, one a layer.
      output_dims: Size of the last axis of the outputs.
      layer_tpl: A layer, without the fields that are said here.
      activate_output: Whether the last layer has the activation of the others.
      has_bias: Adds a bias in every layer.
      activation_tpl: The activation.

    Raises:
      ValueError: sizes below one, or a `layer_tpl` with another bias or activation.
    """

    input_dims: int = 0
    hidden_dims: tuple[int, ...] = ()
    output_dims: int = 0
    layer_tpl: Any = sub_config_field(FeedForward.HParams)
    activate_output: bool = False
    has_bias: bool = True
    activation_tpl: Any = sub_config_field(ReLU.HParams)

    def setup(self) -> None:
        sizes = [self.input_dims, *self.hidden_dims, self.output_dims]
        hidden = {f"hidden_dims[{number}]": size for number, size in enumerate(self.hidden_dims)}
        check_sizes(self, input_dims=self.input_dims, **hidden, output_dims=self.output_dims)
        default = Config(target_of(self.layer_tpl))
        for field in ("has_bias", "activation_tpl"):
            own = getattr(self.layer_tpl, field)
            if own not in (getattr(default, field), getattr(self, field)):
                raise ValueError(
                    f"{self.path_name}: layer_tpl.{field}={own!r} differs from {field} of the"
                    f" block, which decides for all of its layers; set {field} there"
                )
        templates = []
        for number, (before, after) in enumerate(itertools.pairwise(sizes), start=1):
            template = self.layer_tpl.clone(
                input_dims=before, output_dims=after, has_bias=self.has_bias
            )
            if number < len(sizes) - 1 or self.activate_output:
                template.activation_tpl = self.activation_tpl
            else:
                template.activation_tpl = Identity.HParams.config()
            templates.append(template)
        self.create_children("layers", templates)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """`[..., input_dims]` → `[..., output_dims]`."""
        outputs = inputs
        for layer in self.layers:
            outputs = layer(outputs)
        return outputs


class StackingOverTime(BaseLayer):
    """Lays neighbouring frames side by side, and keeps every `stride`-th of the results.

    Frame t of `[batch, length, dims]` becomes [x[t − left], …, x[t], …, x[t + right]], with
    zeros beyond the ends: `[batch, ⌈length / stride⌉, (left + 1 + right)·dims]`. Speech models
    shorten their inputs so.

    Attributes:
      left: Frames before.
      right: Frames after.
      stride: Of the results that are kept.

    Raises:
      ValueError: a negative context, or a stride below 1.
    """

    left: int = 0
    right: int = 0
    stride: int = 1

    def setup(self) -> None:
        if min(self.left, self.right) < 0:
            raise ValueError(
                f"{self.path_name}: left={self.left} and right={self.right} must be at least 0"
            )
        check_sizes(self, stride=self.stride)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """`[batch, length, dims]` → `[batch, ⌈length / stride⌉, (left + 1 + right)·dims]`."""
        x = self.cast(inputs)
        length = x.shape[1]
        padded = jnp.pad(x, ((0, 0), (self.left, self.right), (0, 0)))
        width = self.left + 1 + self.right
        shifted = [padded[:, offset : offset + length] for offset in range(width)]
        return jnp.concatenate(shifted, axis=-1)[:, :: self.stride]
