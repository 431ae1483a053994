"""SigmoidCrossEntropy: losses of multi-label classification."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config.checks import check_last_axis, check_same_shape, check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.dots import matmul
from layerkit.ops.losses.softmax import weighted_mean


class SigmoidCrossEntropy(BaseLayer):
    """A binary classifier for each class: the loss −y·log σ(z) − (1 − y)·log(1 − σ(z)).

    Attributes:
      input_dims: Size of the features.
      num_classes: Number of classes.
      use_bias: True to add `b` `[num_classes]`.
      initial_probability: Initial σ(b), which requires `use_bias`; None for 0.5. A small value
        stabilises the training of rare classes (Lin et al., 2017, arXiv:1708.02002).
      weight_axes: Logical axes of `w` `[input_dims, num_classes]`; the bias has the last.

    Raises:
      ConfigError: The probability is not between 0 and 1, or there is no bias.
    """

    input_dims: int = 0
    num_classes: int = 0
    use_bias: bool = True
    initial_probability: float | None = None
    weight_axes: tuple[str | None, ...] = ("embed", "vocab")

    def setup(self) -> None:
        """Create weight and bias."""
        check_sizes(self, input_dims=self.input_dims, num_classes=self.num_classes)
        probability = self.initial_probability
        is_valid = probability is None or (self.use_bias and 0.0 < probability < 1.0)
        expected = "a number between 0 and 1, with use_bias=True"
        require(is_valid, self, "initial_probability", probability, expected)
        shape = (self.input_dims, self.num_classes)
        self.create_variable("w", WeightHParams(shape, axes=self.weight_axes, decays=True))
        if self.use_bias:
            start = 0.5 if probability is None else probability
            logit = WeightInit.Constant(math.log(start) - math.log1p(-start))
            self.create_variable("b", WeightHParams(shape[1:], self.weight_axes[1:], init=logit))

    def logits(self, features: jax.Array) -> jax.Array:
        """Map `[..., input_dims]` to float32 `[..., num_classes]`."""
        check_last_axis(self, features, input_dims=self.input_dims)
        logits = matmul(self, self.cast(features), self.theta.w).astype(jnp.float32)
        return logits + self.theta.b.astype(jnp.float32) if self.use_bias else logits

    def fprop(self, features: jax.Array, labels: jax.Array, weights: jax.Array) -> NestedMap:
        """Compute the loss of each example and the weighted mean.

        Args:
          features: `[..., input_dims]`.
          labels: `[..., num_classes]`, probabilities in [0, 1].
          weights: `[...]`, at least 0; 0 for examples to ignore.

        Returns:
          A NestedMap; losses are in nats, float32:
            loss: Weighted mean of `per_example_loss`; a scalar, 0 if all weights are 0.
            total_weight: Sum of the weights; a scalar.
            per_example_loss: Sum of the losses of all classes, `[...]`.
            logits: Logits, `[..., num_classes]`.

        Raises:
          ConfigError: The shapes are incompatible.
        """
        logits = self.logits(features)
        check_same_shape(self, logits, labels=labels)
        labels = labels.astype(jnp.float32)
        yes, no = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
        losses = -jnp.sum(labels * yes + (1.0 - labels) * no, axis=-1)
        return NestedMap(
            loss=weighted_mean(losses, weights),
            total_weight=jnp.sum(weights.astype(jnp.float32)),
            per_example_loss=losses,
            logits=logits,
        )
