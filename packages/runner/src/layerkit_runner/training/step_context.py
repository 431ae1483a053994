"""StepContext: what a step function may know about how it is spread over devices.

A step is written once. Under SPMD it sees the global batch, and `batch_sum` is the identity; under
pmap it sees one device's rows, and `batch_sum` adds over the devices. A weighted mean written as
batch_sum(Σ value·weight) / batch_sum(Σ weight) is right under both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from layerkit_runner.training.metrics import over_shards


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
        return {name: over_shards(metric, self) for name, metric in metrics.items()}


GLOBAL_BATCH = StepContext(
    batch_sum=lambda tree: tree,
    batch_max=lambda tree: tree,
    fold_shard=lambda key: key,
    num_shards=1,
)
