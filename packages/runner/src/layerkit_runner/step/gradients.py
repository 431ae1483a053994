"""Gradients of a task's loss, computed from a whole batch or accumulated over microbatches.

The functions process the rows of one shard. They return this shard's share of the loss and of its
gradient. The sum of the shares over all shards and microbatches is the loss, or gradient, of the
global batch.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.base_layer import NON_TRAINABLE, SUMMARIES
from layerkit.base.step_reports import STEP_MAXIMA, STEP_TOTALS, AuxLoss, aux_losses
from layerkit.config import Configurable
from layerkit.errors import first_names
from layerkit_runner.errors import UsageError
from layerkit_runner.step.metrics import Reported, StepContext, reduce_microbatches

_LOG = logging.getLogger("layerkit.gradients")
_OF_EACH_MICROBATCH = (
    "balance of experts: the mean of the losses of the microbatches; task.train.exact_aux_losses"
    "=True computes that of the whole batch, by one more forward pass"
)
_MOVED_IN_TURN = "moving statistics: each microbatch uses and adds its own: %s"


class LossAggregator(Configurable):
    """A rule that takes one metric of the model as the loss.

    A subclass may override `terms` to take a weighted sum of several metrics.

    Attributes:
      loss_key: Name of the metric.
    """

    loss_key: str = "loss"

    def terms(self) -> Mapping[str, float]:
        """Return the factors of the metrics whose sum is the loss, by name."""
        return {self.loss_key: 1.0}


class MultiLossAggregator(LossAggregator):
    """A rule that takes the sum of several metrics as the loss.

    Each metric is a mean with its own example weights.

    Attributes:
      loss_keys: Names of the metrics.
    """

    loss_keys: Sequence[str]

    def terms(self) -> Mapping[str, float]:
        """Return a factor of 1 for each metric."""
        return dict.fromkeys(self.loss_keys, 1.0)


class Variables(NamedTuple):
    """The variables of a model, in groups that a step treats differently.

    Each group is a tree of nested dicts of arrays `[...]`.

    Attributes:
      overwritten: Variables that are replaced by their gradient, such as the state of FP8 scaling.
    """

    trained: Any
    overwritten: Any
    non_trainable: Any


Run = Callable[[Variables, Any, jax.Array], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Function `(variables, batch, key) -> (metrics, collections that the call has changed)`.

`layerkit_runner.step.metrics` describes the metrics.
"""

LossTerms = Callable[[Mapping[str, Any]], Mapping[str, float]]
"""Function from metrics to loss factors: `{name of a metric in the loss: its factor}`."""


class _Weights(NamedTuple):
    """The weights of the terms of a loss by name, and its auxiliary losses or their totals."""

    terms: Mapping[str, jax.Array]
    aux: Sequence[Any]


class GradientResult(NamedTuple):
    """Gradients and other results of the rows of one shard.

    Attributes:
      gradients: Gradient of this shard's share of the loss, shaped like `Variables.trained`.
      overwriting: Gradient with respect to `Variables.overwritten`.
      aux: This shard's share of the sum of auxiliary losses; None if the model has none.
      step_totals: This shard's totals that move variables; see `layerkit.base.step_reports`.
      step_maxima: This shard's maxima that scale weights.
      summaries: Summaries of the layers, with a leading axis `microbatches` if there are several.
    """

    gradients: Any
    overwriting: Any
    metrics: Mapping[str, Reported]
    aux: jax.Array | None
    step_totals: Any
    step_maxima: Any
    non_trainable: Any
    summaries: Any


def multiply_by_hessian(gradient: Callable[[Any], Any], weights: Any, tangents: Any) -> Any:
    """Return the products of the Hessian of a loss, whose gradient at weights is a function.

    `tangents` has some of the weights, nested dicts; the product has the same paths. It raises
    `UsageError` if a layer has a gradient that has no derivative itself, such as that of a kernel.
    """
    flat, paths = flatten_dict(weights), flatten_dict(tangents)
    directions = {
        path: paths[path].astype(x.dtype) if path in paths else jnp.zeros_like(x)
        for path, x in flat.items()
    }
    try:
        # The Hessian is symmetric, so that this is also its product with the directions.
        (product,) = jax.vjp(gradient, weights)[1](unflatten_dict(directions))
    except (TypeError, ValueError, NotImplementedError, IndexError) as error:
        line = str(error).partition("\n")[0]
        expected = "an optimizer that needs no second derivative of the loss"
        raise UsageError(line, field="task.train.learner.optimizer", expected=expected) from error
    flat = flatten_dict(product)
    return unflatten_dict({path: flat[path] for path in paths})


