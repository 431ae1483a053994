"""What steps report, and how it becomes one number over microbatches, shards and many batches.

There are three kinds:

    WeightedScalar    a mean; Σ value·weight / Σ weight
    Maximum           a largest value; the maximum
    BinCounts         a histogram over fixed bins; counts are added

A step keeps them on the device, and is written once for all partitioners (`StepContext`).
`OverBatches` adds them up on the host in double precision, and `ByExample` collects one value for
each example of a data set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from layerkit.base_model import WeightedScalar
from layerkit.nested_map import NestedMap
from layerkit.summaries import BinCounts
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import TOTAL_WEIGHT, Histogram


class Maximum(struct.PyTreeNode):
    """The largest of some values.

    Attributes:
      value: float32 scalar; −∞ of no values.
    """

    value: jax.Array


Reported = WeightedScalar | Maximum | BinCounts


def reduce_microbatches(metric: Reported) -> Reported:
    """What several microbatches reported `[microbatches, ...]`, as one."""
    if isinstance(metric, WeightedScalar):
        # A part of weight 0 says nothing, whatever its value is.
        value = jnp.where(metric.weight > 0, metric.value, 0.0)
        weight = jnp.sum(metric.weight)
        return WeightedScalar(jnp.sum(value * metric.weight) / jnp.maximum(weight, 1e-30), weight)
    if isinstance(metric, Maximum):
        return Maximum(jnp.max(metric.value))
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), metric)


def reduce_shards(metric: Reported, context: StepContext) -> Reported:
    """What the shards of a batch reported, as that of the global batch."""
    if isinstance(metric, WeightedScalar):
        value = jnp.where(metric.weight > 0, metric.value, 0.0)
        total, weight = context.batch_sum((value * metric.weight, metric.weight))
        return WeightedScalar(total / jnp.maximum(weight, 1e-30), weight)
    if isinstance(metric, Maximum):
        return context.batch_max(metric)
    return context.batch_sum(metric)


def names_of_numbers(reported: Mapping[str, Reported]) -> set[str]:
    """The metrics of an evaluation that are one number each, given what its step reports."""
    numbers = {name for name, metric in reported.items() if not isinstance(metric, BinCounts)}
    return numbers | {TOTAL_WEIGHT}


class OverBatches:
    """Everything that was reported of several global batches, each metric as one."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}
        self._largest: dict[str, float] = {}
        self._counts: dict[str, BinCounts] = {}

    def add(self, metrics: Mapping[str, Reported]) -> None:
        """Adds the metrics of one global batch (waits for them to be computed)."""
        for name, metric in jax.device_get(dict(metrics)).items():
            if isinstance(metric, WeightedScalar):
                total, weight = self._totals.get(name, (0.0, 0.0))
                value, extra = float(metric.value), float(metric.weight)
                # A batch of weight 0 says nothing, whatever its value is.
                self._totals[name] = (total + (value * extra if extra else 0.0), weight + extra)
            elif isinstance(metric, Maximum):
                before = self._largest.get(name, -np.inf)
                # Unlike Python's, it hands on a NaN.
                self._largest[name] = float(np.maximum(before, metric.value))
            else:
                self._counts[name] = _sum_in_double(self._counts.get(name), metric)

    def means(self) -> dict[str, float]:
        """Means and largest values; NaN where there was nothing."""
        means = {
            name: total / weight if weight else float("nan")
            for name, (total, weight) in self._totals.items()
        }
        largest = {
            name: float("nan") if value == -np.inf else value
            for name, value in self._largest.items()
        }
        return means | largest

    def histograms(self) -> dict[str, Histogram]:
        """How values are spread."""
        return {name: histogram_of(counts) for name, counts in self._counts.items()}

    def weights(self) -> dict[str, float]:
        """Total weights of the means, by name."""
        return {name: weight for name, (_, weight) in self._totals.items()}

    def weight(self, name: str) -> float:
        """The total weight of the metric `name`; 0 before anything was added."""
        return self._totals.get(name, (0.0, 0.0))[1]


def _sum_in_double(before: BinCounts | None, more: BinCounts) -> BinCounts:
    more = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), more)
    return more if before is None else jax.tree.map(np.add, before, more)


def histogram_of(counts: BinCounts) -> Histogram:
    """Fetched counts `[bins]`, as observers take them."""
    return Histogram(
        edges=np.asarray(counts.edges, np.float64),
        counts=np.asarray(counts.counts, np.float64),
        sum=float(counts.sum),
        sum_of_squares=float(counts.sum_of_squares),
    )


@dataclasses.dataclass(frozen=True)
class StepContext:
    """How a step function adds over the batch and draws random numbers.

    Attributes:
      batch_sum: Adds a tree of arrays over all shards of the batch.
      batch_max: The maximum over them, likewise.
      fold_shard: Makes a key different on each shard (identity where there is one).
      num_shards: How many shards of the batch there are; 1 under SPMD.
      row_shards: Over how many devices the rows that a step sees are split; 1 under pmap.
    """

    batch_sum: Callable[[Any], Any]
    batch_max: Callable[[Any], Any]
    fold_shard: Callable[[jax.Array], jax.Array]
    num_shards: int
    row_shards: int = 1

    def mean_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """What is reported of the global batch, from what each shard reports; see `Reported`."""
        return {name: reduce_shards(metric, self) for name, metric in metrics.items()}


GLOBAL_BATCH = StepContext(
    batch_sum=lambda tree: tree,
    batch_max=lambda tree: tree,
    fold_shard=lambda key: key,
    num_shards=1,
)


Value = TypeVar("Value")


class ByExample(Generic[Value]):
    """Collects one value for each example; rows of padding (provenance -1) are left out.

    Attributes:
      values: By the number of the example.
    """

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self.values: dict[int, Value] = {}

    def add(self, provenance: Any, values: Sequence[Value]) -> None:
        """Adds the rows of a global batch.

        Args:
          provenance: int `[batch]`, see `BaseInput`.
          values: One for each row.

        Raises:
          UsageError: an example that came before, or not one number for each row.
        """
        numbers = np.asarray(provenance)
        if numbers.shape != (len(values),):
            raise UsageError(
                f"the data set {self._dataset!r} has provenance of shape {list(numbers.shape)} in"
                f" a batch of {len(values)} rows; expected one number for each row"
            )
        for number, value in zip(numbers.tolist(), values, strict=True):
            if number < 0:
                continue
            if number in self.values:
                raise UsageError(
                    f"the data set {self._dataset!r} gave example {number} twice in one"
                    " evaluation, so its metrics would count it twice. Evaluate one epoch"
                    " (reset_for_eval=True, repeat=False), and give each example a provenance of"
                    " its own."
                )
            self.values[number] = value


def check_has_provenance(batch: NestedMap, dataset: str) -> None:
    """Raises UsageError where rows do not say whose they are, which metrics by example need."""
    if "provenance" not in batch:
        raise UsageError(
            f"the data set {dataset!r} has metrics over its examples, but its batches do not say"
            f" whose rows they hold: there is no provenance (int32 [batch], -1 for padding) beside"
            f" {', '.join(sorted(batch))}"
        )


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers, whichever library made them."""
    return {name: float(value) for name, value in metrics.items()}
