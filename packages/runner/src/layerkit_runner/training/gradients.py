"""The gradient of a task's loss, from all rows at once or from one microbatch after another.

Everything here sees one shard's rows, as a step does, and shares of a loss: those of all shards and
microbatches add up to the loss of the global batch, and so do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from layerkit.base_layer import AUX_LOSS, NON_TRAINABLE, SUMMARIES
from layerkit.layers.quantization.fp8 import accumulate_by_max
from layerkit_runner.errors import UsageError
from layerkit_runner.training.metrics import Reported, StepContext, reduce_microbatches


class Variables(NamedTuple):
    """What a model is run with, nested dicts of arrays `[...]`.

    Attributes:
      trained: Weights to compute_gradients by.
      overwritten: Variables whose gradient is their next value.
      non_trainable: Variables that a run of the model changes.
    """

    trained: Any
    overwritten: Any
    non_trainable: Any


Run = Callable[[Variables, Any, jax.Array], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""`(variables, batch, key) -> (what it reports, see `steps.metrics`; changed collections)`."""

LossTerms = Callable[[Mapping[str, Any]], Mapping[str, float]]
"""Which metrics make up the loss, and with what factors."""


class GradientResult(NamedTuple):
    """What came of the rows of one shard.

    Attributes:
      gradients: Of this shard's share of the loss, shaped like `Variables.trained`.
      overwriting: Gradients by `Variables.overwritten`.
      metrics: Over this shard's rows.
      aux: This shard's share of the auxiliary losses; None where the model has none.
      non_trainable: Their next values.
      summaries: As the layers reported them, `[microbatches, ...]` where there were several.
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

    With several microbatches the activations of one are alive at a time. Loss and gradient are
    those of the whole batch: each microbatch counts by its weight, whose sum is taken first, and
    auxiliary losses by their number. Non-trainables go from one microbatch to the next; each draws
    random numbers of its own.

    Args:
      run: The model.
      terms: What its loss is.
      variables: What it is run with.
      batch: Arrays `[rows, ...]`.
      key: Of this shard's random numbers.
      context: How the step is spread.
      microbatches: Into how many parts the rows are divided.

    Raises:
      UsageError: the rows cannot be divided so.
    """
    if microbatches == 1:
        return _compute_batch_gradients(run, terms, variables, batch, key, context)
    parts = split_rows(batch, microbatches, multiple=context.row_shards)
    return _accumulate(run, terms, variables, parts, key, context, microbatches)


def split_rows(batch: Any, microbatches: int, *, multiple: int = 1) -> Any:
    """Arrays `[rows, ...]` as `[microbatches, rows / microbatches, ...]`.

    A microbatch takes every n-th row, not a block of rows: then each device, which holds a block
    of the batch, has its part of every microbatch already.

    Args:
      batch: Arrays.
      microbatches: How many.
      multiple: Of which the rows of each have to be.

    Raises:
      UsageError: the rows cannot be divided so.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % (microbatches * multiple):
        over = (
            f" of a multiple of {multiple} rows each (devices share them)" if multiple > 1 else ""
        )
        raise UsageError(
            f"task.train.gradient_accumulation_steps={microbatches}: a batch of {rows} rows cannot"
            f" be divided into {microbatches} equal microbatches{over}; use a batch of a multiple"
            f" of {microbatches * multiple} rows"
        )

    def split(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(rows // microbatches, microbatches, *leaf.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, batch)


def microbatch_keys(key: jax.Array, microbatches: int) -> jax.Array:
    """A key `[microbatches]` for each."""
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
    """What came of microbatches `[microbatches, rows, ...]`, one after another."""
    keys = microbatch_keys(key, microbatches)

    def weights(part: tuple[Any, jax.Array]) -> dict[str, jax.Array]:
        metrics, _ = run(variables, *part)
        return {name: metrics[name].weight for name in terms(metrics)}

    # Weights come from the batch alone, so the compiler leaves nothing of the network in this.
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
    """Compute the gradients of one batch.

    Args:
      totals: Global weights of the loss terms, if the batch is a part of a larger one.
      share: Weight of the batch in the auxiliary loss.
    """

    def loss_share(trained: Any, overwritten: Any) -> tuple[jax.Array, Any]:
        """This shard's share of the global loss; the shares add up to it."""
        given = variables._replace(trained=trained, overwritten=accumulate_by_max(overwritten))
        metrics, updates = run(given, batch, key)
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
    """Adds up auxiliary losses; those of repeated layers come stacked `[layers]`."""
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(tree)), start=jnp.float32(0))
