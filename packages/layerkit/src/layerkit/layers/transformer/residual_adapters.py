"""Residual adapters: fine-tuning by small bottleneck layers after attention and feed-forward.

An adapter (Houlsby et al., "Parameter-Efficient Transfer Learning for NLP", 2019) computes

    x + up(activation(down(x)))

where `down` projects to a few dimensions and `up` starts at 0, so the outputs of the model do not
change at first. It follows the last projection of a branch of a Transformer, before the residual is
added. The weights of the model keep their paths: `feed_forward/up/w` stays and
`feed_forward/adapter/down/w` is new.

    layer.feed_forward_tpl = layer.feed_forward_tpl.with_class(AdaptedFeedForward)
    attention.output_tpl = attention.output_tpl.with_class(AdaptedOutputProjection)

Give the learner the pattern `RESIDUAL_ADAPTER_WEIGHTS` to train the adapters alone. For low-rank
adapters of the weights see `layerkit.layers.quantization.lora`. `MultitaskResidualAdapter` has one
adapter per task; the calling layer passes the task of each example.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_integer_arrays, check_last_axis, check_sizes, require
from layerkit.layers.attention.base_attention import OutputProjection
from layerkit.layers.basic.elementwise import GELU, BaseActivation, Identity, ReLU
from layerkit.layers.basic.embeddings import lookup
from layerkit.layers.basic.linears import FeedForward
from layerkit.layers.basic.normalizations import BaseNormalization, LayerNorm
from layerkit.layers.transformer.transformer import TransformerFeedForward

RESIDUAL_ADAPTER_WEIGHTS = ".*/adapter/(down|up)/.*"
"""Regular expression that matches the paths of residual adapters' weights and no others."""


class ResidualAdapter(BaseLayer):
    """A bottleneck x + up(activation(down(x))) of `[..., input_dims]`, at first the identity.

    Attributes:
      input_dims: Size of the last axis.
      bottleneck_dims: Size between the two projections.
      activation_tpl: Activation between the two projections.
    """

    input_dims: int = 0
    bottleneck_dims: int = 64
    activation_tpl: Config[BaseActivation] = sub_config_field(GELU.HParams)

    def setup(self) -> None:
        """Create the two projections."""
        check_sizes(self, input_dims=self.input_dims, bottleneck_dims=self.bottleneck_dims)
        down = FeedForward.HParams.config(
            input_dims=self.input_dims,
            output_dims=self.bottleneck_dims,
            activation_tpl=self.activation_tpl.clone(),
        )
        down.linear_tpl.weight_axes = ("embed", None)
        self.create_child("down", down)
        up = FeedForward.HParams.config(
            input_dims=self.bottleneck_dims, output_dims=self.input_dims
        )
        up.linear_tpl.set(weight_axes=(None, "embed"), weight_init=WeightInit.Constant(0.0))
        up.activation_tpl = Identity.HParams.config()
        self.create_child("up", up)

    def fprop(self, x: jax.Array) -> jax.Array:
        """Map `[..., input_dims]` to the same shape in the compute dtype."""
        check_last_axis(self, x, input_dims=self.input_dims)
        return self.cast(x) + self.up(self.down(x))


