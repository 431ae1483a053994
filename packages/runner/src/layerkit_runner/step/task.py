"""SingleTask: one model, its training settings, and the steps as pure functions.

The steps do not depend on a mesh or partitioner; see `layerkit_runner.step.metrics`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.base_layer import (
    AUX_LOSS,
    NON_TRAINABLE,
    OVERWRITE_WITH_GRADIENT,
    PARAMS,
    RANDOM,
    SUMMARIES,
    SUMMARY_ARRAYS,
)
from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.base.sharding import BoundSharding
from layerkit.base.step_reports import (
    AUX_MEANS,
    DEFAULT_VERBOSITY,
    STEP_MAXIMA,
    STEP_TOTALS,
    AuxLoss,
    apply_maxima,
    apply_totals,
    aux_losses,
)
from layerkit.base.weights import unbox
from layerkit.config import Configurable, instance_field
from layerkit.config.checks import check_integers, require
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.evaluation import ROW_MARKS
from layerkit_runner.optim.config_numbers import set_config_numbers
from layerkit_runner.optim.early_stopping import StoppingRule
from layerkit_runner.optim.learner import global_norm
from layerkit_runner.optim.optimizer_groups import Stacks, stacks_of
from layerkit_runner.optim.optimizer_updates import cast_like, choose, is_schedule_free
from layerkit_runner.optim.weight_selection import (
    DecayedWeights,
    Declarations,
    Layout,
    VariationalNoise,
    declarations_of,
    declared,
)
from layerkit_runner.step.gradients import (
    GradientResult,
    LossAggregator,
    Variables,
    compute_gradients,
    multiply_by_hessian,
)
from layerkit_runner.step.layer_summaries import ArraySummaries, array_summaries, scalars_and_marks
from layerkit_runner.step.metrics import LossSum, StepContext
from layerkit_runner.step.task_metrics import example_metrics, named_metrics, step_metrics
from layerkit_runner.step.train_hparams import TrainHParams
from layerkit_runner.step.train_state import TrainState


class InitialWeights(Configurable):
    """Base class of settings that the runner reads itself, such as `InitFrom`."""


# Fields of a batch that are copied to decoded outputs, to tell examples from padding.
_KEPT_FOR_RECORDS = ("prompt_lengths", *ROW_MARKS)


class SingleTask(Configurable):
    """A model and its training settings.

    Attributes:
      name: Name of the task, for outputs.
      model: Network.
      train: Training settings.
      loss_name: Name of the metric that is the loss.
      loss_weights: Factors of the metrics whose sum is the loss, by name. Each metric is a mean, by
        its own weight, over the rows of a step or of a whole evaluation. The sum is reported as
        `loss_name`, with the weight of the first metric. None for the metric `loss_name` itself.
      loss_aggregator: Config of a `LossAggregator`, which gives the loss in place of
        `loss_weights`; None for none. A single metric with the factor 1 becomes `loss_name`.
      vn: Config of a `VariationalNoise`; None for none.
      metrics: Configs of metrics in addition to those of the model, by name; see
        `training.task_metrics`.
      summary_verbosity: Highest verbosity of the layer summaries to report; 0 for none.
      early_stopping: Config of a `StoppingRule`, such as `EarlyStopping`, which may end training
        before its last step; None for none.
      initial_weights: Source of initial weights, a `layerkit_runner.init_from.InitFrom`; None
        initializes all weights randomly.
    """

    name: str = "task"
    model: Annotated[Any, BaseModel] = instance_field(BaseModel)
    train: Annotated[Any, TrainHParams] = instance_field(TrainHParams)
    loss_name: str = "loss"
    loss_weights: Mapping[str, float] | None = None
    loss_aggregator: Annotated[Any, LossAggregator | None] = instance_field(None)
    vn: Annotated[Any, VariationalNoise | None] = instance_field(None)
    metrics: Mapping[str, Any] | None = None
    summary_verbosity: int = DEFAULT_VERBOSITY
    early_stopping: Annotated[Any, StoppingRule | None] = instance_field(None)
    initial_weights: Annotated[Any, InitialWeights | None] = instance_field(None)

    def __post_init__(self) -> None:
        """Check the fields."""
        self._weights: tuple[Stacks, Declarations] | None = None
        learner, fixed = self.train.learner, self.model.frozen_weights
        learner.trained_weights = dataclasses.replace(learner.trained_weights, fixed=fixed)
        check_integers("task", minimum=0, summary_verbosity=self.summary_verbosity)
        if self.loss_aggregator is not None:
            expected = "None, because loss_aggregator is set"
            require(self.loss_weights is None, "task", "loss_weights", self.loss_weights, expected)
            self.loss_weights = dict(self.loss_aggregator.terms())
            if [*self.loss_weights.values()] == [1.0]:
                (self.loss_name,), self.loss_weights = self.loss_weights, None
        self.task_metrics = named_metrics(self.metrics or {})

    def bind_sharding(self, sharding: BoundSharding) -> None:
        """Bind the model to the mesh and rules that lay out its activations."""
        self.model = self.model.clone(sharding=sharding)

    def init_state(self, key: jax.Array, *, weights: Any = None) -> TrainState:
        """Return the state before the first step; `weights` are nested weights `[...]` to use."""
        return self.init_boxed_state(key, weights=weights)[1]

    def init_boxed_state(self, key: jax.Array, *, weights: Any = None) -> tuple[Any, TrainState]:
        """Return (variables in boxes with logical axes, state before the first step)."""
        boxed = self.model.init_boxed(key)
        variables = unbox(boxed)
        params = variables[PARAMS]
        if weights is not None:
            params = self._replace_weights(flatten_dict(params), flatten_dict(weights))
        learner = self.train.learner
        self._weights = stacks_of(boxed[PARAMS]), declarations_of(boxed[PARAMS])
        with self.declared_weights() as stacks:
            opt_state = learner.init(params, stacks=stacks)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            non_trainable=variables.get(NON_TRAINABLE, {}),
            opt_state=opt_state,
            overwrite_with_gradient=variables.get(OVERWRITE_WITH_GRADIENT, {}),
            ema=learner.init_ema(learner.trained_weights.select(params)),
            ema_statistics=learner.init_ema(variables.get(NON_TRAINABLE, {})),
            ema_count=learner.init_ema(jnp.zeros((), jnp.int32)),
            spikes=learner.init_spikes(),
        )
        return dict(boxed), state

    def _replace_weights(self, drawn: dict[Any, Any], weights: dict[Any, Any]) -> Any:
        """Return the nested weights: `weights`, else copies of these, else random ones."""
        copies = {
            path: weights[original]
            for path in drawn
            if (original := self.model.original_of(path)) in weights
        }
        return unflatten_dict({**drawn, **copies, **weights})

    def train_step(
        self, state: TrainState, batch: NestedMap, context: StepContext
    ) -> tuple[TrainState, tuple[dict[str, Any], dict[str, Any]]]:
        """Compute one training step on arrays `[rows, ...]`.

        Returns:
          (new state, (metrics over the global batch, see `training.metrics`; scalars and summaries
            to report)).
        """
        model = self.model.clone(train=True)
        learner, step_key = self.train.learner, self._step_key(state.step)
        learner.trained_weights.require_floats(state.params)

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
                mutable=[AUX_LOSS, AUX_MEANS, STEP_TOTALS, STEP_MAXIMA, SUMMARIES, NON_TRAINABLE],
            )
            return self._add_task_metrics(metrics, outputs, rows), updates

        trained = learner.trained_weights.select(state.params)

        def gradients_at(weights: Any) -> GradientResult:
            return compute_gradients(
                run,
                self._loss_terms,
                Variables(weights, state.overwrite_with_gradient, state.non_trainable),
                batch,
                context.fold_shard(step_key),
                context,
                microbatches=self.train.gradient_accumulation_steps,
                exact_aux=self.train.exact_aux_losses,
            )

        result = gradients_at(trained)
        metrics = context.mean_metrics(result.metrics)
        loss = self._loss(metrics)
        aux = None if result.aux is None else context.batch_sum(result.aux)
        if aux is not None:
            loss = WeightedScalar(loss.value + aux, loss.weight)
        metrics[self.loss_name] = WeightedScalar.of(loss.value, loss.weight)
        maxima = context.batch_max(result.step_maxima) if result.step_maxima else None
        params = state.params
        if self.train.variable_norm_summary:
            # XLA for GPUs copies the new weights if one kernel reads the old ones for this norm and
            # writes the new ones in their place.
            var_norm, params = jax.lax.optimization_barrier((global_norm(trained), params))
        with self.declared_weights(layout=context.optimizer_layout) as stacks:
            update = learner.update(
                context.batch_sum(result.gradients),
                state.opt_state,
                params,
                step=state.step,
                loss=metrics[self.loss_name].value,
                ema=state.ema,
                ema_count=state.ema_count,
                stacks=stacks,
                hvp=lambda tangents: context.batch_sum(
                    multiply_by_hessian(lambda x: gradients_at(x).gradients, trained, tangents)
                ),
                spikes=state.spikes,
                rescale=None if maxima is None else partial(apply_maxima, maxima=maxima),
            )
        scalars = update.scalars | ({} if aux is None else {"aux_loss": aux})
        if maxima is not None:
            scalars["max_logit"] = jax.tree.reduce(jnp.maximum, jax.tree.map(jnp.max, maxima))
        if self.train.variable_norm_summary:
            scalars["learning/var_norm"] = var_norm
        scalars |= scalars_and_marks(result.summaries, context, verbosity=self.summary_verbosity)
        metrics |= step_metrics(self.task_metrics, metrics, scalars)
        statistics = (
            learner.trained_weights.keep_frozen(
                state.non_trainable,
                apply_totals(
                    _shard_mean(result.non_trainable, context),
                    context.batch_sum(result.step_totals),
                ),
            ),
            _next_overwritten(state, result.overwriting, context),
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
            ema_statistics=learner.average_statistics(
                state.ema_statistics,
                statistics[0],
                count=state.ema_count,
                is_valid=update.is_valid,
            ),
            ema_count=update.ema_count,
            spikes=update.spikes,
        )
        return new_state, (metrics, scalars)

    def summary_step(
        self, state: TrainState, batch: NestedMap, context: StepContext
    ) -> ArraySummaries:
        """Return the histograms and images that layers report in the next training step."""
        model, step_key = self.model.clone(train=True), self._step_key(state.step)
        params = state.params
        if self.vn is not None:
            params = self.vn.add(params, step_key, step=state.step)

        def run(rows: Any, key: jax.Array) -> Any:
            _, updates = model.apply(
                {**_variables(state), PARAMS: params},
                rows,
                rngs={RANDOM: key},
                mutable=[AUX_LOSS, NON_TRAINABLE, STEP_MAXIMA, SUMMARY_ARRAYS],
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
    ) -> tuple[Metrics, NestedMap]:
        """Return metrics over one global batch of arrays `[rows, ...]`, and outputs of its rows.

        It draws no random numbers. `averaged` evaluates the averaged weights; None is
        `train.eval_use_ema_states`.
        """
        model = self.model.clone(train=False)
        averaged = self.train.eval_use_ema_states if averaged is None else averaged
        variables = _variables(self.weights_of(state, averaged=averaged))
        mutable = [AUX_LOSS, AUX_MEANS]
        (metrics, outputs), updates = model.apply(variables, batch, mutable=mutable)
        metrics = self._add_task_metrics(metrics, outputs, batch)
        loss = self._loss(metrics, aux_losses(updates))
        metrics = context.mean_metrics({**metrics, self.loss_name: loss})
        return metrics | step_metrics(self.task_metrics, metrics, None), outputs

    def decode_step(
        self, state: TrainState, batch: NestedMap, context: StepContext, *, batch_index: jax.Array
    ) -> NestedMap:
        """Return the outputs of the model's `decode` for each example, and row marks of the batch.

        The marks (`_KEPT_FOR_RECORDS`) let a host that reads the outputs of all rows tell padding.
        `batch_index`, the int32 number of the batch in the data set, is folded into the random key.
        """
        model = self.model.clone(train=False)
        seed = self.train.decode_random_seed
        key = self._step_key(state.step)
        if seed is not None:
            key = jax.random.key(seed, impl=self.train.prng_impl)
        key = jax.random.fold_in(key, batch_index)
        rngs = {RANDOM: context.fold_shard(key)}
        variables = self.decoded_variables(state)
        outputs = model.apply(variables, batch, rngs=rngs, method="decode")
        kept = {name: batch[name] for name in _KEPT_FOR_RECORDS if name in batch}
        return NestedMap({**kept, **outputs})

    def weights_of(self, state: TrainState, *, averaged: bool) -> TrainState:
        """Return a state with the weights to evaluate with, maybe the averaged ones."""
        learner = self.train.learner
        if averaged:
            return state.replace(
                params=learner.averaged(state.params, state.ema),
                non_trainable=cast_like(state.ema_statistics, state.non_trainable),
            )
        if not is_schedule_free(state.opt_state):
            return state
        with self.declared_weights() as stacks:
            params = learner.evaluated(state.params, state.opt_state, stacks=stacks)
        return state.replace(params=params)

    def decoded_variables(self, state: TrainState) -> dict[str, Any]:
        """Return the variables, by collection, that decoding applies the model to."""
        return _variables(self.weights_of(state, averaged=self.train.decode_use_ema_states))

    def first_key(self) -> jax.Array:
        """Return the random key of the weights; the keys of all steps are folded from it."""
        return jax.random.key(self.train.random_seed, impl=self.train.prng_impl)

    def _step_key(self, step: jax.Array) -> jax.Array:
        return jax.random.fold_in(self.first_key(), step)

    def _add_task_metrics(
        self, metrics: Metrics, outputs: NestedMap, batch: NestedMap
    ) -> dict[str, Any]:
        return {**metrics, **example_metrics(self.task_metrics, outputs, batch)}

    def _loss_terms(self, metrics: Mapping[str, Any]) -> Mapping[str, float]:
        terms = self.loss_weights or {self.loss_name: 1.0}
        choices = [name for name in metrics if name not in self.task_metrics]
        for name in terms:
            if name not in choices:
                field = "loss_weights" if self.loss_weights else "loss_name"
                raise ConfigError(field=f"task.{field}", value=name, choices=choices)
        return terms

    def _loss(
        self, metrics: Mapping[str, Any], aux: Sequence[AuxLoss] = ()
    ) -> WeightedScalar | LossSum:
        """Return the loss of metrics and of auxiliary losses, to be reduced over batches."""
        terms = self._loss_terms(metrics)
        if not self.loss_weights and not aux:
            return metrics[self.loss_name]
        scaled = [
            WeightedScalar(factor * metrics[name].value, metrics[name].weight)
            for name, factor in terms.items()
        ]
        return LossSum.of(scaled, aux)

    def set_config_numbers(self, state: TrainState) -> TrainState:
        """Return a restored state with the numbers of the optimizers' configs, or raise an error.

        See `optim.config_numbers`.
        """

        def init() -> Any:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.params)
            return self.train.learner.init(zeros, stacks=stacks)

        with self.declared_weights() as stacks:
            return state.replace(opt_state=set_config_numbers(state.opt_state, init))

    def decayed_weights(self, params: Any) -> tuple[DecayedWeights, ...]:
        """Return which trained weights each optimizer decays; `params` may be shapes."""
        with self.declared_weights() as stacks:
            return self.train.learner.decayed_weights(params, stacks=stacks)

    @contextlib.contextmanager
    def declared_weights(self, *, layout: Layout | None = None) -> Iterator[Stacks]:
        """Bind the declarations of the weights and the layout; yield the stacked axes."""
        if self._weights is None:
            boxed = jax.eval_shape(lambda: self.model.init_boxed(jax.random.key(0)))
            self._weights = stacks_of(boxed[PARAMS]), declarations_of(boxed[PARAMS])
        stacks, declarations = self._weights
        with declared(declarations, layout=layout):
            yield stacks


def _variables(state: TrainState) -> dict[str, Any]:
    return {
        PARAMS: state.params,
        NON_TRAINABLE: state.non_trainable,
        OVERWRITE_WITH_GRADIENT: state.overwrite_with_gradient,
    }


def _next_overwritten(state: TrainState, gradient: Any, context: StepContext) -> Any:
    if not state.overwrite_with_gradient:
        return state.overwrite_with_gradient
    from layerkit.layers.quantization.fp8 import next_state

    return next_state(state.overwrite_with_gradient, context.batch_max(gradient))


def _shard_mean(tree: Any, context: StepContext) -> Any:
    """Return the mean over shards of moving statistics; integers are equal counters."""
    if context.num_shards == 1:
        return tree

    def mean(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        return context.batch_sum(leaf) / context.num_shards

    return jax.tree.map(mean, tree)
