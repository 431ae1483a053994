"""PaddingCheck: whether the metrics of an evaluation count the rows that only fill up a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from layerkit.base_model import WeightedScalar
from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import empty_batch, example_rows, num_rows_of
from layerkit_runner.distributed.process_exchange import gather_values


class PaddingCheck:
    """The row counts of one evaluation, compared with the weights of its metrics.

    A metric is suspected if its weight is the number of all rows. To exclude chance, the step is
    then run on a batch of padding alone, in which every metric must have weight 0.

    Args:
      dataset: Held-out data.
    """

    def __init__(self, dataset: BaseInput) -> None:
        self._dataset = dataset
        self._is_marked = True
        self._num_rows = 0
        self._num_examples_here = 0
        self._global_rows = 0
        self._batch: NestedMap | None = None

    def add(self, batch: NestedMap, *, global_rows: int) -> None:
        """Count the rows of a batch.

        Args:
          batch: Host-local batch.
          global_rows: Rows of the global batch that it is part of.
        """
        rows = example_rows(batch)
        if rows is None:
            self._is_marked = False
            return
        self._num_rows += global_rows
        self._num_examples_here += int(rows.sum())
        self._global_rows, self._batch = global_rows, batch

    def counted(
        self, weights: Mapping[str, float], evaluate: Callable[[NestedMap], Mapping[str, Any]]
    ) -> tuple[list[str], int, int] | None:
        """Return the metrics that count padding; None if there are none.

        Every process must call it with the same weights.

        Args:
          weights: Total weight of each metric over the evaluation, by name.
          evaluate: Returns the metrics of the global batch that a host-local batch is part of.

        Returns:
          (names of the metrics, number of all rows, number of rows that count).
        """
        if not self._is_marked or self._batch is None:
            return None
        suspects = [name for name, weight in weights.items() if weight == self._num_rows]
        if not suspects:
            return None
        # Hosts that feed the same rows count them once.
        hosts = gather_values([self._dataset.infeed_host_index, self._num_examples_here])
        num_examples = sum(dict(hosts).values())
        if num_examples == self._num_rows:
            return None
        padding = empty_batch(self._batch, num_rows_of(self._batch))
        metrics = jax.device_get(dict(evaluate(padding)))
        names = [
            name
            for name in suspects
            if isinstance(metrics[name], WeightedScalar)
            and np.equal(metrics[name].weight, self._global_rows)
        ]
        return (names, self._num_rows, num_examples) if names else None
