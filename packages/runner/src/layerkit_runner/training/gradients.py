"""Gradients of a task's loss, computed from a whole batch or accumulated over microbatches.

The functions process the rows of one shard. They return this shard's share of the loss and of its
gradient. The sum of the shares over all shards and microbatches is the loss, or gradient, of the
global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from layerkit.base_layer import AUX_LOSS, NON_TRAINABLE, SUMMARIES
from layerkit.checks import require
from layerkit.config import Configurable
from layerkit_runner.errors import UsageError
from layerkit_runner.training.metrics import Reported, StepContext, reduce_microbatches


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

    loss_keys: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check the names."""
        is_valid = self.loss_keys and len({*self.loss_keys}) == len(self.loss_keys)
        expected = "one or more different names of metrics"
        require(is_valid, "task.loss_aggregator", "loss_keys", self.loss_keys, expected)

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

`layerkit_runner.training.metrics` describes the metrics.
"""

LossTerms = Callable[[Mapping[str, Any]], Mapping[str, float]]
"""Function from metrics to loss factors: `{name of a metric in the loss: its factor}`."""


class GradientResult(NamedTuple):
    """Gradients and other results of the rows of one shard.

    Attributes:
      gradients: Gradient of this shard's share of the loss, shaped like `Variables.trained`.
      overwriting: Gradient with respect to `Variables.overwritten`.
      aux: This shard's share of the sum of auxiliary losses; None if the model has none.
      summaries: Summaries of the layers, with a leading axis `microbatches` if there are several.
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

    With several microbatches, only the activations of one are in memory at a time. Loss and
    gradient are those of the whole batch: each microbatch is weighted by its share of the total
    weight. Auxiliary losses are averaged. The non-trainable variables that one microbatch returns
    are passed to the next. Each microbatch has its own random key.

    Raises:
      UsageError: The rows cannot be divided into that many parts.
    """
    if microbatches == 1:
        return _compute_batch_gradients(run, terms, variables, batch, key, context)
    parts = split_rows(batch, microbatches, multiple=context.row_shards)
    return _accumulate(run, terms, variables, parts, key, context, microbatches)


def split_rows(batch: Any, microbatches: int, *, multiple: int = 1) -> Any:
    """Reshape arrays `[rows, ...]` to `[microbatches, rows / microbatches, ...]`.

    Microbatch i of n has the rows i, i + n, i + 2n, … So each device has rows of every microbatch,
    and no rows move between devices. The rows of a microbatch must be divisible by `multiple`.

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
) -> GradientResult:
    keys = microbatch_keys(key, microbatches)

    def weights(part: tuple[Any, jax.Array]) -> dict[str, jax.Array]:
        metrics, _ = run(variables, *part)
        return {name: metrics[name].weight for name in terms(metrics)}

    # Only the weights of the metrics are used, and they depend on the batch alone. The compiler
    # therefore removes the network from this loop.
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

    `totals` holds the sum of the weights of each loss term over the global batch; None computes it
    from `batch`, which must then be whole. `share` is 1 / microbatches.
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
    """Return the sum of all elements of a tree, such as auxiliary losses stacked `[layers]`."""
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(tree)), start=jnp.float32(0))
