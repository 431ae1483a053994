"""Grain data sets and iterators that skip Grain's bookkeeping for single rows.

The bookkeeping takes as long as some pipelines take for a row. This module imports Grain at once.
"""

from __future__ import annotations

from typing import Any, Protocol

import grain


class _Rows(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class RowGroupDataset(grain.IterDataset):
    """A Grain data set of the rows in order, without those that are None.

    It replaces `to_iter_dataset` of a `grain.MapDataset`.
    """

    def __init__(self, rows: _Rows):
        """Set the rows to read, with None for rows to skip."""
        super().__init__()
        self._rows = rows

    def __iter__(self) -> RowGroupIterator:
        """Return an iterator from the first row."""
        return RowGroupIterator(self._rows)


class RowGroupIterator(grain.DatasetIterator):
    """A Grain iterator of rows whose state is the number of the next row."""

    def __init__(self, rows: _Rows):
        """Set the rows and start at the first."""
        super().__init__()
        self._rows = rows
        self._next_index = 0

    def __next__(self) -> Any:
        """Return the next row that is not None."""
        while self._next_index < len(self._rows):
            row = self._rows[self._next_index]
            self._next_index += 1
            if row is not None:
                return row
        raise StopIteration

    def get_state(self) -> dict[str, int]:
        """Return the number of the next row."""
        return {"next_index": self._next_index}

    def set_state(self, state: dict[str, int]) -> None:
        """Restore a state of `get_state`."""
        self._next_index = state["next_index"]


class UntimedRows(grain.DatasetIterator):
    """A Grain iterator around another one, which then is no longer the outermost.

    Grain times each element of the outermost iterator.
    """

    def __init__(self, rows: grain.DatasetIterator):
        """Wrap an iterator."""
        super().__init__(rows)
        self._rows = rows
        self._stats  # noqa: B018  # tells Grain that this iterator wraps `rows`

    def __next__(self) -> Any:
        """Return the next element of the wrapped iterator."""
        return next(self._rows)

    def get_state(self) -> Any:
        """Return the state of the wrapped iterator."""
        return self._rows.get_state()

    def set_state(self, state: Any) -> None:
        """Restore the state of the wrapped iterator."""
        self._rows.set_state(state)
