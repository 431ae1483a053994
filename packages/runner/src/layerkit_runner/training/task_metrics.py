"""Metrics that a task adds to those of its model: `task.metrics`, by name.

    task.metrics = {
        "error": Mean.HParams.config(value="outputs/errors"),
        "worst_grad_norm": Max.HParams.config(value="scalars/learning/raw_grad_norm"),
        "scores": Histogram.HParams.config(value="outputs/scores", low=-100.0, high=0.0),
    }

In training they cover all steps since the last summary, in evaluation all batches. `value` names
what they read:

    outputs/…   what the model gives each example, `[rows, ...]` (`compute_loss`, second part)
    batch/…     an entry of the batch, `[rows, ...]`
    metrics/…   a metric of the model over the global batch
    scalars/…   what a training step reports besides, such as `learning/raw_grad_norm` and the
                layers' `summaries/…`; not there in evaluation, where such metrics are left out

So read, they are the same on every mesh and for every number of microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base_model import Metrics, WeightedScalar
from layerkit.config import Configurable
from layerkit.errors import first_names
from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit.summaries import BinCounts
from layerkit_runner.errors import UsageError
from layerkit_runner.training.metrics import Maximum, Reported

PER_EXAMPLE = ("outputs", "batch")
PER_STEP = ("metrics", "scalars")


class TaskMetric(Configurable):
    """Base of the metrics of a task; a subclass defines `reduce`.

    Attributes:
      value: What to read; see the module's docstring.
      weight: A path likewise, below `outputs/` or `batch/`, to the weights of examples or of their
        parts: their shape is that of the values or begins it. None counts every example once and
        rows of padding not at all; it is the only choice for `metrics/` (which have their own
        weight) and `scalars/` (each step counts once).
    """

    value: str
    weight: str | None = None

    def __post_init__(self) -> None:
        root, _, rest = self.value.partition("/")
        if root not in (*PER_EXAMPLE, *PER_STEP) or not rest:
            raise UsageError(
                f"task.metrics: value={self.value!r} must begin with outputs/, batch/, metrics/ or"
                f" scalars/{near_names(root, (*PER_EXAMPLE, *PER_STEP))}"
            )
        if self.weight is not None and not (
            self.is_per_example and self.weight.partition("/")[0] in PER_EXAMPLE
        ):
            raise UsageError(
                f"task.metrics: weight={self.weight!r} of value={self.value!r}: a weight is of"
                " outputs/ or batch/, both of them"
            )

    @property
    def is_per_example(self) -> bool:
        """Whether it reads what there is for each row."""
        return self.value.partition("/")[0] in PER_EXAMPLE

    @property
    def is_of_training(self) -> bool:
        """Whether it reads what only training steps have."""
        return self.value.startswith("scalars/")

    def reduce(self, values: jax.Array, weights: jax.Array) -> Reported:
        """One metric of float32 `values` `[...]`, with non-negative `weights` of that shape."""
        raise NotImplementedError(f"{type(self).__qualname__} must define reduce")


class Mean(TaskMetric):
    """The weighted mean."""

    def reduce(self, values: jax.Array, weights: jax.Array) -> Reported:
        total = jnp.sum(jnp.where(weights > 0, values, 0.0) * weights)
        weight = jnp.sum(weights)
        return WeightedScalar.of(total / jnp.maximum(weight, 1e-30), weight)


class Max(TaskMetric):
    """The largest value that has a weight."""

    def reduce(self, values: jax.Array, weights: jax.Array) -> Reported:
        return Maximum(jnp.max(jnp.where(weights > 0, values, -jnp.inf)))


class Histogram(TaskMetric):
    """How values are spread, for TensorBoard and Weights & Biases; values count by weight.

    Attributes:
      low: Where the first bin begins; it holds lower values too.
      high: Where the last bin ends; it holds higher values too.
      num_bins: How many, all equally wide.
    """

    low: float
    high: float
    num_bins: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise UsageError(
                f"task.metrics: a histogram from low={self.low} to high={self.high}; expected two"
                " numbers, the lower one first"
            )
        if self.num_bins < 1:
            raise UsageError(f"task.metrics: num_bins={self.num_bins} must be at least 1")

    def reduce(self, values: jax.Array, weights: jax.Array) -> Reported:
        width = (self.high - self.low) / self.num_bins
        edges = (*(self.low + i * width for i in range(self.num_bins)), self.high)
        return BinCounts.of(values, edges, weights)


class Composite(Configurable):
    """Several metrics under one name, reported as `NAME/PART`.

    Attributes:
      parts: By the last part of their names.
    """

    parts: Mapping[str, Any]


def named_metrics(metrics: Mapping[str, Any]) -> dict[str, TaskMetric]:
    """All metrics by their whole names, those of composites too.

    Raises:
      UsageError: something else than a metric.
    """
    found: dict[str, TaskMetric] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Composite):
            parts = named_metrics(metric.parts)
            found |= {f"{name}/{part}": value for part, value in parts.items()}
        elif isinstance(metric, TaskMetric):
            found[name] = metric
        else:
            raise UsageError(
                f"task.metrics[{name!r}]={metric!r} must be a TaskMetric, such as Mean, or a"
                " Composite of them"
            )
    return found


def of_examples(
    metrics: Mapping[str, TaskMetric], outputs: NestedMap, batch: NestedMap
) -> dict[str, Reported]:
    """Those that read what there is for each row.

    Args:
      metrics: All, by name.
      outputs: Of the model, `[rows, ...]`.
      batch: What it was given, `[rows, ...]`.

    Raises:
      UsageError: there is nothing where a metric looks, or weights have another shape.
    """
    sources = {"outputs": outputs, "batch": batch}
    found = {}
    for name, metric in metrics.items():
        if metric.is_per_example:
            values = _as_floats(_at(sources, metric.value, owner=name))
            found[name] = metric.reduce(values, _weights(sources, metric, values, owner=name))
    return found


def of_step(
    metrics: Mapping[str, TaskMetric],
    of_model: Metrics,
    scalars: Mapping[str, jax.Array] | None,
) -> dict[str, Reported]:
    """Those that read what a step reports of its global batch.

    Args:
      metrics: All, by name.
      of_model: The model's own, and the loss.
      scalars: What a training step reports besides; None in evaluation.

    Raises:
      UsageError: there is nothing where a metric looks.
    """
    found = {}
    for name, metric in metrics.items():
        if metric.is_per_example or (scalars is None and metric.is_of_training):
            continue
        source = _named(
            scalars if metric.is_of_training and scalars is not None else of_model,
            metric.value,
            owner=name,
        )
        if isinstance(source, WeightedScalar):
            found[name] = metric.reduce(source.value, source.weight)
        else:
            found[name] = metric.reduce(_as_floats(source), jnp.ones(jnp.shape(source)))
    return found


def _weights(
    sources: Mapping[str, NestedMap], metric: TaskMetric, values: jax.Array, *, owner: str
) -> jax.Array:
    """Weights in the shape of the values `[rows, ...]`."""
    batch = sources["batch"]
    if metric.weight is not None:
        weights = _as_floats(_at(sources, metric.weight, owner=owner))
    elif "eval_sample_weights" in batch:
        weights = _as_floats(batch.eval_sample_weights)
    elif "provenance" in batch:
        weights = jnp.asarray(batch.provenance >= 0, jnp.float32)
    else:
        weights = jnp.ones(values.shape[:1], jnp.float32)
    if weights.shape != values.shape[: weights.ndim]:
        raise UsageError(
            f"task.metrics[{owner!r}]: values {list(values.shape)} of {metric.value!r} cannot be"
            f" weighted by {list(weights.shape)}, whose shape does not begin theirs"
        )
    weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    return jnp.broadcast_to(weights, values.shape)


def _at(sources: Mapping[str, NestedMap], path: str, *, owner: str) -> Any:
    """The array at `outputs/…` or `batch/…`."""
    root, _, rest = path.partition("/")
    flat = {name.replace(".", "/"): value for name, value in sources[root].flatten_items()}
    if rest not in flat:
        raise _missing(owner, path, root, flat)
    return flat[rest]


def _named(values: Mapping[str, Any], path: str, *, owner: str) -> Any:
    root, _, name = path.partition("/")
    if name not in values:
        raise _missing(owner, path, root, values)
    return values[name]


def _missing(owner: str, path: str, root: str, there: Mapping[str, Any]) -> UsageError:
    return UsageError(
        f"task.metrics[{owner!r}]: there is no {path!r}"
        f"{near_names(path.partition('/')[2], there, prefix=f'{root}/')} Below {root}/ there are"
        f" {first_names(there) or 'none'}."
    )


def _as_floats(values: Any) -> jax.Array:
    return jax.lax.stop_gradient(jnp.asarray(values, jnp.float32))
