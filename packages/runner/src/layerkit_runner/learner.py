"""Learner: gradients in, updates out.

The optimizer is any Optax transformation, by config. The learner adds what belongs to a training
run rather than to an optimizer: the learning rate that is also reported, gradient clipping, and
which weights are trained at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from layerkit.config import Configurable, instance_field
from layerkit_runner.trained_weights import TrainedWeights

Schedule = Callable[[jax.Array], jax.Array]


class Learner(Configurable):
    """Turns gradients into parameter updates.

    Attributes:
      optimizer: A `Partial` of an Optax optimizer that takes `learning_rate`, or the config of any
        `GradientTransformation` (then `learning_rate` must be None, since it has its own).
      learning_rate: A number, or the config of a schedule `step -> rate`.
      clip_global_norm: Gradients are scaled by min(1, c/‖g‖) over all weights together.
      clip_per_tensor_norm: The same for each weight on its own; not together with the other.
      trainable: Regular expressions of the weights that are trained, such as `.*/lora_[ab]`; each
        has to match the whole path of one weight at least. None trains all but `frozen`.
      frozen: Those of weights that keep their values, without gradient, optimizer state or decay.

    Raises:
      ValueError: contradictory fields, or a limit that is not positive.
      UsageError: contradictory patterns.
    """

    optimizer: Any = instance_field(None)
    learning_rate: Any = None
    clip_global_norm: float | None = None
    clip_per_tensor_norm: float | None = None
    trainable: Sequence[str] | None = None
    frozen: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.optimizer is None:
            raise ValueError("Learner.optimizer is not set; for example Partial(optax.adamw)")
        if self.clip_global_norm is not None and self.clip_per_tensor_norm is not None:
            raise ValueError(
                "Learner: set clip_global_norm or clip_per_tensor_norm, not both"
                f" ({self.clip_global_norm} and {self.clip_per_tensor_norm})"
            )
        for field in ("clip_global_norm", "clip_per_tensor_norm"):
            limit = getattr(self, field)
            if limit is not None and not limit > 0:
                raise ValueError(
                    f"Learner.{field}={limit} must be positive, or None for no clipping"
                )
        self.transformation = self._make_transformation()
        self.trained_weights = TrainedWeights(self.trainable, self.frozen)

    def _make_transformation(self) -> optax.GradientTransformation:
        if isinstance(self.optimizer, optax.GradientTransformation):
            if self.learning_rate is not None:
                raise ValueError(
                    "Learner.learning_rate is set, but the optimizer is already complete;"
                    " give it as Partial(optimizer) without a rate, or leave learning_rate out"
                )
            return self.optimizer
        if self.learning_rate is None:
            raise ValueError("Learner.learning_rate is not set, and the optimizer needs one")
        return self.optimizer(learning_rate=self.learning_rate)

    def init(self, params: Any) -> Any:
        """The optimizer's first state, for the trained part of `params`.

        Raises:
          UsageError: a pattern matches no weight, or no weight is left to train.
        """
        return self.transformation.init(self.trained_weights.take(params))

    def update(
        self, grads: Any, opt_state: Any, params: Any, *, step: jax.Array
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """One update.

        Args:
          grads: Gradients of the global loss, shaped like the trained part of `params`.
          opt_state: State of the optimizer.
          params: Current weights, all of them.
          step: int32 scalar, for the reported learning rate.

        Returns:
          (new params, new optimizer state, scalars to report).
        """
        norm = global_norm(grads)
        scalars = {"learning/grad_norm": norm}
        if self.clip_global_norm is not None:
            scale = jnp.minimum(1.0, self.clip_global_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
            scalars["learning/grad_scale"] = scale
        if self.clip_per_tensor_norm is not None:
            grads = jax.tree.map(self._clip_tensor, grads)
        trained = self.trained_weights.take(params)
        updates, opt_state = self.transformation.update(grads, opt_state, trained)
        new_params = self.trained_weights.put(params, optax.apply_updates(trained, updates))
        if callable(self.learning_rate):
            scalars["learning/lr"] = jnp.asarray(self.learning_rate(step), jnp.float32)
        elif self.learning_rate is not None:
            scalars["learning/lr"] = jnp.float32(self.learning_rate)
        return new_params, opt_state, scalars

    def _clip_tensor(self, grad: jax.Array) -> jax.Array:
        assert self.clip_per_tensor_norm is not None
        norm = global_norm(grad)
        scale = jnp.minimum(1.0, self.clip_per_tensor_norm / jnp.maximum(norm, 1e-30))
        return grad * scale.astype(grad.dtype)


def global_norm(tree: Any) -> jax.Array:
    """√Σ x² over all leaves, in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.float32(0)))
