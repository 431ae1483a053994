"""SingleTask: one model, how it is trained, and the steps as pure functions.

The steps know neither a mesh nor a partitioner; see `layerkit_runner.steps.step_context`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from layerkit.layers.quantization.fp8 import next_state
from layerkit.nested_map import NestedMap
from layerkit.sharding import BoundSharding
from layerkit.weights import unbox
from layerkit_runner.errors import UsageError
from layerkit_runner.learning.gradients import Variables, differentiate, sum_leaves
from layerkit_runner.learning.learner import global_norm
from layerkit_runner.learning.stacked_weights import Stacks, stacks_of
from layerkit_runner.steps.step_context import StepContext
from layerkit_runner.steps.train_state import TrainState
from layerkit_runner.train_hparams import TrainHParams


class SingleTask(Configurable):
    """A model and how it is trained.

    Attributes:
      name: Of the task, for outputs.
      model: The network.
      train: How it is trained.
      loss_name: Which metric of the model is the loss.
      loss_weights: The loss as a sum of several metrics, by their factors; it is reported as
        `loss_name`, with the weight of the first of them. None for the one metric.
      vn: Config of a `VariationalNoise`; None for none.
      initial_weights: Where weights come from before the first step: an
        `layerkit_runner.init_from.InitFrom`, or an object with a method `load(model, like)`; those
        that it does not return, and with None all, are drawn.
    """

    name: str = "task"
    model: Any = instance_field(BaseModel)
    train: Any = instance_field(TrainHParams)
    loss_name: str = "loss"
    loss_weights: Mapping[str, float] | None = None
    vn: Any = instance_field(None)
    initial_weights: Any = instance_field(None)

    def __post_init__(self) -> None:
        self._stacks: Stacks | None = None
        if self.loss_weights is not None:
            _check_loss_weights(self.loss_weights)

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
        learner = self.train.learner
        learner.trained_weights.refuse(self.model.frozen_weights, params)
        if self.vn is not None:
            self.vn.check(params)
        self._stacks = stacks_of(boxed[PARAMS])
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            non_trainable=variables.get(NON_TRAINABLE, {}),
            opt_state=learner.init(params, stacks=self._stacks),
            overwrite_with_gradient=variables.get(OVERWRITE_WITH_GRADIENT, {}),
            ema=learner.init_ema(params),
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
        learner, step_key = self.train.learner, self._step_key(state.step)

        def run(variables: Variables, rows: Any, key: jax.Array) -> tuple[Metrics, Any]:
            params = learner.trained_weights.put(state.params, variables.trained)
            if self.vn is not None:
                params = self.vn.add(params, step_key, step=state.step)
            (metrics, _), updates = model.apply(
                {
                    PARAMS: params,
                    NON_TRAINABLE: variables.non_trainable,
                    OVERWRITE_WITH_GRADIENT: variables.overwritten,
                },
                rows,
                rngs={RANDOM: key},
                mutable=[AUX_LOSS, SUMMARIES, NON_TRAINABLE],
            )
            return metrics, updates

        trained = learner.trained_weights.take(state.params)
        found = differentiate(
            run,
            self._loss_terms,
            Variables(trained, state.overwrite_with_gradient, state.non_trainable),
            batch,
            context.fold_shard(step_key),
            context,
            microbatches=self.train.gradient_accumulation_steps,
        )
        update = learner.update(
            context.batch_sum(found.gradients),
            state.opt_state,
            state.params,
            step=state.step,
            ema=state.ema,
            stacks=self._weight_stacks(),
        )
        metrics, scalars = self._with_loss(context.mean_metrics(found.metrics)), update.scalars
        if found.aux is not None:
            scalars["aux_loss"] = context.batch_sum(found.aux)
            metrics = self._add_aux(metrics, scalars["aux_loss"])
        if self.train.variable_norm_summary:
            scalars["learning/var_norm"] = global_norm(trained)
        scalars |= _flat_summaries(found.summaries, context)
        non_trainable = _shard_mean(found.non_trainable, context)
        if learner.skips_steps:
            non_trainable = _finite(non_trainable, state.non_trainable)
        new_state = TrainState(
            step=state.step + 1,
            params=update.params,
            non_trainable=non_trainable,
            opt_state=update.opt_state,
            overwrite_with_gradient=next_state(
                state.overwrite_with_gradient, context.batch_max(found.overwriting)
            ),
            ema=update.ema,
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
        variables = _variables(self.weights_of(state, averaged=self.train.eval_use_ema_states))
        (metrics, outputs), updates = model.apply(variables, batch, mutable=[AUX_LOSS])
        metrics = self._with_loss(context.mean_metrics(metrics))
        if AUX_LOSS in updates:
            aux = context.batch_sum(sum_leaves(updates[AUX_LOSS]) / context.num_shards)
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
        variables = _variables(self.decoded_state(state))
        outputs = model.apply(variables, batch, rngs=rngs, method="decode")
        kept = {name: batch[name] for name in ("prompt_lengths", "provenance") if name in batch}
        return NestedMap({**kept, **outputs})

    def weights_of(self, state: TrainState, *, averaged: bool) -> TrainState:
        """A state whose weights are the averaged ones, or the state as it is."""
        if not averaged:
            return state
        return state.replace(params=self.train.learner.averaged(state.params, state.ema))

    def decoded_state(self, state: TrainState) -> TrainState:
        """A state with the weights that decoding uses."""
        return self.weights_of(state, averaged=self.train.decode_use_ema_states)

    def _step_key(self, step: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.train.random_seed), step)

    def _loss_terms(self, metrics: Metrics) -> Mapping[str, float]:
        """The metrics that make up the loss, with their factors."""
        if self.loss_weights is None:
            terms, field = {self.loss_name: 1.0}, "loss_name"
        else:
            terms, field = dict(self.loss_weights), "loss_weights"
            if self.loss_name in metrics:
                raise ValueError(
                    f"task.loss_name={self.loss_name!r} is to be the sum of"
                    f" {', '.join(terms)}, but the model reports that already; choose another name"
                )
        for name in terms:
            if name not in metrics:
                raise ValueError(
                    f"task.{field}={name!r} is not a metric of the model;"
                    f" it reports {', '.join(metrics)}"
                )
        return terms

    def _with_loss(self, metrics: Metrics) -> Metrics:
        """Metrics of the global batch, and among them the loss."""
        if self.loss_weights is None:
            return metrics
        terms = self._loss_terms(metrics)
        value = sum(factor * metrics[name].value for name, factor in terms.items())
        weight = metrics[next(iter(terms))].weight
        return {**metrics, self.loss_name: WeightedScalar.of(value, weight)}

    def _weight_stacks(self) -> Stacks:
        if self._stacks is None:
            boxed = jax.eval_shape(lambda: self.model.init_boxed(jax.random.key(0)))
            self._stacks = stacks_of(boxed[PARAMS])
        return self._stacks

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


def _check_loss_weights(weights: Mapping[str, float]) -> None:
    if not weights or not any(weights.values()):
        raise ValueError(
            f"task.loss_weights={dict(weights)}: expected a factor other than 0 for one metric at"
            " least, such as {'xent': 1.0}; None trains on task.loss_name alone"
        )


def _finite(new: Any, old: Any) -> Any:
    """Moving statistics: entries that are not finite keep their old value, or would never heal."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(a), a, b) if jnp.issubdtype(a.dtype, jnp.inexact) else a

    return jax.tree.map(choose, new, old)


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
