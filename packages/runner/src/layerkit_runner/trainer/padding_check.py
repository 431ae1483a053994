"""PaddingCheck, which finds metrics of an evaluation that count rows of padding."""

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
    """A detector of metrics that count the rows of padding in a held-out data set.

    A metric is suspected if its weight is the number of all rows. To exclude a coincidence, the
    step then runs on a batch of padding alone, in which every metric must have weight 0.
    """

    def __init__(self, dataset: BaseInput) -> None:
        """Start without batches of the data set."""
        self._dataset = dataset
        self._is_marked = True
        self._num_rows = self._num_examples_here = self._global_rows = 0
        self._batch: NestedMap | None = None

    def add(self, batch: NestedMap, *, global_rows: int) -> None:
        """Count the rows of a host-local batch, a part of a global batch of `global_rows` rows."""
        rows = example_rows(batch)
        if rows is None:
            self._is_marked = False
            return
        self._num_rows += global_rows
        self._num_examples_here += int(rows.sum())
        self._global_rows, self._batch = global_rows, batch

    def counted(
        self, weights: Mapping[str, float], evaluate: Callable[[NestedMap], Mapping[str, Any]]
    ) -> str | None:
        """Return a sentence about the metrics that count padding; None if there are none.

        Every process must call it with the same weights.

        Args:
          weights: Total weight of each metric over the evaluation, by name.
          evaluate: Function that returns the metrics of a global batch, given its host-local part.
        """
        suspects = [name for name, weight in weights.items() if weight == self._num_rows]
        if not self._is_marked or self._batch is None or not suspects:
            return None
        # Hosts with the same index feed the same rows, which count once.
        hosts = gather_values([self._dataset.infeed_host_index, self._num_examples_here])
        num_examples = sum(dict(hosts).values())
        if num_examples == self._num_rows:
            return None
        metrics = jax.device_get(dict(evaluate(empty_batch(self._batch, num_rows_of(self._batch)))))
        names = [
            name
            for name in suspects
            if isinstance(metrics[name], WeightedScalar)
            and np.equal(metrics[name].weight, self._global_rows)
        ]
        if not names:
            return None
        return (
            f"{', '.join(names)} counted rows of padding: total weight {self._num_rows}."
            f" Expected {num_examples}, the rows that count"
        )
