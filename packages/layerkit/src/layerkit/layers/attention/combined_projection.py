"""The projection of multi-head attention to queries, keys and values by one product."""

from __future__ import annotations

import jax

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_divisible, check_last_axis, check_sizes
from layerkit.layers.basic.dots import Dot, add_bias, create_dot, matmul


class CombinedProjection(BaseLayer):
    """A projection of `[batch, length, input_dims]` to heads of queries, keys and values.

    Attributes:
      input_dims: Size of the model dimension.
      num_heads: Number of query heads.
      num_kv_heads: Number of key and value heads, a divisor of num_heads.
      head_dim: Size of a head.
      use_bias: Adds `b` `[num_kv_heads, group + 2, head_dim]`, which starts at 0.
      weight_axes: Logical axes of `w` `[input_dims, num_kv_heads, group + 2, head_dim]`, where
        group = num_heads / num_kv_heads. The last two heads of a group are key and value. The fans
        of the initializer are those of the whole product, as in torch.nn.MultiheadAttention.
      query_axes: Logical axes of the queries.
      activation_axes: Logical axes of keys and of values.
      dot_tpl: Implementation of the product; None for `jnp.matmul`. See
        `layerkit.layers.basic.dots`.
    """

    input_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    use_bias: bool = False
    weight_axes: tuple[str | None, ...] = ("embed", "kv_heads", None, "head_dim")
    query_axes: tuple[str | None, ...] = ("batch", "length", "act_heads", "head_dim")
    activation_axes: tuple[str | None, ...] = ("batch", "length", "act_kv_heads", "head_dim")
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Check the fields and create the weights."""
        sizes = {"input_dims": self.input_dims, "num_heads": self.num_heads}
        check_sizes(self, **sizes, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        by = ("num_kv_heads", self.num_kv_heads)
        check_divisible(self, by=by, num_heads=self.num_heads)
        in_group = self.num_heads // self.num_kv_heads + 2
        shape = (self.input_dims, self.num_kv_heads, in_group, self.head_dim)
        weight = WeightHParams(
            shape,
            self.weight_axes,
            fan_in_dims=(0,),
            fan_out_dims=(1, 2, 3),
            parts=(-2, (in_group - 2, 1, 1)),
            last_axes=(1, 3),  # Praxis stores [3, input_dims, num_heads, head_dim].
        )
        self.create_variable("w", weight, is_factor=True)
        create_dot(self, weight)
        if self.use_bias:
            bias = WeightHParams(shape[1:], self.weight_axes[1:], init=WeightInit.Constant(0.0))
            self.create_variable("b", bias)

    def fprop(
        self, x: jax.Array, *, leading: tuple[int, ...] | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Project inputs to queries, keys and values.

        Args:
          x: `[batch, length, input_dims]`, or merged tokens `[tokens, input_dims]`.
          leading: (batch, length) of merged tokens.

        Returns:
          (queries `[batch, length, num_heads, head_dim]`, keys and values `[batch, length,
          num_kv_heads, head_dim]`).
        """
        check_last_axis(self, x, input_dims=self.input_dims)
        w = self.theta.w
        heads = matmul(self, self.cast(x), w.reshape(self.input_dims, -1))
        heads = heads.reshape(*(leading or x.shape[:-1]), *w.shape[1:])
        if self.use_bias:
            heads = add_bias(heads, self.theta.b)
        query, key, value = split_heads(heads)
        return (
            self.constrain(query, *self.query_axes),
            self.constrain(key, *self.activation_axes),
            self.constrain(value, *self.activation_axes),
        )


def split_heads(combined: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split combined weights, biases or activations.

    Args:
      combined: `[…, num_kv_heads, group + 2, head_dim]`.

    Returns:
      `[…, num_kv_heads · group, head_dim]`, and twice `[…, num_kv_heads, head_dim]`.
    """
    *leading, kv_heads, in_group, head_dim = combined.shape
    num_heads = kv_heads * (in_group - 2)
    query = combined[..., :-2, :].reshape(*leading, num_heads, head_dim)
    return query, combined[..., -2, :], combined[..., -1, :]
