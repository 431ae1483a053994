"""SingleTask: one model, how it is trained, and the steps as pure functions.

The steps know neither a mesh nor a partitioner; see `layerkit_runner.training.metrics`.
"""

from __future__ import annotations

import math
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
    SUMMARY_ARRAYS,
)
from layerkit.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Configurable, instance_field
from layerkit.layers.quantization.fp8 import next_state
from layerkit.nested_map import NestedMap
from layerkit.sharding import BoundSharding
from layerkit.summaries import DEFAULT_VERBOSITY
from layerkit.weights import unbox
from layerkit_runner.errors import UsageError
from layerkit_runner.optim.early_stopping import StoppingRule
from layerkit_runner.optim.learner import choose, global_norm
from layerkit_runner.optim.optimizer_groups import Stacks, stacks_of
from layerkit_runner.optim.schedules import concrete_number
from layerkit_runner.optim.weight_patterns import VariationalNoise
from layerkit_runner.training.gradients import Variables, compute_gradients, sum_leaves
from layerkit_runner.training.layer_summaries import (
    ArraySummaries,
    array_summaries,
    scalars_and_marks,
)
from layerkit_runner.training.metrics import StepContext
from layerkit_runner.training.task_metrics import named_metrics, of_examples, of_step
from layerkit_runner.training.train_hparams import TrainHParams
from layerkit_runner.training.train_state import TrainState

