"""Metrics of a task in addition to those of its model: `task.metrics`, by name.

    task.metrics = {
        "error": Mean.HParams.config(value="outputs/errors"),
        "worst_grad_norm": Max.HParams.config(value="scalars/learning/raw_grad_norm"),
        "scores": Histogram.HParams.config(value="outputs/scores", low=-100.0, high=0.0),
    }

In training they cover all steps since the last summary, in evaluation all batches. They are the
same on every mesh and for every number of microbatches. `value` is one of these paths:

    outputs/…   an output of the model for each example, `[rows, ...]` (`compute_loss`, second part)
    batch/…     an entry of the batch, `[rows, ...]`
    metrics/…   a metric of the model over the global batch
    scalars/…   another scalar of a training step, such as `learning/raw_grad_norm` and the layers'
                scalars `summaries/…`; evaluations have none and leave such metrics out
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base.base_model import Metrics, WeightedScalar
from layerkit.base.step_reports import BinCounts, Summary
from layerkit.config import Configurable
from layerkit.config.checks import check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_runner.step.metrics import LossSum, Maximum, Reported

PER_EXAMPLE = ("outputs", "batch")


class TaskMetric(Configurable):
    """Base class of the metrics of a task; a subclass defines `reduce`.

    Attributes:
      weight: Path of weights below `outputs/` or `batch/`, whose shape is a prefix of the shape of
        the values. None counts every example once and padding not at all. It must be None for
        `metrics/`, which have a weight, and for `scalars/`, where each step counts once.
    """

    value: str
    weight: str | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.weight is not None:
            require(
                self.is_per_example and self.weight.partition("/")[0] in PER_EXAMPLE,
                "task.metrics",
                "weight",
                self.weight,
                f"a path below outputs/ or batch/, like the value; None for {self.value}",
            )

    @property
    def is_per_example(self) -> bool:
        """True if the values have a row for each example."""
        return self.value.partition("/")[0] in PER_EXAMPLE

    @property
    def is_training_only(self) -> bool:
        """True if only training steps have the values."""
        return self.value.startswith("scalars/")

    def reduce(self, values: jax.Array, weights: jax.Array) -> Reported:
        """Return the metric of float32 `values` `[...]` and non-negative `weights` `[...]`."""
        raise NotImplementedError(f"{type(self).__qualname__} must define reduce")


class Mean(TaskMetric):
    """The weighted mean."""

    def reduce(self, values: jax.Array, weights: jax.Array) -> Reported:
        """Return Σ value·weight / Σ weight."""
        total = jnp.sum(jnp.where(weights > 0, values, 0.0) * weights)
        weight = jnp.sum(weights)
        return WeightedScalar.of(total / jnp.maximum(weight, 1e-30), weight)


class Max(TaskMetric):
    """The largest value of those with a weight above 0."""

    def reduce(self, values: jax.Array, weights: jax.Array) -> Reported:
        """Return the maximum; −∞ if all weights are 0."""
        return Maximum(jnp.max(jnp.where(weights > 0, values, -jnp.inf)))


class Histogram(TaskMetric):
    """A histogram of values, which count by weight, for TensorBoard and Weights & Biases.

    Attributes:
      low: Lower edge of the first bin, which holds lower values too.
      high: Upper edge of the last bin, which holds higher values too.
      num_bins: Number of bins of equal width.
    """

    low: float
    high: float
    num_bins: int = 30

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        is_range = -math.inf < self.low < self.high < math.inf
        expected = f"a finite number above low={self.low}"
        require(is_range, "task.metrics", "high", self.high, expected)
        check_sizes("task.metrics", num_bins=self.num_bins)

    def reduce(self, values: jax.Array, weights: jax.Array) -> Reported:
        """Return the weights of the values in each bin."""
        width = (self.high - self.low) / self.num_bins
        edges = (*(self.low + i * width for i in range(self.num_bins)), self.high)
        return BinCounts.of(values, edges, weights)


class Composite(Configurable):
    """Several metrics under one name: `parts`, configs by `PART`, are reported as `NAME/PART`."""

    parts: Mapping[str, Any]


def named_metrics(metrics: Mapping[str, Any]) -> dict[str, TaskMetric]:
    """Return all metrics, including the parts of composites, by full name."""
    by_name: dict[str, TaskMetric] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Composite):
            parts = named_metrics(metric.parts)
            by_name |= {f"{name}/{part}": value for part, value in parts.items()}
        else:
            expected = "a TaskMetric, such as Mean, or a Composite of them"
            is_metric = isinstance(metric, TaskMetric)
            require(is_metric, "task", f"metrics[{name!r}]", metric, expected)
            by_name[name] = metric
    return by_name


def example_metrics(
    metrics: Mapping[str, TaskMetric], outputs: NestedMap, batch: NestedMap
) -> dict[str, Reported]:
    """Return the metrics of per-example outputs and of a batch, both `[rows, ...]`."""
    sources = {"outputs": outputs, "batch": batch}
    results = {}
    for name, metric in metrics.items():
        if metric.is_per_example:
            values = _as_floats(_row_values(sources, metric.value, name=name))
            results[name] = metric.reduce(values, _weights(sources, metric, values, name=name))
    return results


def step_metrics(
    metrics: Mapping[str, TaskMetric],
    model_metrics: Metrics,
    scalars: Mapping[str, jax.Array] | None,
) -> dict[str, Reported]:
    """Return the metrics of model metrics and, in training, of other `scalars` of a step."""
    results: dict[str, Reported] = {}
    if scalars is not None:  # without the marks of histograms and images
        scalars = {name: x for name, x in scalars.items() if not isinstance(x, Summary)}
    for name, metric in metrics.items():
        if metric.is_per_example or (scalars is None and metric.is_training_only):
            continue
        reported = scalars if metric.is_training_only and scalars is not None else model_metrics
        source = _lookup(reported, metric.value, name=name)
        if isinstance(source, LossSum) and type(metric) is Mean:
            results[name] = source
        elif isinstance(source, WeightedScalar | LossSum):
            results[name] = metric.reduce(source.value, source.weight)
        else:
            results[name] = metric.reduce(_as_floats(source), jnp.ones(jnp.shape(source)))
    return results


def _weights(
    sources: Mapping[str, NestedMap], metric: TaskMetric, values: jax.Array, *, name: str
) -> jax.Array:
    batch = sources["batch"]
    if metric.weight is not None:
        weights = _as_floats(_row_values(sources, metric.weight, name=name))
    elif "eval_sample_weights" in batch:
        weights = _as_floats(batch.eval_sample_weights)
    elif "provenance" in batch:
        weights = jnp.asarray(batch.provenance >= 0, jnp.float32)
    else:
        weights = jnp.ones(values.shape[:1], jnp.float32)
    is_prefix = weights.shape == values.shape[: weights.ndim]
    expected = f"a prefix of {list(values.shape)}, the shape of {metric.value}"
    shape = list(weights.shape)
    require(is_prefix, f"task.metrics[{name!r}]", "shape of weights", shape, expected)
    weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    return jnp.broadcast_to(weights, values.shape)


def _row_values(sources: Mapping[str, NestedMap], path: str, *, name: str) -> Any:
    source = sources[path.partition("/")[0]]
    flat = {key.replace(".", "/"): value for key, value in source.flatten_items()}
    return _lookup(flat, path, name=name)


def _lookup(values: Mapping[str, Any], path: str, *, name: str) -> Any:
    root, _, key = path.partition("/")
    if key not in values:
        root = root if key else "metrics"
        choices = [f"{root}/{other}" for other in values]
        raise ConfigError(
            "unknown path", owner=f"task.metrics[{name!r}]", value=path, choices=choices
        )
    return values[key]


def _as_floats(values: Any) -> jax.Array:
    return jax.lax.stop_gradient(jnp.asarray(values, jnp.float32))
