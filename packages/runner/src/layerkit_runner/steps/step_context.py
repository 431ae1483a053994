"""StepContext: what a step function may know about how it is spread over devices.

A step is written once. Under SPMD it sees the global batch, and `batch_sum` is the identity; under
pmap it sees one device's rows, and `batch_sum` adds over the devices. A weighted mean written as
batch_sum(Σ value·weight) / batch_sum(Σ weight) is right under both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base_model import Metrics, WeightedScalar


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

    def mean_metrics(self, metrics: Metrics) -> Metrics:
        """Metrics of the global batch from those of each shard."""

        def mean(metric: WeightedScalar) -> WeightedScalar:
            # A shard of weight 0 says nothing, whatever its value is.
            value = jnp.where(metric.weight > 0, metric.value, 0.0)
            total, weight = self.batch_sum((value * metric.weight, metric.weight))
            return WeightedScalar(total / jnp.maximum(weight, 1e-30), weight)

        return {name: mean(metric) for name, metric in metrics.items()}


GLOBAL_BATCH = StepContext(
    batch_sum=lambda tree: tree,
    batch_max=lambda tree: tree,
    fold_shard=lambda key: key,
    num_shards=1,
)