# Fields of a batch that say which rows of decoded outputs are examples.
_KEPT_FOR_RECORDS = ("prompt_lengths", "provenance", "eval_sample_weights")


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
      metrics: Configs of metrics besides those of the model, by name; see `steps.task_metrics`.
      summary_verbosity: Up to which verbosity summaries of layers are reported; 0 for none.
      early_stopping: Config of a `StoppingRule`, such as `EarlyStopping`, which may end training
        before its last step; None for none.
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
    metrics: Mapping[str, Any] | None = None
    summary_verbosity: int = DEFAULT_VERBOSITY
    early_stopping: Any = instance_field(None)
    initial_weights: Any = instance_field(None)

    def __post_init__(self) -> None:
        self._stacks: Stacks | None = None
        if self.loss_weights is not None:
            _check_loss_weights(self.loss_weights)
        if not self.summary_verbosity >= 0:
            raise ValueError(f"task.summary_verbosity={self.summary_verbosity} must be at least 0")
        self.own_metrics = named_metrics(self.metrics or {})
        if not isinstance(self.vn, (VariationalNoise, type(None))):
            raise UsageError(f"task.vn={self.vn!r} must be a VariationalNoise, or None for none")
        if not isinstance(self.early_stopping, (StoppingRule, type(None))):
            raise UsageError(
                f"task.early_stopping={self.early_stopping!r} must be a StoppingRule, such as"
                " EarlyStopping, or None"
            )

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
            params = self._with_given(flatten_dict(params), flatten_dict(given))
        learner = self.train.learner
        learner.trained_weights.validate_frozen(self.model.frozen_weights, params)
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

    def _with_given(self, drawn: dict[Any, Any], given: dict[Any, Any]) -> Any:
        """Return the nested weights: given ones, else copies of given ones, else drawn ones."""
        copies = {
            path: given[original]
            for path in drawn
            if (original := self.model.original_of(path)) in given
        }
        return unflatten_dict({**drawn, **copies, **given})

    def train_step(
        self, state: TrainState, batch: NestedMap, context: StepContext
    ) -> tuple[TrainState, tuple[dict[str, Any], dict[str, Any]]]:
        """One step of gradient descent.

        Returns:
          (new state, (metrics over the global batch, see `steps.metrics`; scalars and summaries to
          report)).
        """
        model = self.model.clone(train=True)
        learner, step_key = self.train.learner, self._step_key(state.step)

        def run(variables: Variables, rows: Any, key: jax.Array) -> tuple[dict[str, Any], Any]:
            params = learner.trained_weights.merge(state.params, variables.trained)
            if self.vn is not None:
                params = self.vn.add(params, step_key, step=state.step)
            (metrics, outputs), updates = model.apply(
                {
                    PARAMS: params,
                    NON_TRAINABLE: variables.non_trainable,
                    OVERWRITE_WITH_GRADIENT: variables.overwritten,
                },
                rows,
                rngs={RANDOM: key},
                mutable=[AUX_LOSS, SUMMARIES, NON_TRAINABLE],
            )
            return self._with_own(metrics, outputs, rows), updates

        trained = learner.trained_weights.select(state.params)
        found = compute_gradients(
            run,
            self._loss_terms,
            Variables(trained, state.overwrite_with_gradient, state.non_trainable),
            batch,
            context.fold_shard(step_key),
            context,
            microbatches=self.train.gradient_accumulation_steps,
        )
        metrics = self._with_loss(context.mean_metrics(found.metrics))
        aux = None if found.aux is None else context.batch_sum(found.aux)
        if aux is not None:
            metrics = self._add_aux(metrics, aux)
        update = learner.update(
            context.batch_sum(found.gradients),
            state.opt_state,
            state.params,
            step=state.step,
            loss=metrics[self.loss_name].value,
            ema=state.ema,
            stacks=self._weight_stacks(),
        )
        scalars = update.scalars | ({} if aux is None else {"aux_loss": aux})
        if self.train.variable_norm_summary:
            scalars["learning/var_norm"] = global_norm(trained)
        scalars |= scalars_and_marks(found.summaries, context, verbosity=self.summary_verbosity)
        metrics |= of_step(self.own_metrics, metrics, scalars)
        statistics = (
            _shard_mean(found.non_trainable, context),
            next_state(state.overwrite_with_gradient, context.batch_max(found.overwriting)),
        )
        if learner.skips_steps:
            old = (state.non_trainable, state.overwrite_with_gradient)
            statistics = choose(update.is_valid, statistics, old)
        new_state = TrainState(
            step=state.step + 1,
            params=update.params,
            non_trainable=statistics[0],
            opt_state=update.opt_state,
            overwrite_with_gradient=statistics[1],
            ema=update.ema,
        )
        return new_state, (metrics, scalars)

    def summary_step(
        self, state: TrainState, batch: NestedMap, context: StepContext
    ) -> ArraySummaries:
        """The histograms and images that layers report of the training step that comes next."""
        model, step_key = self.model.clone(train=True), self._step_key(state.step)
        params = state.params
        if self.vn is not None:
            params = self.vn.add(params, step_key, step=state.step)

        def run(rows: Any, key: jax.Array) -> Any:
            _, updates = model.apply(
                {**_variables(state), PARAMS: params},
                rows,
                rngs={RANDOM: key},
                mutable=[AUX_LOSS, NON_TRAINABLE, SUMMARY_ARRAYS],
            )
            return updates.get(SUMMARY_ARRAYS, {})

        return array_summaries(
            run,
            batch,
            context.fold_shard(step_key),
            context,
            microbatches=self.train.gradient_accumulation_steps,
            verbosity=self.summary_verbosity,
        )

    def eval_step(
        self,
        state: TrainState,
        batch: NestedMap,
        context: StepContext,
        *,
        averaged: bool | None = None,
    ) -> Metrics:
        """Metrics over one global batch, nothing changed and nothing random.

        Args:
          state: Whose weights to use.
          batch: Arrays `[rows, ...]`.
          context: How the step is spread.
          averaged: Whether to use the averaged weights; None for `train.eval_use_ema_states`.
        """
        return self._evaluate(state, batch, context, averaged=averaged)[0]

    def score_step(
        self,
        state: TrainState,
        batch: NestedMap,
        context: StepContext,
        *,
        averaged: bool | None = None,
    ) -> tuple[Metrics, NestedMap]:
        """`eval_step`, and the `scores` float32 and `provenance` int32 `[batch]` of the rows.

        Raises:
          UsageError: the model gives its examples no scores.
        """
        metrics, outputs = self._evaluate(state, batch, context, averaged=averaged)
        if "scores" not in outputs:
            raise UsageError(
                f"{type(self.model).__qualname__} gives its examples no scores, which the data set"
                f" wants for its metrics; per example, its compute_loss returns"
                f" {', '.join(sorted(outputs)) or 'nothing'}"
            )
        return metrics, NestedMap(scores=outputs.scores, provenance=batch.provenance)

    def _evaluate(
        self, state: TrainState, batch: NestedMap, context: StepContext, *, averaged: bool | None
    ) -> tuple[Metrics, NestedMap]:
        model = self.model.clone(train=False)
        averaged = self.train.eval_use_ema_states if averaged is None else averaged
        variables = _variables(self.weights_of(state, averaged=averaged))
        (metrics, outputs), updates = model.apply(variables, batch, mutable=[AUX_LOSS])
        metrics = self._with_own(metrics, outputs, batch)
        metrics = self._with_loss(context.mean_metrics(metrics))
        if AUX_LOSS in updates:
            aux = context.batch_sum(sum_leaves(updates[AUX_LOSS]) / context.num_shards)
            metrics = self._add_aux(metrics, aux)
        return metrics | of_step(self.own_metrics, metrics, None), outputs

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
          What the model's `decode` returns, and the `prompt_lengths`, `provenance` and
          `eval_sample_weights` of the batch where it has them: who reads the outputs of all rows
          may hold only a share of the batch.

        Raises:
          UsageError: the model does not return arrays by name.
        """
        model = self.model.clone(train=False)
        key = jax.random.fold_in(self._step_key(state.step), batch_index)
        rngs = {RANDOM: context.fold_shard(key)}
        variables = _variables(self.decoded_state(state))
        outputs = model.apply(variables, batch, rngs=rngs, method="decode")
        if not isinstance(outputs, Mapping):
            raise UsageError(
                f"{type(model).__qualname__}.decode() returned {type(outputs).__qualname__}."
                " Expected a NestedMap of arrays [batch, …]. Give each output a name."
            )
        kept = {name: batch[name] for name in _KEPT_FOR_RECORDS if name in batch}
        return NestedMap({**kept, **outputs})

    def weights_of(self, state: TrainState, *, averaged: bool) -> TrainState:
        """Return a state with the weights to evaluate with.

        Args:
          state: As training left it; see `TrainState.for_inference`.
          averaged: Whether to use the averaged weights (`learner.ema_decay`).
        """
        learner = self.train.learner
        if averaged:
            return state.replace(params=learner.averaged(state.params, state.ema))
        params = learner.evaluated(state.params, state.opt_state, stacks=self._weight_stacks())
        return state.replace(params=params)

    def decoded_state(self, state: TrainState) -> TrainState:
        """A state with the weights that decoding uses."""
        return self.weights_of(state, averaged=self.train.decode_use_ema_states)

    def first_key(self) -> jax.Array:
        """The key of the weights, from which those of all steps follow."""
        return jax.random.key(self.train.random_seed, impl=self.train.prng_impl)

    def _step_key(self, step: jax.Array) -> jax.Array:
        return jax.random.fold_in(self.first_key(), step)

    def _with_own(self, metrics: Metrics, outputs: NestedMap, batch: NestedMap) -> dict[str, Any]:
        """The metrics of the model and those that the task makes of some rows."""
        for name in self.own_metrics:
            if name in metrics:
                raise ValueError(
                    f"task.metrics[{name!r}] has the name of a metric of the model; it reports"
                    f" {', '.join(metrics)}"
                )
        return {**metrics, **of_examples(self.own_metrics, outputs, batch)}

    def _loss_terms(self, metrics: Mapping[str, Any]) -> Mapping[str, float]:
        """The metrics of the model that make up the loss, with their factors."""
        metrics = {name: m for name, m in metrics.items() if name not in self.own_metrics}
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

    def _with_loss(self, metrics: dict[str, Any]) -> dict[str, Any]:
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

    def _add_aux(self, metrics: dict[str, Any], aux: jax.Array) -> dict[str, Any]:
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
    for name, factor in weights.items():
        number = concrete_number(factor)
        if number is None or not math.isfinite(number):
            raise ValueError(f"task.loss_weights[{name!r}]={factor!r} must be a finite number")
    if not weights or not any(weights.values()):
        raise ValueError(
            f"task.loss_weights={dict(weights)}: expected a factor other than 0 for one metric at"
            " least, such as {'xent': 1.0}; None trains on task.loss_name alone"
        )


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
