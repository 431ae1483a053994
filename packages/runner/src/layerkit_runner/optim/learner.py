"""Learner: from gradients to new weights.

The optimizer is any Optax transformation, by config. The learner adds what belongs to a training
run rather than to an optimizer: the learning rate that is also reported, gradient clipping, steps
that are skipped, averaged weights, several optimizers, and which weights are trained at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from layerkit.config import Configurable, instance_field
from layerkit_runner.errors import UsageError, check_patterns
from layerkit_runner.optim.optimizer_calls import is_schedule_free
from layerkit_runner.optim.optimizer_groups import (
    MAIN,
    NamedOptimizer,
    OptimizerGroups,
    Stacks,
    map_tensors,
)
from layerkit_runner.optim.schedules import concrete_number
from layerkit_runner.optim.weight_patterns import TrainedWeights


class Update(NamedTuple):
    """Result of one step of a learner.

    Attributes:
      params: New weights, all of them.
      opt_state: New state of the optimizer.
      ema: New averaged weights.
      is_valid: Whether loss and gradient are finite and the norm is within its limit, bool scalar.
        If not, and the learner skips steps, the weights and states are the old ones.
      scalars: Scalars to report.
    """

    params: Any
    opt_state: Any
    ema: Any
    is_valid: jax.Array
    scalars: dict[str, jax.Array]


class AuxiliaryOptimizer(Configurable):
    """An optimizer for some of the weights.

    Attributes:
      name: Name in scalars (`learning/lr_<name>`) and in the optimizer's state.
      weights: Regular expressions, each of which has to match the whole path of at least one
        trained weight. Those of several optimizers must not overlap.
      optimizer: An optimizer; see `Learner.optimizer`.
      learning_rate: A learning rate; see `Learner.learning_rate`.

    Raises:
      UsageError: There is no name, or there are no weights.
      ValueError: Fields contradict each other, or a rate is out of range.
    """

    name: str = ""
    weights: Sequence[str] = ()
    optimizer: Any = instance_field(None)
    learning_rate: Any = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name == MAIN:
            raise UsageError(
                f"AuxiliaryOptimizer.name={self.name!r}: expected a word other than {MAIN!r}, such"
                " as 'embedding'"
            )
        field = f"auxiliary optimizer {self.name}: weights"
        check_patterns(self.weights, label=field)
        if not self.weights:
            raise UsageError(f"{field}={self.weights!r}: expected at least one pattern")
        self.transformation = make_transformation(
            self.optimizer, self.learning_rate, owner=f"AuxiliaryOptimizer {self.name}: "
        )


class Learner(Configurable):
    """Turns gradients into parameter updates.

    Attributes:
      optimizer: A `Partial` of an Optax optimizer that takes `learning_rate`, or the config of any
        `GradientTransformation` (then `learning_rate` must be None, since it has its own).
      learning_rate: A number, or the config of a schedule `step -> rate`.
      auxiliary_optimizers: Configs of `AuxiliaryOptimizer`, optimizers for some weights.
      per_layer: Whether each layer of a repeated stack is a tensor of its own to the optimizers.
        None decides by optimizer: yes for those that work on whole tensors (Adafactor, LAMB, a
        cap on the update's RMS); no for those that work on entries (Adam), where it makes no
        difference; an error for those that look across weights.
      clip_global_norm: Limit c of the gradient norm: gradients are scaled by min(1, c/‖g‖) over
        all weights together.
      clip_per_tensor_norm: Limit of the norm of each weight's gradient by itself, and of each layer
        of a stack. Cannot be combined with `clip_global_norm`.
      skip_nonfinite_gradients: Whether to skip a step whose loss or gradient holds NaN or an
        infinity. A skipped step changes the step number and nothing else in the state.
      skip_step_gradient_norm_value: Largest norm of the gradient, before clipping, with which a
        step is taken; a step with a larger or non-finite norm is skipped. None for no limit.
      ema_decay: Decay d of an exponential moving average of the trained weights, kept in float32.
        The decay at step t is min(d, (1 + t)/(10 + t)). None for no average.
      grad_norm_summary: Whether to report `learning/applied_grad_norm`, the norm of the updates; it
        takes another pass over the weights.
      trainable: Regular expressions of the weights to train, such as `.*/lora_[ab]`; each has to
        match the whole path of at least one weight. None trains all but `frozen`.
      frozen: Regular expressions of weights that keep their values, without gradient, optimizer
        state or decay.

    Raises:
      ValueError: Fields contradict each other, or a limit is out of range.
      UsageError: Patterns or names contradict each other.
    """

    optimizer: Any = instance_field(None)
    learning_rate: Any = None
    auxiliary_optimizers: Sequence[Any] = ()
    per_layer: bool | None = None
    clip_global_norm: float | None = None
    clip_per_tensor_norm: float | None = None
    skip_nonfinite_gradients: bool = True
    skip_step_gradient_norm_value: float | None = None
    ema_decay: float | None = None
    grad_norm_summary: bool = True
    trainable: Sequence[str] | None = None
    frozen: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._check_limits()
        self.transformation = make_transformation(
            self.optimizer, self.learning_rate, owner="Learner."
        )
        self.trained_weights = TrainedWeights(self.trainable, self.frozen)
        names = [auxiliary.name for auxiliary in self.auxiliary_optimizers]
        if len(set(names)) < len(names):
            raise UsageError(f"Learner.auxiliary_optimizers: two have the same name ({names})")
        self._optimizers = (
            NamedOptimizer(MAIN, "Learner.optimizer", self.transformation, self.learning_rate),
            *(
                NamedOptimizer(
                    auxiliary.name,
                    f"auxiliary optimizer {auxiliary.name}",
                    auxiliary.transformation,
                    auxiliary.learning_rate,
                    auxiliary.weights,
                )
                for auxiliary in self.auxiliary_optimizers
            ),
        )
        self._groups = OptimizerGroups(self._optimizers, per_layer=self.per_layer)

    def _check_limits(self) -> None:
        if self.clip_global_norm is not None and self.clip_per_tensor_norm is not None:
            raise ValueError(
                "Learner: set clip_global_norm or clip_per_tensor_norm, not both"
                f" ({self.clip_global_norm} and {self.clip_per_tensor_norm})"
            )
        for field, otherwise in (
            ("clip_global_norm", "clipping"),
            ("clip_per_tensor_norm", "clipping"),
            ("skip_step_gradient_norm_value", "such limit"),
        ):
            limit = getattr(self, field)
            if limit is not None and not limit > 0:
                raise ValueError(
                    f"Learner.{field}={limit} must be positive, or None for no {otherwise}"
                )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(
                f"Learner.ema_decay={self.ema_decay} must be between 0 and 1, such as 0.9999, or"
                " None for no averaged weights"
            )

    @property
    def skips_steps(self) -> bool:
        """True if the learner may skip a step."""
        return self.skip_nonfinite_gradients or self.skip_step_gradient_norm_value is not None

    def init(self, params: Any, *, stacks: Stacks | None = None) -> Any:
        """Return the optimizer's first state, for the trained part of `params`.

        Args:
          params: All weights, nested dicts `[...]`.
          stacks: Sizes of the stacked axes by path; see `optimizer_groups.stacks_of`.

        Raises:
          UsageError: A pattern matches no weight, or no weight is left to train. An optimizer
            cannot be used. `ema_decay` is set for a schedule-free optimizer, which averages itself.
        """
        state = self._groups.init(self.trained_weights.select(params), stacks or {})
        if self.ema_decay is not None and is_schedule_free(state):
            raise UsageError(
                f"Learner.ema_decay={self.ema_decay}: expected None with a schedule-free optimizer,"
                " which averages the weights itself; evaluation uses its averages."
            )
        return state

    def init_ema(self, params: Any) -> Any:
        """Return the first averaged weights: a float32 copy of the trained ones, or `{}`."""
        if self.ema_decay is None:
            return {}
        trained = self.trained_weights.select(params)
        return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), trained)

    def averaged(self, params: Any, ema: Any) -> Any:
        """Return `params` with the averaged weights in place of the trained ones."""
        trained = self.trained_weights.select(params)
        cast = jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), ema, trained)
        return self.trained_weights.merge(params, cast)

    def evaluated(self, params: Any, opt_state: Any, *, stacks: Stacks | None = None) -> Any:
        """Return the weights to evaluate, decode and export with.

        For weights that a schedule-free optimizer trains, these are its averages (Defazio et al.,
        2024, arXiv:2405.15682); the others are those of `params`.

        Args:
          params: All weights.
          opt_state: State of the optimizer; may be `()` if it is not schedule-free.
          stacks: Sizes of the stacked axes, by path.
        """
        if not is_schedule_free(opt_state):
            return params
        trained = self.trained_weights.select(params)
        found = self._groups.evaluated(trained, opt_state, stacks or {})
        return self.trained_weights.merge(params, found)

    def update(
        self,
        grads: Any,
        opt_state: Any,
        params: Any,
        *,
        step: jax.Array,
        loss: jax.Array | None = None,
        ema: Any = None,
        stacks: Stacks | None = None,
    ) -> Update:
        """Compute one update.

        Args:
          grads: Gradients of the global loss, shaped like the trained part of `params`.
          opt_state: State of the optimizer.
          params: Current weights, all of them.
          step: Number of completed steps, int32 scalar, for the reported learning rate and the
            average.
          loss: Global loss, a scalar, for optimizers that need it and to decide whether the step
            is valid; None if it is unknown.
          ema: Averaged weights; None without `ema_decay`.
          stacks: Sizes of the stacked axes, by path.
        """
        stacks = stacks or {}
        norm = global_norm(grads)
        is_valid = self._is_valid(norm, loss)
        scalars = {
            "learning/raw_grad_norm": norm,
            "learning/is_valid_step": is_valid.astype(jnp.float32),
        }
        raw_grads = grads
        grads, clipping = self._clip(grads, norm, stacks)
        trained = self.trained_weights.select(params)
        scalars |= self._rates(opt_state, trained, stacks, step)
        updates, new_state = self._groups.update(
            grads, opt_state, trained, stacks, raw_grads=raw_grads, loss=loss
        )
        new_trained = optax.apply_updates(trained, updates)
        new_ema = self._average(ema, new_trained, step)
        if self.grad_norm_summary:
            scalars["learning/applied_grad_norm"] = global_norm(updates)
        if self.skips_steps:
            new_trained, new_state, new_ema = choose(
                is_valid, (new_trained, new_state, new_ema), (trained, opt_state, ema or {})
            )
            if self.grad_norm_summary:
                applied = jnp.where(is_valid, scalars["learning/applied_grad_norm"], 0.0)
                scalars["learning/applied_grad_norm"] = applied
        return Update(
            params=self.trained_weights.merge(params, new_trained),
            opt_state=new_state,
            ema=new_ema,
            is_valid=is_valid,
            scalars=scalars | clipping,
        )

    def _is_valid(self, norm: jax.Array, loss: jax.Array | None) -> jax.Array:
        """Return whether a step is valid, from values that it computes anyway.

        One gradient entry that is not finite makes the norm non-finite. The loss is checked too,
        because a label outside the vocabulary gives a NaN loss with a finite gradient.
        """
        is_valid = jnp.isfinite(norm)
        if loss is not None:
            is_valid &= jnp.isfinite(loss)
        if self.skip_step_gradient_norm_value is not None:
            is_valid &= norm <= self.skip_step_gradient_norm_value
        return is_valid

    def _clip(self, grads: Any, norm: jax.Array, stacks: Stacks) -> tuple[Any, dict[str, Any]]:
        """Return the clipped gradients and scalars to report."""
        if self.clip_global_norm is not None:
            scale = _scale_to(self.clip_global_norm, norm)
            clipped = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
            return clipped, {
                "learning/grad_scale": scale,
                "learning/clipped_grad_norm": norm * scale,
            }
        if self.clip_per_tensor_norm is not None:
            limit = self.clip_per_tensor_norm

            def clip(grad: jax.Array) -> jax.Array:
                return grad * _scale_to(limit, global_norm(grad)).astype(grad.dtype)

            clipped = map_tensors(clip, grads, stacks)
            return clipped, {"learning/clipped_grad_norm": global_norm(clipped)}
        return grads, {}

    def _average(self, ema: Any, trained: Any, step: jax.Array) -> Any:
        if self.ema_decay is None:
            return {}
        count = step.astype(jnp.float32)
        decay = jnp.minimum(self.ema_decay, (1.0 + count) / (10.0 + count))
        return jax.tree.map(
            lambda mean, leaf: decay * mean + (1.0 - decay) * leaf.astype(jnp.float32),
            ema,
            trained,
        )

    def _rates(
        self, opt_state: Any, trained: Any, stacks: Stacks, step: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the learning rates of this step as scalars to report."""
        counts = {}
        if self.skips_steps:
            # An optimizer's schedule counts the steps that were not skipped.
            counts = self._groups.steps_taken(opt_state, trained, stacks)
        rates = {}
        for optimizer in self._optimizers:
            suffix = "" if optimizer.name == MAIN else f"_{optimizer.name}"
            rate = optimizer.rate(counts.get(optimizer.name, step))
            if rate is not None:
                rates[f"learning/lr{suffix}"] = rate
        return rates


def make_transformation(
    optimizer: Any, learning_rate: Any, *, owner: str
) -> optax.GradientTransformation:
    """Return the Optax transformation of an `optimizer` field and a `learning_rate`.

    Args:
      optimizer: A transformation, or a function of `learning_rate` that returns one.
      learning_rate: A number or schedule; None for a transformation that has its own.
      owner: Owner of the two fields, for messages.

    Raises:
      ValueError: A field is missing, both set the rate, or the rate is out of range.
    """
    if optimizer is None:
        raise ValueError(f"{owner}optimizer is not set; for example Partial(optax.adamw)")
    if isinstance(optimizer, optax.GradientTransformation):
        if learning_rate is not None:
            raise ValueError(
                f"{owner}learning_rate is set, but the optimizer is already complete;"
                " give it as Partial(optimizer) without a rate, or leave learning_rate out"
            )
        return optimizer
    if learning_rate is None:
        raise ValueError(f"{owner}learning_rate is not set, and the optimizer needs one")
    number = concrete_number(learning_rate)
    if number is None:
        is_rate = callable(learning_rate) or isinstance(learning_rate, jax.core.Tracer)
    else:
        is_rate = 0 <= number < math.inf  # nor is NaN
    if not is_rate:
        raise ValueError(
            f"{owner}learning_rate={learning_rate!r} must be a finite number from 0, or a schedule"
        )
    return optimizer(learning_rate=learning_rate)


def global_norm(tree: Any) -> jax.Array:
    """Return √Σ x² over all leaves, in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.float32(0)))


def _scale_to(limit: float, norm: jax.Array) -> jax.Array:
    return jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))


def choose(is_valid: jax.Array, new: Any, old: Any) -> Any:
    """Return `new` where the step is valid and `old` where it is not; both are trees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(is_valid, a, b), new, old)
