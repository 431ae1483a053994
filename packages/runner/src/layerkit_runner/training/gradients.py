"""The gradient of a task's loss, computed from a whole batch or from one microbatch after another.

The functions see the rows of one shard and return shares: the shares of the loss and of its
gradient add up, over all shards and microbatches, to those of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from layerkit.base_layer import AUX_LOSS, NON_TRAINABLE, SUMMARIES
from layerkit_runner.errors import UsageError
from layerkit_runner.training.metrics import Reported, StepContext, reduce_microbatches


class Variables(NamedTuple):
    """The variables of a model, nested dicts of arrays `[...]`.

    Attributes:
      trained: Weights to differentiate with respect to.
      overwritten: Variables whose gradient is their next value.
      non_trainable: Variables that a call of the model changes.
    """

    trained: Any
    overwritten: Any
    non_trainable: Any


Run = Callable[[Variables, Any, jax.Array], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""`(variables, batch, key) -> (metrics, see `training.metrics`; changed collections)`."""

LossTerms = Callable[[Mapping[str, Any]], Mapping[str, float]]
"""Function from metrics to the factors of those that make up the loss, by name."""


class GradientResult(NamedTuple):
    """Gradients and other results of the rows of one shard.

    Attributes:
      gradients: Gradient of this shard's share of the loss, shaped like `Variables.trained`.
      overwriting: Gradient with respect to `Variables.overwritten`.
      metrics: Metrics over this shard's rows.
      aux: Share of this shard in the auxiliary losses; None if the model has none.
      non_trainable: Next values of the non-trainable variables.
      summaries: Summaries of the layers, `[microbatches, ...]` if there are several microbatches.
    """

    gradients: Any
    overwriting: Any
    metrics: Mapping[str, Reported]
    aux: jax.Array | None
    non_trainable: Any
    summaries: Any


def compute_gradients(
    run: Run,
    terms: LossTerms,
    variables: Variables,
    batch: Any,
    key: jax.Array,
    context: StepContext,
    *,
    microbatches: int = 1,
) -> GradientResult:
    """Compute the metrics of a batch and the gradient of its loss.

    With several microbatches, the activations of one exist at a time. Loss and gradient are those
    of the whole batch: each microbatch counts by its weight, and auxiliary losses count by the
    number of microbatches. The non-trainable variables that one microbatch returns are passed to
    the next. Each microbatch has its own random key.

    Args:
      run: Function that runs the model.
      terms: Function that returns the terms of the loss.
      variables: Variables of the model.
      batch: Arrays `[rows, ...]`.
      key: Random key of this shard.
      context: Reductions over the shards of the batch.
      microbatches: Number of parts that the rows are divided into.

    Raises:
      UsageError: The rows cannot be divided into that many parts.
    """
    if microbatches == 1:
        return _compute_batch_gradients(run, terms, variables, batch, key, context)
    parts = split_rows(batch, microbatches, multiple=context.row_shards)
    return _accumulate(run, terms, variables, parts, key, context, microbatches)


