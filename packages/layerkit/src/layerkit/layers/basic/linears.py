"""Linear maps of the last axis: `Linear`, `Bias`, and `FeedForward` with an activation.

The logical axes of weights and outputs are fields, since they depend on where a layer is used; see
`layerkit.base.sharding` for the names.
"""

from __future__ import annotations

from typing import ClassVar

import jax

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_last_axis, check_sizes
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.dots import Dot, add_bias, create_dot, matmul
from layerkit.layers.basic.elementwise import BaseActivation, ReLU
from layerkit.layers.basic.normalizations import BaseNormalization, LayerNorm


class Linear(BaseLayer):
    """A linear map x·w without bias: `[..., input_dims]` → `[..., output_dims]`.

    Attributes:
      input_dims: Size of the last axis of the inputs.
      output_dims: Size of the last axis of the outputs.
      weight_axes: Logical axes of the weight `w` `[input_dims, output_dims]`.
      activation_axes: Logical axes of the outputs, one for each of their dimensions; None leaves
        their layout to the compiler.
      weight_init: Initializer of `w`; None inherits `params_init`.
      dot_tpl: `Dot` that multiplies; None for the plain product. See `layerkit.layers.basic.dots`.
    """

    input_dims: int = 0
    output_dims: int = 0
    weight_axes: tuple[str | None, ...] = ("embed", "mlp")
    activation_axes: tuple[str | None, ...] | None = None
    weight_init: WeightInit | None = None
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Create the weight `w`."""
        check_sizes(self, input_dims=self.input_dims, output_dims=self.output_dims)
        shape = (self.input_dims, self.output_dims)
        weight = WeightHParams(shape, axes=self.weight_axes, init=self.weight_init)
        self.create_variable("w", weight, is_factor=True)
        create_dot(self, weight)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[..., input_dims]` to `[..., output_dims]`."""
        check_last_axis(self, inputs, input_dims=self.input_dims)
        outputs = matmul(self, self.cast(inputs), self.theta.w)
        if self.activation_axes is not None:
            outputs = self.constrain(outputs, *self.activation_axes)
        return outputs


class Bias(BaseLayer):
    """A bias x + b: `[..., dims]` → `[..., dims]`; b starts at 0.

    Attributes:
      dims: Size of the last axis.
      axes: Logical axis of the weight `b` `[dims]`.
    """

    dims: int = 0
    axes: tuple[str | None, ...] = ("mlp",)

    def setup(self) -> None:
        """Create the weight `b`."""
        check_sizes(self, dims=self.dims)
        weight = WeightHParams((self.dims,), axes=self.axes, init=WeightInit.Constant(0.0))
        self.create_variable("b", weight)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Add b to `[..., dims]`."""
        # Without this check an axis of size 1 would be broadcast silently.
        check_last_axis(self, inputs, dims=self.dims)
        return add_bias(self.cast(inputs), self.theta.b)


class FeedForward(BaseLayer):
    """A dense layer activation(x·w + b): `[..., input_dims]` → `[..., output_dims]`.

    Attributes:
      input_dims: Size of the last axis of the inputs.
      output_dims: Size of the last axis of the outputs.
      has_bias: True to add b.
      linear_tpl: Linear map. The bias has the last of its `weight_axes`.
      bias_tpl: Bias.
      activation_tpl: Activation.
    """

    used_only_if: ClassVar[Conditions] = {"bias_tpl": "has_bias"}

    input_dims: int = 0
    output_dims: int = 0
    has_bias: bool = True
    linear_tpl: Config[BaseLayer] = sub_config_field(Linear.HParams)
    bias_tpl: Config[BaseLayer] = sub_config_field(Bias.HParams)
    activation_tpl: Config[BaseActivation] = sub_config_field(ReLU.HParams)

    def setup(self) -> None:
        """Create the linear map, the bias and the activation."""
        sizes = {"input_dims": self.input_dims, "output_dims": self.output_dims}
        self.create_child("linear", self.linear_tpl, **sizes)
        if self.has_bias:
            axes = self.linear.weight_axes[-1:]
            self.create_child("bias", self.bias_tpl, dims=self.output_dims, axes=axes)
        self.create_child("activation", self.activation_tpl)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[..., input_dims]` to `[..., output_dims]`."""
        outputs = self.linear(inputs)
        if self.has_bias:
            outputs = self.bias(outputs)
        return self.activation(outputs)


class NormalizedFeedForward(FeedForward):
    """A dense layer norm(activation(x·w + b)), which BERT applies before its softmax.

    The other fields are those of `FeedForward`.

    Attributes:
      norm_tpl: Norm of the outputs.
    """

    norm_tpl: Config[BaseNormalization] = sub_config_field(LayerNorm.HParams)

    def setup(self) -> None:
        """Create the dense layer and the norm."""
        super().setup()
        self.create_child("norm", self.norm_tpl, dims=self.output_dims)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[..., input_dims]` to `[..., output_dims]`."""
        outputs: jax.Array = self.norm(super().fprop(inputs))
        return outputs
