"""GeneratedRows, the base class of inputs that generate any row from its number.

Each row uses its own block of a counter-based random generator. So rows are generated independently
of each other, and rows of training and evaluation never coincide.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from layerkit.config.checks import require
from layerkit_inputs.base.indexed_input import IndexedInput


class GeneratedRows(IndexedInput):
    """Base class of inputs of generated rows, endless or `num_examples` in an epoch."""

    num_examples: int | None = None
    """Rows of an epoch. None: endless. An evaluation of one epoch needs a number."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(1, "num_examples")
        is_known = self.num_examples is not None or self.endless
        require(is_known, self._label, "num_examples", None, "the number of rows of an epoch")

    def _num_rows(self) -> int | None:
        return self.num_examples

    @property
    def _stream(self) -> int:
        """Number of the random stream: 0 for training, 1 for evaluation."""
        return 0 if self.is_training else 1

    def _generators(self, rows: np.ndarray) -> Iterator[np.random.Generator]:
        """Yield the random generator of each row."""
        key = np.array([self._seed, self._stream], np.uint64)
        for row in rows.tolist():
            counter = np.array([0, row, 0, 0], np.uint64)
            yield np.random.Generator(np.random.Philox(key=key, counter=counter))