def split_rows(batch: Any, microbatches: int, *, multiple: int = 1) -> Any:
    """Return arrays `[rows, ...]` as `[microbatches, rows / microbatches, ...]`.

    A microbatch takes every n-th row, not a block of rows. Each device holds a block of the batch,
    so it already has its part of every microbatch.

    Args:
      batch: Arrays `[rows, ...]`.
      microbatches: Number of microbatches.
      multiple: Required divisor of the rows of each microbatch, such as the number of devices.

    Raises:
      UsageError: The rows cannot be divided into that many parts.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % (microbatches * multiple):
        devices = f", each of which is split over {multiple} devices" if multiple > 1 else ""
        raise UsageError(
            f"a batch of {rows} rows cannot be divided into {microbatches} equal"
            f" microbatches{devices}",
            owner="task.train",
            field="gradient_accumulation_steps",
            value=microbatches,
            hint=f"Use a batch of a multiple of {microbatches * multiple} rows.",
        )

    def split(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(rows // microbatches, microbatches, *leaf.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, batch)


def microbatch_keys(key: jax.Array, microbatches: int) -> jax.Array:
    """Return the random keys of microbatches, `[microbatches]`."""
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(microbatches))


def _accumulate(
    run: Run,
    terms: LossTerms,
    variables: Variables,
    parts: Any,
    key: jax.Array,
    context: StepContext,
    microbatches: int,
) -> GradientResult:
    """Return the result of microbatches `[microbatches, rows, ...]`, computed one by one."""
    keys = microbatch_keys(key, microbatches)

    def weights(part: tuple[Any, jax.Array]) -> dict[str, jax.Array]:
        metrics, _ = run(variables, *part)
        return {name: metrics[name].weight for name in terms(metrics)}

    # The weights depend on the batch only, so the compiler removes the network from this loop.
    totals = context.batch_sum(jax.tree.map(jnp.sum, jax.lax.map(weights, (parts, keys))))

    def add(carry: GradientResult, part: tuple[Any, jax.Array]) -> tuple[Any, Any]:
        found = _compute_batch_gradients(
            run,
            terms,
            variables._replace(non_trainable=carry.non_trainable),
            *part,
            context,
            totals=totals,
            share=1 / microbatches,
        )
        gradients = jax.tree.map(
            lambda total, leaf: total + leaf.astype(jnp.float32),
            carry.gradients,
            found.gradients,
        )
        carry = carry._replace(
            gradients=gradients,
            overwriting=jax.tree.map(jnp.maximum, carry.overwriting, found.overwriting),
            non_trainable=found.non_trainable,
        )
        return carry, (found.metrics, found.aux, found.summaries)

    start = GradientResult(
        gradients=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), variables.trained),
        overwriting=jax.tree.map(jnp.zeros_like, variables.overwritten),
        metrics={},
        aux=None,
        non_trainable=variables.non_trainable,
        summaries={},
    )
    found, (metrics, aux, summaries) = jax.lax.scan(add, start, (parts, keys))
    return found._replace(
        gradients=jax.tree.map(
            lambda total, leaf: total.astype(leaf.dtype), found.gradients, variables.trained
        ),
        metrics={name: reduce_microbatches(metric) for name, metric in metrics.items()},
        aux=None if aux is None else jnp.sum(aux),
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
    totals: Mapping[str, jax.Array] | None = None,
    share: float = 1.0,
) -> GradientResult:
    """Return the result of one batch or microbatch.

    A microbatch needs `totals`, the global weights of the loss terms, and `share`, its weight in
    the auxiliary loss. See `compute_gradients` for the other arguments.
    """

    def loss_share(trained: Any, overwritten: Any) -> tuple[jax.Array, Any]:
        """Return this shard's share of the global loss, and other results."""
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
                total = totals[name]
            value = jnp.where(weight > 0, value, 0.0)
            loss += factor * value * weight / jnp.maximum(total, 1e-30)
        aux = None
        if AUX_LOSS in updates:
            aux = sum_leaves(updates[AUX_LOSS]) * (share / context.num_shards)
            loss += aux
        return loss, (metrics, aux, updates)

    (gradients, overwriting), (metrics, aux, updates) = jax.grad(
        loss_share, argnums=(0, 1), has_aux=True
    )(variables.trained, variables.overwritten)
    return GradientResult(
        gradients=gradients,
        overwriting=overwriting,
        metrics=metrics,
        aux=aux,
        non_trainable=updates.get(NON_TRAINABLE, variables.non_trainable),
        summaries=updates.get(SUMMARIES, {}),
    )


def sum_leaves(tree: Any) -> jax.Array:
    """Return the sum of auxiliary losses; those of repeated layers are stacked `[layers]`."""
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(tree)), start=jnp.float32(0))
