"""Linear projections to and from heads, with separate axes for heads and for the size of a head.

With separate axes, heads are split over devices by a logical axis, and the fans of the initializer
are those of all heads together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.sharding import is_single_cpu
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_last_axis, check_sizes
from layerkit.layers.basic.dots import Dot, add_bias, create_dot, matmul


class HeadProjection(BaseLayer):
    """A projection of `[batch, length, input_dims]` to `[batch, length, num_heads, head_dim]`.

    Attributes:
      input_dims: Size of the model dimension.
      num_heads: Number of heads.
      head_dim: Size of a head.
      use_bias: Adds `b` `[num_heads, head_dim]`, which starts at 0.
      weight_axes: Logical axes of `w` `[input_dims, num_heads, head_dim]`.
      activation_axes: Logical axes of the output.
      dot_tpl: Implementation of the product; None for `jnp.matmul`. See
        `layerkit.layers.basic.dots`.
    """

    input_dims: int = 0
    num_heads: int = 0
    head_dim: int = 0
    use_bias: bool = False
    weight_axes: tuple[str | None, ...] = ("embed", "heads", "head_dim")
    activation_axes: tuple[str | None, ...] = ("batch", "length", "act_heads", "head_dim")
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Check the fields and create the weights."""
        sizes = {"input_dims": self.input_dims, "num_heads": self.num_heads}
        check_sizes(self, **sizes, head_dim=self.head_dim)
        shape = (self.input_dims, self.num_heads, self.head_dim)
        weight = WeightHParams(shape, self.weight_axes, fan_in_dims=(0,), fan_out_dims=(1, 2))
        self.create_variable("w", weight, is_factor=True)
        create_dot(self, weight)
        if self.use_bias:
            bias = WeightHParams(shape[1:], self.weight_axes[1:], init=WeightInit.Constant(0.0))
            self.create_variable("b", bias)

    def fprop(self, x: jax.Array, *, leading: tuple[int, ...] | None = None) -> jax.Array:
        """Project inputs to heads `[batch, length, num_heads, head_dim]`.

        Args:
          x: `[batch, length, input_dims]`, or merged tokens `[tokens, input_dims]`.
          leading: (batch, length) of merged tokens.
        """
        check_last_axis(self, x, input_dims=self.input_dims)
        w = self.theta.w
        heads = matmul(self, self.cast(x), w.reshape(self.input_dims, -1))
        heads = heads.reshape(*(leading or x.shape[:-1]), self.num_heads, self.head_dim)
        if self.use_bias:
            heads = add_bias(heads, self.theta.b)
        return self.constrain(heads, *self.activation_axes)


class OutputProjection(BaseLayer):
    """A projection of `[batch, length, num_heads, head_dim]` to `[batch, length, output_dims]`.

    Attributes:
      output_dims: Size of the model dimension.
      num_heads: Number of heads.
      head_dim: Size of a head.
      use_bias: Adds `b` `[output_dims]`, which starts at 0.
      weight_axes: Logical axes of `w` `[num_heads, head_dim, output_dims]`.
      activation_axes: Logical axes of the output.
      dot_tpl: Implementation of the product; None for `jnp.matmul`. See
        `layerkit.layers.basic.dots`.
    """

    output_dims: int = 0
    num_heads: int = 0
    head_dim: int = 0
    use_bias: bool = False
    weight_axes: tuple[str | None, ...] = ("heads", "head_dim", "embed")
    activation_axes: tuple[str | None, ...] = ("batch", "residual_length", "act_embed")
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Check the fields and create the weights."""
        sizes = {"output_dims": self.output_dims, "num_heads": self.num_heads}
        check_sizes(self, **sizes, head_dim=self.head_dim)
        shape = (self.num_heads, self.head_dim, self.output_dims)
        weight = WeightHParams(
            shape,
            self.weight_axes,
            fan_in_dims=(0, 1),
            fan_out_dims=(2,),
            last_axes=(0, 1),  # Praxis stores [output_dims, num_heads, head_dim].
        )
        self.create_variable("w", weight, is_factor=True)
        create_dot(self, weight)
        if self.use_bias:
            bias = WeightHParams(shape[2:], self.weight_axes[2:], init=WeightInit.Constant(0.0))
            self.create_variable("b", bias)

    def fprop(self, heads: jax.Array) -> jax.Array:
        """Project heads `[batch, length, num_heads, head_dim]` to outputs."""
        heads, w = self.cast(heads), self.theta.w
        if self.dot_tpl is None and not is_single_cpu(self.inherited("sharding")):
            # The backward pass then keeps the heads once, for attention and for this product.
            outputs = jnp.einsum("...hd,hdo->...o", heads, w)
        else:
            merged = heads.reshape(*heads.shape[:-2], -1)
            outputs = matmul(self, merged, w.reshape(-1, self.output_dims))
        if self.use_bias:
            outputs = add_bias(outputs, self.theta.b)
        return self.constrain(outputs, *self.activation_axes)
