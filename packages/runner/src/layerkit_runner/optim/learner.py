"""Learner: computes new weights from gradients with any Optax transformation.

The learner adds what belongs to a training run rather than to an optimizer: a learning rate that is
also reported, gradient clipping, skipped steps, averaged weights, several optimizers, and the
selection of the weights that are trained.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config import Conditions, Configurable, instance_field
from layerkit.config.checks import (
    check_choice,
    check_integers,
    check_positive,
    check_rates,
    check_regexes,
    require,
)
from layerkit.config.hparams import check_fields
from layerkit_runner.optim.optimizer_groups import (
    MAIN,
    NamedOptimizer,
    OptimizerGroups,
    Stacks,
    map_tensors,
)
from layerkit_runner.optim.optimizer_updates import add_update, cast_like, choose, is_schedule_free
from layerkit_runner.optim.spikes import IS_SPIKE, IS_VALID, SpikeWindow
from layerkit_runner.optim.weight_selection import DecayedWeights, TrainedWeights

_ROUNDING_STREAM = 0x7372  # differs from the seeds of the random numbers of a training step
_ACTIONS = (None, "skip", "stop", "rollback")


class Update(NamedTuple):
    """Result of one step of a learner.

    Attributes:
      params: All weights after the step.
      opt_state: State of the optimizers.
      ema: Averaged weights; `{}` without `ema_decay`.
      ema_count: Number of updates in the averages, int32 scalar; `{}` without `ema_decay`.
      is_valid: True if loss and gradient are finite and within their limits, bool scalar. If not,
        and the learner skips steps, the weights and states are the old ones.
      scalars: Scalars to report, by name.
      spikes: Statistics of applied steps, a `SpikeWindow`; `{}` without `on_spike`.
    """

    params: Any
    opt_state: Any
    ema: Any
    ema_count: Any
    is_valid: jax.Array
    scalars: dict[str, jax.Array]
    spikes: Any


class AuxiliaryOptimizer(Configurable):
    """An optimizer for some of the weights.

    Attributes:
      name: Name in scalars (`learning/lr_<name>`) and in the optimizer's state.
      weights: Regular expressions, each of which has to match the whole path of at least one
        trained weight, or a function of the trained weights to a tree of booleans, such as
        `all_but_matrices`. Different optimizers must not select the same weight.
      optimizer: An optimizer; see `Learner.optimizer`.
      learning_rate: A learning rate; see `Learner.learning_rate`.
    """

    name: str = ""
    weights: Annotated[Any, Sequence[str] | Callable[[Any], Any]] = ()
    optimizer: Annotated[Any, optax.GradientTransformation | Callable[..., Any] | None] = (
        instance_field(None)
    )
    learning_rate: Annotated[Any, float | Callable[..., Any] | None] = None

    def __post_init__(self) -> None:
        """Check the fields and make the transformation."""
        is_name = self.name.isidentifier() and self.name != MAIN
        expected = f"an identifier other than {MAIN!r}, such as 'embedding'"
        require(is_name, "AuxiliaryOptimizer", "name", self.name, expected)
        owner = f"AuxiliaryOptimizer {self.name}"
        if not callable(self.weights):
            check_regexes(owner, weights=self.weights)
            require(self.weights, owner, "weights", self.weights, "at least one pattern")
        self.named = NamedOptimizer.from_config(self, self.name, owner, self.weights)


class Learner(Configurable):
    """A rule that computes new weights and optimizer state from gradients.

    Attributes:
      optimizer: A `Partial` of an Optax optimizer that takes `learning_rate`, or the config of any
        `GradientTransformation` (then `learning_rate` must be None, since it has its own).
      learning_rate: A number, or the config of a schedule `step -> rate`.
      auxiliary_optimizers: Configs of `AuxiliaryOptimizer`, optimizers for some weights.
      per_layer: True if each layer of a repeated stack is a tensor of its own to the optimizers.
        None takes what the optimizer declares: True for one that works on whole tensors
        (Adafactor, LAMB, a cap on the update's RMS); False for one that works on entries (Adam),
        where it makes no difference; an error on stacks for one that declares nothing.
      clip_global_norm: Limit c of the gradient norm: gradients are scaled by min(1, c/‖g‖) over
        all weights together.
      clip_per_tensor_norm: Limit of the gradient norm of each single weight, and of each layer of
        a stack. Cannot be combined with `clip_global_norm`.
      clip_per_layer: False if `clip_per_tensor_norm` limits the norm of a whole stack of layers, as
        in Pax.
      on_nonfinite: Action for a step whose loss or gradient holds NaN or an infinity. "skip"
        changes the step number and nothing else in the state. "stop" skips the step and ends the
        run with exit code 65. "rollback" restores the newest checkpoint before the step and leaves
        out the data in between (`train.max_rollbacks`). None applies the step.
      on_spike: The same for a step whose loss or gradient norm is a spike; see `optim.spikes`. With
        `on_nonfinite=None` also for a step that is not finite. None looks for no spikes.
      spike_window: Number of applied steps over which mean and deviation are taken.
      spike_deviations: Number of standard deviations above the mean from which a step is a spike.
      skip_step_gradient_norm_value: Limit of the gradient norm before clipping. A step whose norm
        reaches it or is not finite is skipped. None for no limit.
      stochastic_rounding: True to round updated bfloat16 weights up or down at random, so that
        their expected value is exact. Optimizers then compute in float32 and keep float32 states,
        as they always do for float16 weights. Rounding to the nearest number loses updates below
        about 1/256 of a weight. The same step draws the same random numbers, on any mesh and after
        a restart.
      ema_decay: Decay d of exponential moving averages of the trained weights and of the model's
        moving statistics, kept in float32. The decay after t updates is min(d, (1 + t)/(10 + t));
        skipped steps do not count. None for no averages.
      ema_before_step: True to average the weights before each update, as Pax does: the average
        then lags by one step. False averages the updated weights, as Optax and PyTorch do. Moving
        statistics are always those of the step.
      grad_norm_summary: True to report `learning/applied_grad_norm`, the norm of the change of the
        weights after rounding, which takes another pass over the weights.
      grad_norm_individual_vars: True to report `per_var_grad_norm/PATH`, the norm of the gradient
        of each trained weight before clipping.
      trainable: Regular expressions of the weights to train, such as `.*/lora_[ab]`; each has to
        match the whole path of at least one weight. None trains all but `frozen`.
      frozen: Regular expressions of weights that keep their values, without gradient, optimizer
        state or decay. Moving statistics, such as those of BatchNorm, are frozen by the same
        patterns; with `trainable`, those that no pattern matches.
    """

    optimizer: Annotated[Any, optax.GradientTransformation | Callable[..., Any] | None] = (
        instance_field(None)
    )
    learning_rate: Annotated[Any, float | Callable[..., Any] | None] = None
    auxiliary_optimizers: Annotated[Any, Sequence[AuxiliaryOptimizer]] = ()
    per_layer: bool | None = None
    clip_global_norm: float | None = None
    clip_per_tensor_norm: float | None = None
    clip_per_layer: bool = True
    on_nonfinite: str | None = "skip"
    on_spike: str | None = None
    spike_window: int = 128
    spike_deviations: float = 6.0
    skip_step_gradient_norm_value: float | None = None
    stochastic_rounding: bool = False
    ema_decay: float | None = None
    ema_before_step: bool = False
    grad_norm_summary: bool = True
    grad_norm_individual_vars: bool = False
    trainable: Sequence[str] | None = None
    frozen: Sequence[str] = ()

    used_only_if: ClassVar[Conditions] = {
        "clip_per_layer": "clip_per_tensor_norm",
        "ema_before_step": "ema_decay",
        "spike_window": "on_spike",
        "spike_deviations": "on_spike",
    }

    def __post_init__(self) -> None:
        """Check the fields and combine the optimizers."""
        check_fields(self, owner="Learner")
        check_positive(
            "Learner",
            clip_global_norm=self.clip_global_norm,
            clip_per_tensor_norm=self.clip_per_tensor_norm,
            skip_step_gradient_norm_value=self.skip_step_gradient_norm_value,
            spike_deviations=self.spike_deviations,
        )
        check_choice("Learner", _ACTIONS, on_nonfinite=self.on_nonfinite, on_spike=self.on_spike)
        check_integers("Learner", minimum=4, spike_window=self.spike_window)
        check_rates("Learner", ema_decay=self.ema_decay)
        is_one_clip = self.clip_global_norm is None or self.clip_per_tensor_norm is None
        expected = f"None, because clip_global_norm={self.clip_global_norm} is set"
        require(is_one_clip, "Learner", "clip_per_tensor_norm", self.clip_per_tensor_norm, expected)
        names = [auxiliary.name for auxiliary in self.auxiliary_optimizers]
        expected = "a different name for each"
        require(len({*names}) == len(names), "Learner", "auxiliary_optimizers", names, expected)
        self.trained_weights = TrainedWeights(self.trainable, self.frozen)
        main = NamedOptimizer.from_config(self, MAIN, "Learner.optimizer", None)
        self.transformation = main.transformation
        self._optimizers = (main, *(auxiliary.named for auxiliary in self.auxiliary_optimizers))
        self._groups = OptimizerGroups(self._optimizers, per_layer=self.per_layer)
        self._is_checked = False

    @property
    def skips_steps(self) -> bool:
        """True if the learner may skip a step."""
        limits = (self.on_nonfinite, self.on_spike, self.skip_step_gradient_norm_value)
        return any(limit is not None for limit in limits)

    @property
    def rolls_back(self) -> bool:
        """True if a step may restore an earlier checkpoint."""
        return "rollback" in (self.on_nonfinite, self.on_spike)

    def action(self, *, is_finite: bool, is_spike: bool) -> str | None:
        """Return what the run does after a step that is not valid; see `on_nonfinite`."""
        chosen = self.on_spike if is_spike else None
        if not is_finite:
            chosen = self.on_nonfinite or self.on_spike
        return chosen or ("skip" if self.skips_steps else None)

    def init(self, params: Any, *, stacks: Stacks | None = None) -> Any:
        """Return the initial state of the optimizers for the trained part of `params`.

        Raises:
          ConfigError: A pattern matches no weight, or `ema_decay` is set with a schedule-free
            optimizer.
        """
        trained = self._computed(stored := self.trained_weights.select(params))
        if not self._is_checked:
            self._groups.check(trained, stored=stored)
            self._is_checked = True
        state = self._groups.init(trained, stacks or {})
        is_allowed = self.ema_decay is None or not is_schedule_free(state)
        expected = "None with a schedule-free optimizer, which averages the weights itself"
        require(is_allowed, "Learner", "ema_decay", self.ema_decay, expected)
        return state

    def decayed_weights(
        self, params: Any, *, stacks: Stacks | None = None
    ) -> tuple[DecayedWeights, ...]:
        """Return which of the trained weights each optimizer decays.

        These are the weights whose updates without a gradient depend on them. They are computed at
        a learning rate of 1, where the learner sets it, for weights of one entry, 1 or -1, with the
        names and numbers of axes of `params`, which may be shapes.
        """
        trained = flatten_dict(self.trained_weights.select(params))
        ones = {path: np.ones((1,) * x.ndim, np.float32) for path, x in trained.items()}
        sizes = {path: (1,) * len(stack) for path, stack in (stacks or {}).items()}
        configs = (self.optimizer, *(other.optimizer for other in self.auxiliary_optimizers))
        optimizers = [
            one
            if one.learning_rate is None
            else dataclasses.replace(one, transformation=config(learning_rate=1.0))
            for one, config in zip(self._optimizers, configs, strict=True)
        ]
        groups = OptimizerGroups(optimizers, per_layer=self.per_layer)

        def update_without_gradient(weights: Any) -> Any:
            zeros, state = jax.tree.map(jnp.zeros_like, weights), groups.init(weights, sizes)
            # The rate of an optimizer's own schedule may be 0 at the first step.
            state = jax.tree.map(lambda x: jnp.ones_like(x) if x.dtype == jnp.int32 else x, state)
            loss = jnp.ones((), jnp.float32)
            extra: dict[str, Any] = {
                "raw_grads": zeros,
                "loss": loss,
                "hvp": lambda tangents: tangents,
            }
            return groups.update(zeros, state, weights, sizes, **extra, select=lambda new, _: new)[
                0
            ]

        update = jax.jit(update_without_gradient)
        signs = (ones, {path: -x for path, x in ones.items()})
        plus, minus = (flatten_dict(jax.device_get(update(unflatten_dict(x)))) for x in signs)
        with np.errstate(invalid="ignore"):  # Some updates of a gradient of zero are not finite.
            differences = {path: plus[path] - minus[path] for path in plus}
        changed = {path: np.any(np.isfinite(d) & (d != 0)) for path, d in differences.items()}
        parts = zip(optimizers, groups.assign(trained), strict=True)
        return tuple(
            DecayedWeights(
                optimizer="" if len(optimizers) == 1 else one.name,
                decayed=tuple(path for path in paths if changed[path]),
                spared=tuple(path for path in paths if not changed[path]),
                rate=original.rate,
            )
            for original, (one, paths) in zip(self._optimizers, parts, strict=True)
        )

    def init_ema(self, tree: Any) -> Any:
        """Return the initial averages of trained weights or moving statistics, or `{}`.

        They are copies in float32, except for integers, which are not averaged.
        """

        def copy(leaf: Any) -> jax.Array:
            is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
            return jnp.array(leaf, jnp.float32 if is_float else leaf.dtype, copy=True)

        return {} if self.ema_decay is None else jax.tree.map(copy, tree)

    def init_spikes(self) -> Any:
        """Return the statistics before the first step, or `{}`."""
        return {} if self.on_spike is None else SpikeWindow.empty(self.spike_window)

    def average_statistics(
        self, means: Any, statistics: Any, *, count: Any, is_valid: jax.Array
    ) -> Any:
        """Return the averages of moving statistics after a step.

        Args:
          means: Averages before the step.
          statistics: Moving statistics after the step.
          count: Number of updates in the averages before the step.
          is_valid: Whether the step is valid; see `Update`.
        """
        if self.ema_decay is None:
            return {}
        new = self._average(means, statistics, count)
        return choose(is_valid, new, means) if self.skips_steps else new

    def averaged(self, params: Any, ema: Any) -> Any:
        """Return `params` with the averaged weights in place of the trained ones."""
        trained = self.trained_weights.select(params)
        return self.trained_weights.merge(params, cast_like(ema, trained))

    def evaluated(self, params: Any, opt_state: Any, *, stacks: Stacks | None = None) -> Any:
        """Return the weights of schedule-free optimizers to evaluate, decode and export with."""
        trained = self.trained_weights.select(params)
        means = self._groups.evaluated(self._computed(trained), opt_state, stacks or {})
        return self.trained_weights.merge(params, cast_like(means, trained))

    def update(
        self,
        grads: Any,
        opt_state: Any,
        params: Any,
        *,
        step: jax.Array,
        loss: jax.Array | None = None,
        ema: Any = None,
        ema_count: Any = None,
        stacks: Stacks | None = None,
        hvp: Callable[[Any], Any] | None = None,
        spikes: Any = None,
        rescale: Callable[[Any], Any] | None = None,
    ) -> Update:
        """Compute one update.

        Args:
          grads: Gradients of the global loss, shaped like the trained part of `params`.
          opt_state: State of the optimizer.
          params: All weights.
          step: Number of completed steps, int32 scalar, for the rate and the average.
          loss: Global loss, a scalar, which decides whether the step is valid; None if unknown.
          ema: Averaged weights; None or `{}` if `ema_decay` is None.
          ema_count: Number of updates in the averages, an int32 scalar; None for `step`.
          stacks: Sizes of the stacked axes, by path.
          hvp: Function that multiplies a tree of some of the trained weights by their part of the
            Hessian of the loss, for optimizers such as `sophia`; None if it is unknown.
          spikes: Statistics of applied steps; None or `{}` if `on_spike` is None.
          rescale: Function of the updated weights before they are averaged; None for none.
        """
        stacks = stacks or {}
        norm = global_norm(grads)
        is_finite = jnp.isfinite(norm)
        # A label outside the vocabulary gives a NaN loss, but a finite gradient.
        if loss is not None:
            is_finite &= jnp.isfinite(loss)
        is_valid, scalars = is_finite, {"learning/raw_grad_norm": norm}
        if self.skip_step_gradient_norm_value is not None:
            is_valid &= norm < self.skip_step_gradient_norm_value
        if self.on_spike is not None:
            values = jnp.stack([jnp.asarray(0 if loss is None else loss, jnp.float32), norm])
            is_spike = is_finite & spikes.has_spike(values, deviations=self.spike_deviations)
            is_valid &= ~is_spike
            spikes = spikes.after(values, is_applied=is_valid, is_spike=is_spike)
            scalars[IS_SPIKE] = is_spike.astype(jnp.float32)
        scalars[IS_VALID] = is_valid.astype(jnp.float32)
        if self.grad_norm_individual_vars:
            norms = {path: global_norm(leaf) for path, leaf in flatten_dict(grads).items()}
            scalars |= {f"per_var_grad_norm/{'/'.join(path)}": n for path, n in norms.items()}
        raw_grads = grads = self._computed(grads)
        grads, clipping = self._clip(grads, norm, stacks)
        trained = self.trained_weights.select(params)
        computed = self._computed(trained)
        scalars |= self._rates(opt_state, computed, stacks, step)
        updates, new_state = self._groups.update(
            grads,
            opt_state,
            computed,
            stacks,
            raw_grads=raw_grads,
            loss=loss,
            select=partial(choose, is_valid) if self.skips_steps else lambda new, _: new,
            hvp=hvp,
        )
        new_trained, change = self._add_updates(trained, updates, step)
        if rescale is not None:
            expected = "one without copies of the weights, which qk_clip does not scale"
            is_free = is_schedule_free(opt_state)
            require(not is_free, "Learner", "optimizer", "schedule-free", expected)
            new_trained = rescale(new_trained)
            change = jax.tree.map(lambda a, b: a - b.astype(jnp.float32), new_trained, trained)
        new_ema, new_count = {}, {}
        if self.ema_decay is not None:
            ema_count = step if ema_count is None else ema_count
            weights = trained if self.ema_before_step else new_trained
            new_ema, new_count = self._average(ema, weights, ema_count), ema_count + 1
        if self.grad_norm_summary:
            scalars["learning/applied_grad_norm"] = global_norm(change)
        if self.skips_steps:
            old = (trained, ema or {}, {} if ema_count is None else ema_count)
            new_trained, new_ema, new_count = choose(
                is_valid, (new_trained, new_ema, new_count), old
            )
            if self.grad_norm_summary:
                applied = jnp.where(is_valid, scalars["learning/applied_grad_norm"], 0.0)
                scalars["learning/applied_grad_norm"] = applied
        return Update(
            params=self.trained_weights.merge(params, new_trained),
            opt_state=new_state,
            ema=new_ema,
            ema_count=new_count,
            is_valid=is_valid,
            scalars=scalars | clipping,
            spikes=spikes or {},
        )

    def _computed(self, tree: Any) -> Any:
        """Return weights or gradients in the dtypes in which optimizers compute."""
        # In float16, squares of gradients and Adam's epsilon are 0.
        narrow = (jnp.float16, jnp.bfloat16) if self.stochastic_rounding else (jnp.float16,)
        return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in narrow else x, tree)

    def _add_updates(self, trained: Any, updates: Any, step: jax.Array) -> tuple[Any, Any]:
        """Return (new weights, their change in float32)."""
        key = jax.random.fold_in(jax.random.key(_ROUNDING_STREAM), step)
        flat, sums = flatten_dict(updates), {}
        for path, weight in flatten_dict(trained).items():
            leaf_key = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
            sums[path] = add_update(
                weight, flat[path], key=leaf_key if self.stochastic_rounding else None
            )
        new, change = ({path: pair[i] for path, pair in sums.items()} for i in (0, 1))
        return unflatten_dict(new), unflatten_dict(change)

    def _clip(self, grads: Any, norm: jax.Array, stacks: Stacks) -> tuple[Any, dict[str, Any]]:
        if self.clip_global_norm is not None:
            scale = _scale_to(self.clip_global_norm, norm)
            clipped = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
            norms = {"learning/grad_scale": scale, "learning/clipped_grad_norm": norm * scale}
            return clipped, norms
        if self.clip_per_tensor_norm is not None:
            limit = self.clip_per_tensor_norm

            def clip(grad: jax.Array) -> jax.Array:
                return grad * _scale_to(limit, global_norm(grad)).astype(grad.dtype)

            clipped = map_tensors(clip, grads, stacks if self.clip_per_layer else {})
            return clipped, {"learning/clipped_grad_norm": global_norm(clipped)}
        return grads, {}

    def _average(self, means: Any, values: Any, count: jax.Array) -> Any:
        assert self.ema_decay is not None
        updates = jnp.asarray(count, jnp.float32)
        decay = jnp.minimum(self.ema_decay, (1.0 + updates) / (10.0 + updates))

        def average(mean: jax.Array, value: jax.Array) -> jax.Array:
            if not jnp.issubdtype(value.dtype, jnp.inexact):
                return value
            return decay * mean + (1.0 - decay) * value.astype(jnp.float32)

        return jax.tree.map(average, means, values)

    def _rates(
        self, opt_state: Any, trained: Any, stacks: Stacks, step: jax.Array
    ) -> dict[str, jax.Array]:
        # A schedule counts only the steps that were not skipped, also in the run before a resume.
        counts = self._groups.steps_taken(opt_state, trained, stacks)
        rates = {}
        for optimizer in self._optimizers:
            suffix = "" if optimizer.name == MAIN else f"_{optimizer.name}"
            rate = optimizer.rate(counts.get(optimizer.name, step))
            if rate is not None:
                rates[f"learning/lr{suffix}"] = rate
        return rates


def global_norm(tree: Any) -> jax.Array:
    """Return √Σ x² over all leaves, in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.float32(0)))


def _scale_to(limit: float, norm: jax.Array) -> jax.Array:
    return jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