def compute_gradients(
    run: Run,
    terms: LossTerms,
    variables: Variables,
    batch: Any,
    key: jax.Array,
    context: StepContext,
    *,
    microbatches: int = 1,
    exact_aux: bool = False,
) -> GradientResult:
    """Compute the metrics of a batch and the gradient of its loss.

    With several microbatches, only the activations of one are in memory at a time. Loss and
    gradient are those of the whole batch: each microbatch is weighted by its share of the total
    weight of each mean. Auxiliary losses that are products of means are computed for each
    microbatch and averaged, unless `exact_aux` computes the means in a forward pass of their own.
    The non-trainable variables that one microbatch returns are passed to
    the next. Each microbatch has its own random key.

    Raises:
      UsageError: The rows cannot be divided into that many parts.
    """
    if microbatches == 1:
        return _compute_batch_gradients(run, terms, variables, batch, key, context)
    parts = split_rows(batch, microbatches, multiple=context.row_shards)
    return _accumulate(
        run, terms, variables, parts, key, context, microbatches, exact_aux=exact_aux
    )


def split_rows(batch: Any, microbatches: int, *, multiple: int = 1) -> Any:
    """Reshape arrays `[rows, ...]` to `[microbatches, rows / microbatches, ...]`.

    Microbatch i of n has the rows i, i + n, i + 2n, … So each device has rows of every microbatch,
    and no rows move between devices. The rows of a microbatch must be divisible by `multiple`.

    Raises:
      UsageError: The rows cannot be divided into that many parts.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % (microbatches * multiple):
        devices = f", each split over {multiple} devices" if multiple > 1 else ""
        raise UsageError(
            field="task.train.gradient_accumulation_steps",
            value=microbatches,
            expected=f"a number that divides {rows} rows into equal microbatches{devices}",
        )

    def split(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(rows // microbatches, microbatches, *leaf.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, batch)


def microbatch_keys(key: jax.Array, microbatches: int) -> jax.Array:
    """Return one random key for each microbatch, `[microbatches]`."""
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(microbatches))


def _accumulate(
    run: Run,
    terms: LossTerms,
    variables: Variables,
    parts: Any,
    key: jax.Array,
    context: StepContext,
    microbatches: int,
    *,
    exact_aux: bool,
) -> GradientResult:
    keys = microbatch_keys(key, microbatches)

    def weights(part: tuple[Any, jax.Array]) -> _Weights:
        metrics, updates = run(variables, *part)
        term_weights = {name: metrics[name].weight for name in terms(metrics)}
        losses = aux_losses(updates)
        products = [loss.factors if len(loss.factors) > 1 else () for loss in losses]
        if any(products) and not exact_aux:
            _LOG.info(_OF_EACH_MICROBATCH)
        moved = flatten_dict(updates.get(NON_TRAINABLE, {}), sep="/")
        names = moved.keys() - flatten_dict(updates.get(STEP_TOTALS, {}), sep="/").keys()
        if names:
            _LOG.info(_MOVED_IN_TURN, first_names(sorted(names), limit=2))
        means = products if exact_aux else [()] * len(losses)
        aux = [loss.replace(factors=f).totals() for loss, f in zip(losses, means, strict=True)]
        return _Weights(term_weights, aux)

    # Weights depend on the batch alone. If only they are used, the compiler removes the network
    # from this loop.
    part_weights = jax.lax.map(weights, (parts, keys))
    totals = context.batch_sum(jax.tree.map(lambda total: jnp.sum(total, 0), part_weights))
    totals = _Weights(totals.terms, list(map(AuxLoss.from_totals, totals.aux)))

    def add(carry: GradientResult, part: tuple[Any, jax.Array]) -> tuple[Any, Any]:
        result = _compute_batch_gradients(
            run,
            terms,
            variables._replace(non_trainable=carry.non_trainable),
            *part,
            context,
            totals=totals,
        )
        gradients = jax.tree.map(
            lambda total, leaf: total + leaf.astype(jnp.float32),
            carry.gradients,
            result.gradients,
        )
        carry = carry._replace(
            gradients=gradients,
            overwriting=jax.tree.map(jnp.maximum, carry.overwriting, result.overwriting),
            non_trainable=result.non_trainable,
        )
        reports = result.step_totals, result.step_maxima
        return carry, (result.metrics, result.aux, result.summaries, reports)

    start = GradientResult(
        gradients=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), variables.trained),
        overwriting=jax.tree.map(jnp.zeros_like, variables.overwritten),
        metrics={},
        aux=None,
        step_totals={},
        step_maxima={},
        non_trainable=variables.non_trainable,
        summaries={},
    )
    total, (metrics, aux, summaries, reports) = jax.lax.scan(add, start, (parts, keys))
    return total._replace(
        gradients=jax.tree.map(
            lambda gradient, leaf: gradient.astype(leaf.dtype), total.gradients, variables.trained
        ),
        metrics={name: reduce_microbatches(metric) for name, metric in metrics.items()},
        aux=None if aux is None else jnp.sum(aux),
        step_totals=jax.tree.map(lambda total: jnp.sum(total, 0), reports[0]),
        step_maxima=jax.tree.map(lambda maximum: jnp.max(maximum, 0), reports[1]),
        summaries=summaries,
    )


def _compute_batch_gradients(
    run: Run,
    terms: LossTerms,
    variables: Variables,
    batch: Any,
    key: jax.Array,
    context: StepContext,
    *,
    totals: _Weights | None = None,
) -> GradientResult:
    """Return the result of one batch or microbatch.

    `totals` holds the weights of the global batch; None computes them from `batch`, which must then
    be whole.
    """

    def loss_share(trained: Any, overwritten: Any) -> tuple[jax.Array, Any]:
        """Return (this shard's share of the global loss, (metrics, aux, changed collections))."""
        if overwritten:
            from layerkit.layers.quantization.fp8 import accumulate_by_max

            overwritten = accumulate_by_max(overwritten)
        changed = variables._replace(trained=trained, overwritten=overwritten)
        metrics, updates = run(changed, batch, key)
        loss = jnp.float32(0)
        for name, factor in terms(metrics).items():
            value, weight = metrics[name].value, metrics[name].weight
            if totals is None:
                total = context.batch_sum(jax.lax.stop_gradient(weight))
            else:
                total = totals.terms[name]
            value = jnp.where(weight > 0, value, 0.0)
            loss += factor * value * weight / jnp.maximum(total, 1e-30)
        aux = None
        if losses := aux_losses(updates):
            wholes = [None] * len(losses) if totals is None else totals.aux
            shares = [_aux_shares(*pair, context) for pair in zip(losses, wholes, strict=True)]
            loss += sum(share for share, _ in shares)
            aux = sum(value for _, value in shares)
        return loss, (metrics, aux, updates)

    (gradients, overwriting), (metrics, aux, updates) = jax.grad(
        loss_share, argnums=(0, 1), has_aux=True
    )(variables.trained, variables.overwritten)
    return GradientResult(
        gradients=gradients,
        overwriting=overwriting,
        metrics=metrics,
        aux=aux,
        step_totals=updates.get(STEP_TOTALS, {}),
        step_maxima=updates.get(STEP_MAXIMA, {}),
        non_trainable=updates.get(NON_TRAINABLE, variables.non_trainable),
        summaries=updates.get(SUMMARIES, {}),
    )


def _aux_shares(
    loss: AuxLoss, whole: AuxLoss | None, context: StepContext
) -> tuple[jax.Array, jax.Array]:
    """Return (summand of the loss with the gradient of the share, this shard's share of the loss).

    `whole` has the weight of the global batch, and its means unless those of `loss` over all shards
    are to be used; None if `loss` is that of the global batch.
    """
    part = jax.lax.stop_gradient(loss)
    if context.num_shards > 1:
        part = AuxLoss.from_totals(context.batch_sum(part.totals()))
    whole = part if whole is None else whole
    means = whole if whole.factors else part
    total = jnp.maximum(whole.weight, 1e-30)
    value = jnp.sum(part.weight / total * means.value) / context.num_shards
    # The derivative of a product by one mean is the product of the others.
    *sums, _ = loss.totals()
    summand = jnp.float32(0)
    for index, factor_sum in enumerate(sums):
        others = [factor for i, factor in enumerate(means.factors) if i != index]
        product = functools.reduce(operator.mul, others, jnp.float32(1.0))
        summand += jnp.sum(factor_sum * product / total[..., None])
    return summand, value
