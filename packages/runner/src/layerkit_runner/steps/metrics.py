"""Means over many batches, kept on the host in double precision."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from layerkit.base_model import WeightedScalar


class MeanOverBatches:
    """Σ value·weight / Σ weight for each metric, over the batches added."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}

    def add(self, metrics: Mapping[str, WeightedScalar]) -> None:
        """Adds the metrics of one global batch (waits for them to be computed)."""
        for name, metric in jax.device_get(dict(metrics)).items():
            total, weight = self._totals.get(name, (0.0, 0.0))
            value, extra = float(metric.value), float(metric.weight)
            # A batch of weight 0 says nothing, whatever its value is.
            self._totals[name] = (total + (value * extra if extra else 0.0), weight + extra)

    def means(self) -> dict[str, float]:
        """The means; NaN where the total weight is 0."""
        return {
            name: total / weight if weight else float("nan")
            for name, (total, weight) in self._totals.items()
        }

    def weight(self, name: str) -> float:
        """The total weight of the metric `name`; 0 before anything was added."""
        return self._totals.get(name, (0.0, 0.0))[1]
