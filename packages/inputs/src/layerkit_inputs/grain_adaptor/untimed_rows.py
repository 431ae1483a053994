"""Rows of a Grain data set without a record of how long each of them took.

Grain times what its outermost iterator gives, meant for batches; for single rows that takes as long
as some pipelines take for the row. Imports Grain, as `row_group_dataset` does.
"""

from __future__ import annotations

from typing import Any

import grain


class UntimedRows(grain.DatasetIterator):
    """The elements and states of another iterator, which is no longer the outermost one."""

    def __init__(self, rows: grain.DatasetIterator):
        super().__init__(rows)
        self._rows = rows
        self._stats  # noqa: B018  # Grain learns from this that there is an iterator around `rows`

    def __next__(self) -> Any:
        return next(self._rows)

    def get_state(self) -> Any:
        return self._rows.get_state()

    def set_state(self, state: Any) -> None:
        self._rows.set_state(state)
