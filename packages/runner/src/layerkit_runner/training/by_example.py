"""What a model gave each example of a data set, under the number that the input gave it.

Batches are filled up with rows of padding, and where several processes feed rows they come in an
order of their own. `provenance` says whose row is whose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_runner.errors import UsageError

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