class MultitaskResidualAdapter(BaseLayer):
    """Bottlenecks x + up(activation(down(norm(x)))) of `[batch, ..., input_dims]`, one per task.

    The weights have a first axis of tasks, and each example or position uses those of its task. At
    first the outputs equal the inputs, or are zeros if `add_residual` is False.

    Attributes:
      input_dims: Size of the last axis.
      bottleneck_dims: Size between the two projections.
      num_tasks: Number of tasks.
      norm_tpl: Norm before the first projection, which the tasks share; None for no norm.
      activation_tpl: Activation between the two projections.
      add_residual: True to add x to the outputs.
    """

    input_dims: int = 0
    bottleneck_dims: int = 64
    num_tasks: int = 1
    norm_tpl: Config[BaseNormalization] | None = sub_config_field(LayerNorm.HParams)
    activation_tpl: Config[BaseActivation] = sub_config_field(ReLU.HParams)
    add_residual: bool = True

    def setup(self) -> None:
        """Create the weights of all tasks."""
        sizes = {"input_dims": self.input_dims, "bottleneck_dims": self.bottleneck_dims}
        check_sizes(self, **sizes, num_tasks=self.num_tasks)
        if self.norm_tpl is not None:
            self.create_child("norm", self.norm_tpl, dims=self.input_dims)
        self.create_child("activation", self.activation_tpl)
        zeros = WeightInit.Constant(0.0)
        tasks, wide, narrow = self.num_tasks, self.input_dims, self.bottleneck_dims
        matrix: dict[str, Any] = {"fan_in_dims": (1,), "fan_out_dims": (2,), "decays": True}
        down = WeightHParams((tasks, wide, narrow), (None, "embed", None), **matrix)
        up = WeightHParams((tasks, narrow, wide), (None, None, "embed"), init=zeros, **matrix)
        self.create_variable("down_w", down)
        self.create_variable("down_b", WeightHParams((tasks, narrow), (None, None), init=zeros))
        self.create_variable("up_w", up)
        self.create_variable("up_b", WeightHParams((tasks, wide), (None, "embed"), init=zeros))

    def fprop(self, x: jax.Array, tasks: jax.Array) -> jax.Array:
        """Map `[batch, ..., input_dims]` to the same shape in the compute dtype.

        Args:
          x: `[batch, ..., input_dims]`.
          tasks: Task of each example, int32 `[batch]`, or of each position, with the shape of `x`
            without its last axis. The outputs of a task outside [0, num_tasks) are NaN.

        Raises:
          ConfigError: Tasks are not integers, or have the wrong shape.
        """
        check_last_axis(self, x, input_dims=self.input_dims)
        check_integer_arrays(self, tasks=tasks)
        shapes = [list(x.shape[:1]), list(x.shape[:-1])]
        expected = f"{shapes[0]} or {shapes[1]}"
        require(list(tasks.shape) in shapes, self, "shape of tasks", list(tasks.shape), expected)
        x = self.cast(x)
        missing = tuple(range(tasks.ndim, x.ndim - 1))

        def of_task(name: str) -> jax.Array:
            weights = lookup(self.cast(getattr(self.theta, name)), tasks)
            return jnp.expand_dims(weights, missing)

        normalized = x if self.norm_tpl is None else self.norm(x)
        hidden = jnp.einsum("...i,...in->...n", normalized, of_task("down_w")) + of_task("down_b")
        hidden = self.activation(hidden)
        outputs = jnp.einsum("...n,...ni->...i", hidden, of_task("up_w")) + of_task("up_b")
        return x + outputs if self.add_residual else outputs


class AdaptedFeedForward(TransformerFeedForward):
    """A feed-forward block that is followed by an adapter.

    Attributes:
      adapter_tpl: Adapter.
    """

    adapter_tpl: Config[BaseLayer] = sub_config_field(ResidualAdapter.HParams)

    def setup(self) -> None:
        """Create the layer and its adapter."""
        super().setup()
        self.create_child("adapter", self.adapter_tpl, input_dims=self.input_dims)

    def fprop(self, x: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """Map `[batch, length, input_dims]` to the same; `is_token` is bool `[batch, length]`."""
        return self.adapter(super().fprop(x, is_token=is_token))


class AdaptedOutputProjection(OutputProjection):
    """An output projection of attention that is followed by an adapter.

    Attributes:
      adapter_tpl: Adapter.
    """

    adapter_tpl: Config[BaseLayer] = sub_config_field(ResidualAdapter.HParams)

    def setup(self) -> None:
        """Create the layer and its adapter."""
        super().setup()
        self.create_child("adapter", self.adapter_tpl, input_dims=self.output_dims)

    def fprop(self, heads: jax.Array) -> jax.Array:
        """Map `[batch, length, num_heads, head_dim]` to `[batch, length, output_dims]`."""
        return self.adapter(super().fprop(heads))
