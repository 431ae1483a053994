"""SingleTask: one model, how it is trained, and the steps as pure functions.

The steps know neither a mesh nor a partitioner; see `layerkit_runner.step_context`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base_layer import (
    AUX_LOSS,
    NON_TRAINABLE,
    OVERWRITE_WITH_GRADIENT,
    PARAMS,
    RANDOM,
    SUMMARIES,
)
from layerkit.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Configurable, instance_field
from layerkit.layers.quantization.fp8 import accumulate_by_max, next_state
from layerkit.nested_map import NestedMap
from layerkit.sharding import BoundSharding
from layerkit.weights import unbox
from layerkit_runner.errors import UsageError
from layerkit_runner.learner import Learner
from layerkit_runner.step_context import StepContext
from layerkit_runner.train_state import TrainState

_AT_LEAST_ONE = (
    "num_train_steps",
    "summary_interval_steps",
    "eval_interval_steps",
    "decode_interval_steps",
    "save_interval_steps",
    "save_max_to_keep",
    "max_inflight_steps",
)


class TrainHParams(Configurable):
    """How a task is trained.

    Attributes:
      learner: Optimizer, learning rate and clipping.
      num_train_steps: Where training ends.
      random_seed: Of the weights and of all random numbers of the steps.
      summary_interval_steps: How often metrics are written.
      eval_interval_steps: How often held-out data are evaluated; None only at the end.
      eval_at_end: Whether held-out data are evaluated after the last step.
      decode_interval_steps: How often decode data are run; None only at the end.
      save_interval_steps: How often a checkpoint is written.
      save_max_to_keep: Newest checkpoints that are kept; None keeps all.
      save_keep_interval_hours: Besides those, one checkpoint per so many hours stays for good;
        None keeps none besides.
      max_inflight_steps: Steps that may be under way on the device before the host waits.

    Raises:
      ValueError: a number below 1, or no hours between checkpoints to keep.
    """

    learner: Any = instance_field(Learner)
    num_train_steps: int = 10_000_000
    random_seed: int = 1234
    summary_interval_steps: int = 100
    eval_interval_steps: int | None = 100
    eval_at_end: bool = True
    decode_interval_steps: int | None = None
    save_interval_steps: int = 5000
    save_max_to_keep: int | None = 10
    save_keep_interval_hours: float | None = None
    max_inflight_steps: int = 2

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"task.train.{name}={value} must be at least 1")
        hours = self.save_keep_interval_hours
        if hours is not None and not hours > 0:
            raise ValueError(
                f"task.train.save_keep_interval_hours={hours} must be more than 0, or None"
            )


class SingleTask(Configurable):
    """A model and how it is trained.

    Attributes:
      name: Of the task, for outputs.
      model: The network.
      train: How it is trained.
      loss_name: Which metric of the model is the loss.
      initial_weights: Where weights come from before the first step, with a method
        `load(model, like)`; those that it does not return, and with None all, are drawn.
    """

    name: str = "task"
    model: Any = instance_field(BaseModel)
    train: Any = instance_field(TrainHParams)
    loss_name: str = "loss"
    initial_weights: Any = instance_field(None)

    def bind_sharding(self, sharding: BoundSharding) -> None:
        """Sets the mesh and rules by which the model lays out its activations."""
        self.model = self.model.clone(sharding=sharding)

    def init_state(self, key: jax.Array, *, given: Any = None) -> TrainState:
        """The state before the first step.

        Args:
          key: Of the random numbers.
          given: Weights that are not drawn, nested dicts `[...]` by layer path.
        """
        return self.init_boxed_state(key, given=given)[1]

    def init_boxed_state(self, key: jax.Array, *, given: Any = None) -> tuple[Any, TrainState]:
        """(variables in boxes with their logical axes, the state before the first step)."""
        boxed = self.model.init_boxed(key)
        variables = unbox(boxed)
        params = variables[PARAMS]
        if given is not None:
            params = unflatten_dict({**flatten_dict(params), **flatten_dict(given)})
        self.train.learner.trained_weights.refuse(self.model.frozen_weights, params)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            non_trainable=variables.get(NON_TRAINABLE, {}),
            opt_state=self.train.learner.init(params),
            overwrite_with_gradient=variables.get(OVERWRITE_WITH_GRADIENT, {}),
        )
        return dict(boxed), state

    def train_step(
        self, state: TrainState, batch: NestedMap, context: StepContext
    ) -> tuple[TrainState, tuple[Metrics, dict[str, Any]]]:
        """One step of gradient descent.

        Returns:
          (new state, (metrics over the global batch, scalars and summaries to report)).
        """
        model = self.model.clone(train=True)
        key = context.fold_shard(self._step_key(state.step))
        learner, overwritten = self.train.learner, state.overwrite_with_gradient

        def loss_share(trained: Any, overwritten: Any) -> tuple[jax.Array, Any]:
            """This shard's share of the global loss; the shares add up to it."""
            variables = _variables(
                state.replace(
                    params=learner.trained_weights.put(state.params, trained),
                    overwrite_with_gradient=accumulate_by_max(overwritten),
                )
            )
            (metrics, _), updates = model.apply(
                variables,
                batch,
                rngs={RANDOM: key},
                mutable=[AUX_LOSS, SUMMARIES, NON_TRAINABLE],
            )
            loss = self._loss_of(metrics)
            weight = context.batch_sum(jax.lax.stop_gradient(loss.weight))
            value = jnp.where(loss.weight > 0, loss.value, 0.0)
            share = value * loss.weight / jnp.maximum(weight, 1e-30)
            aux = _sum_leaves(updates.get(AUX_LOSS, {})) / context.num_shards
            return share + aux, (metrics, aux, updates)

        (grads, overwriting), (metrics, aux, updates) = jax.grad(
            loss_share, argnums=(0, 1), has_aux=True
        )(learner.trained_weights.take(state.params), overwritten)
        params, opt_state, scalars = learner.update(
            context.batch_sum(grads), state.opt_state, state.params, step=state.step
        )
        metrics = context.mean_metrics(metrics)
        if AUX_LOSS in updates:
            scalars["aux_loss"] = context.batch_sum(aux)
            metrics = self._add_aux(metrics, scalars["aux_loss"])
        scalars |= _flat_summaries(updates.get(SUMMARIES, {}), context)
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            non_trainable=_shard_mean(updates.get(NON_TRAINABLE, state.non_trainable), context),
            opt_state=opt_state,
            overwrite_with_gradient=next_state(overwritten, context.batch_max(overwriting)),
        )
        return new_state, (metrics, scalars)

    def eval_step(self, state: TrainState, batch: NestedMap, context: StepContext) -> Metrics:
        """Metrics over one global batch, nothing changed and nothing random."""
        return self._evaluate(state, batch, context)[0]

    def score_step(
        self, state: TrainState, batch: NestedMap, context: StepContext
    ) -> tuple[Metrics, NestedMap]:
        """`eval_step`, and the `scores` float32 and `provenance` int32 `[batch]` of the rows.

        Raises:
          UsageError: the model gives its examples no scores.
        """
        metrics, outputs = self._evaluate(state, batch, context)
        if "scores" not in outputs:
            raise UsageError(
                f"{type(self.model).__qualname__} gives its examples no scores, which the data set"
                f" wants for its metrics; per example, its compute_loss returns"
                f" {', '.join(sorted(outputs)) or 'nothing'}"
            )
        return metrics, NestedMap(scores=outputs.scores, provenance=batch.provenance)

    def _evaluate(
        self, state: TrainState, batch: NestedMap, context: StepContext
    ) -> tuple[Metrics, NestedMap]:
        model = self.model.clone(train=False)
        (metrics, outputs), updates = model.apply(_variables(state), batch, mutable=[AUX_LOSS])
        metrics = context.mean_metrics(metrics)
        if AUX_LOSS in updates:
            aux = context.batch_sum(_sum_leaves(updates[AUX_LOSS]) / context.num_shards)
            metrics = self._add_aux(metrics, aux)
        return metrics, outputs

    def decode_step(
        self, state: TrainState, batch: NestedMap, context: StepContext, *, batch_index: jax.Array
    ) -> NestedMap:
        """The model's outputs of inference, per example.

        Args:
          state: Whose weights to use.
          batch: Prompts.
          context: How the step is spread.
          batch_index: int32, which batch of the data set this is; each draws its own numbers.

        Returns:
          What the model's `decode` returns, and the `prompt_lengths` and `provenance` of the batch
          where it has them: who reads the outputs of all rows may hold only a share of the batch.
        """
        model = self.model.clone(train=False)
        key = jax.random.fold_in(self._step_key(state.step), batch_index)
        rngs = {RANDOM: context.fold_shard(key)}
        outputs = model.apply(_variables(state), batch, rngs=rngs, method="decode")
        kept = {name: batch[name] for name in ("prompt_lengths", "provenance") if name in batch}
        return NestedMap({**kept, **outputs})

    def _step_key(self, step: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.train.random_seed), step)

    def _loss_of(self, metrics: Metrics) -> WeightedScalar:
        if self.loss_name not in metrics:
            raise ValueError(
                f"task.loss_name={self.loss_name!r} is not a metric of the model;"
                f" it reports {', '.join(metrics)}"
            )
        return metrics[self.loss_name]

    def _add_aux(self, metrics: Metrics, aux: jax.Array) -> Metrics:
        loss = metrics[self.loss_name]
        return {**metrics, self.loss_name: WeightedScalar(loss.value + aux, loss.weight)}


