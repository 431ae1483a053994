"""Sizes of batches, rounded up so that calls of similar sizes share compiled functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit_runner.partitioning import Partitioner
from layerkit_runner.trainer.model_calls import max_positions

_SHORTEST = 16


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Rounding of the rows and lengths of a batch.

    Attributes:
      row_multiple: Number of parts that rows are split into.
      max_positions: Number of positions of a row that the model has; None for any number.
    """

    row_multiple: int = 1
    max_positions: int | None = None

    @classmethod
    def of(cls, model: Any, partitioner: Partitioner) -> Buckets:
        """Return the rounding for a model's config under a partitioner."""
        return cls(partitioner.num_batch_shards(), max_positions(model))

    def rows(self, count: int) -> int:
        """Return the rows of a batch for `count` texts."""
        return self.row_multiple * _power_of_two(-(-count // self.row_multiple))

    def length(self, tokens: int) -> int:
        """Return the length of a row for `tokens` tokens."""
        return self._at_most(max(_SHORTEST, _power_of_two(tokens)), tokens)

    def prompt_and_steps(self, tokens: int, new_tokens: int) -> tuple[int, int]:
        """Return the width of prompts and the number of steps, whose sum the model must have."""
        width, steps = self.length(tokens), max(_SHORTEST, _power_of_two(new_tokens))
        if self.max_positions is None or width + steps <= self.max_positions:
            return width, steps
        if width + new_tokens <= self.max_positions:
            return width, self.max_positions - width
        return tokens, max(new_tokens, self.max_positions - tokens)

    def _at_most(self, size: int, needed: int) -> int:
        if self.max_positions is None:
            return size
        return max(needed, min(size, self.max_positions))


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
