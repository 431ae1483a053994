"""What steps report, and how it becomes one number: over microbatches, shards, and many batches.

Three kinds, each of which any of these may take apart and put together again:

    WeightedScalar    a mean; Σ value·weight / Σ weight
    Maximum           a largest value; the maximum
    BinCounts         how values are spread over fixed bins; counts are added

A step keeps them on the device. `OverBatches` adds them up on the host, in double precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from layerkit.base_model import WeightedScalar
from layerkit.summaries import BinCounts
from layerkit_runner.observers import TOTAL_WEIGHT, Histogram

if TYPE_CHECKING:
    from layerkit_runner.training.step_context import StepContext


class Maximum(struct.PyTreeNode):
    """The largest of some values.

    Attributes:
      value: float32 scalar; −∞ of no values.
    """

    value: jax.Array


Reported = WeightedScalar | Maximum | BinCounts


def over_parts(metric: Reported) -> Reported:
    """What several microbatches reported `[microbatches, ...]`, as one."""
    if isinstance(metric, WeightedScalar):
        # A part of weight 0 says nothing, whatever its value is.
        value = jnp.where(metric.weight > 0, metric.value, 0.0)
        weight = jnp.sum(metric.weight)
        return WeightedScalar(jnp.sum(value * metric.weight) / jnp.maximum(weight, 1e-30), weight)
    if isinstance(metric, Maximum):
        return Maximum(jnp.max(metric.value))
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), metric)


def over_shards(metric: Reported, context: StepContext) -> Reported:
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