def _variables(state: TrainState) -> dict[str, Any]:
    """What the model is applied to."""
    return {
        PARAMS: state.params,
        NON_TRAINABLE: state.non_trainable,
        OVERWRITE_WITH_GRADIENT: state.overwrite_with_gradient,
    }


def _sum_leaves(tree: Any) -> jax.Array:
    """Adds up auxiliary losses; those of repeated layers come stacked `[layers]`."""
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(tree)), start=jnp.float32(0))


def _shard_mean(tree: Any, context: StepContext) -> Any:
    """Moving statistics that each shard updated from its own rows, made equal on all.

    Integers are counters, which every shard advances alike.
    """
    if context.num_shards == 1:
        return tree

    def mean(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        return context.batch_sum(leaf) / context.num_shards

    return jax.tree.map(mean, tree)


def _flat_summaries(tree: Any, context: StepContext) -> dict[str, jax.Array]:
    """Summaries by path; scalars are averaged over shards, and over repeated layers."""
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = [str(getattr(part, "key", getattr(part, "idx", part))) for part in path]
        name = "/".join(parts[:-1]) + ("" if parts[-1] == "0" else f"_{parts[-1]}")
        flat[f"summaries/{name}"] = context.batch_sum(jnp.mean(leaf) / context.num_shards)
    return flat
