"""A row group as a Grain data set. This imports Grain; `row_groups` imports it where it is needed.

It does what a `grain.MapDataset` of the rows does on its way through `to_iter_dataset`, without the
bookkeeping there, which costs more than such a row.
"""

from __future__ import annotations

from typing import Any, Protocol

import grain


class Rows(Protocol):
    """Rows by number; None where there is none."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class RowGroupDataset(grain.IterDataset):
    """The rows in order, without those that are None."""

    def __init__(self, rows: Rows):
        super().__init__()
        self._rows = rows

    def __iter__(self) -> RowGroupIterator:
        return RowGroupIterator(self._rows)


class RowGroupIterator(grain.DatasetIterator):
    """Its position is the number of the next row."""

    def __init__(self, rows: Rows):
        super().__init__()
        self._rows = rows
        self._next_index = 0

    def __next__(self) -> Any:
        while self._next_index < len(self._rows):
            row = self._rows[self._next_index]
            self._next_index += 1
            if row is not None:
                return row
        raise StopIteration

    def get_state(self) -> dict[str, int]:
        return {"next_index": self._next_index}

    def set_state(self, state: dict[str, int]) -> None:
        self._next_index = state["next_index"]
