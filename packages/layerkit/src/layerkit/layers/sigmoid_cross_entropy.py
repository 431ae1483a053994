"""SigmoidCrossEntropy: losses of labels that do not exclude one another."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_last_axis, check_sizes
from layerkit.layers.losses import weighted_mean
from layerkit.layers.products import matmul
from layerkit.nested_map import NestedMap
from layerkit.weights import WeightHParams, WeightInit


class SigmoidCrossEntropy(BaseLayer):
    """A yes or no for each class, from features: −y·log σ(z) − (1 − y)·log(1 − σ(z)).

    Attributes:
      input_dims: Size of the features.
      num_classes: How many questions there are.
      use_bias: Adds `b` `[num_classes]`.
      initial_probability: Of yes, which the bias starts at: rare classes train steadily when it is
        small (Lin et al., 2017, arXiv:1708.02002); of `use_bias` alone.
      weight_axes: Logical axes of `w` `[input_dims, num_classes]`; the bias takes the last.

    Raises:
      ValueError: a probability that is not between 0 and 1, or without a bias.
    """

    input_dims: int = 0
    num_classes: int = 0
    use_bias: bool = True
    initial_probability: float | None = None
    weight_axes: tuple[str | None, ...] = ("embed", "vocab")

    def setup(self) -> None:
        check_sizes(self, input_dims=self.input_dims, num_classes=self.num_classes)
        probability = self.initial_probability
        if probability is not None and not (self.use_bias and 0.0 < probability < 1.0):
            raise ValueError(
                f"{self.path_name}: initial_probability={probability}, expected a number between 0"
                " and 1, and use_bias=True"
            )
        shape = (self.input_dims, self.num_classes)
        self.create_variable("w", WeightHParams(shape, axes=self.weight_axes))
        if self.use_bias:
            start = 0.5 if probability is None else probability
            logit = WeightInit.Constant(math.log(start) - math.log1p(-start))
            self.create_variable("b", WeightHParams(shape[1:], self.weight_axes[1:], init=logit))

    def logits(self, features: jax.Array) -> jax.Array:
        """`[..., input_dims]` → float32 `[..., num_classes]`."""
        check_last_axis(self, features, input_dims=self.input_dims)
        logits = matmul(self, self.cast(features), self.theta.w).astype(jnp.float32)
        return logits + self.theta.b.astype(jnp.float32) if self.use_bias else logits

    def fprop(self, features: jax.Array, labels: jax.Array, weights: jax.Array) -> NestedMap:
        """Losses of each example and their mean.

        Args:
          features: `[..., input_dims]`.
          labels: `[..., num_classes]`, 0 or 1, or a probability between.
          weights: `[...]`, 0 where an example does not count.

        Returns:
          A NestedMap; losses are in nats, float32:
            loss: Weighted mean of `per_example_loss`; a scalar, 0 without weights.
            total_weight: Sum of the weights; a scalar.
            per_example_loss: Sum over the classes, `[...]`.
            logits: `[..., num_classes]`.
        """
        logits, labels = self.logits(features), labels.astype(jnp.float32)
        yes, no = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
        losses = -jnp.sum(labels * yes + (1.0 - labels) * no, axis=-1)
        return NestedMap(
            loss=weighted_mean(losses, weights),
            total_weight=jnp.sum(weights.astype(jnp.float32)),
            per_example_loss=losses,
            logits=logits,
        )
