"""Transfer of rows from Grain's worker processes in lists, which costs less than single rows.

Rows with equal fields, shapes and dtypes are stacked for the transfer, since few large arrays cost
less than many small ones. Grain would use shared memory for each array, which is slower than the
pipe below some hundred kilobytes.

The state is that of the list in use, and the number of rows read from it. Resuming makes this list
again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class RowList:
    """A list of rows whose arrays Grain does not move to shared memory.

    After unpickling, rows of one shape are views of arrays `[rows, ...]`.
    """

    def __init__(self, rows: Sequence[Any]):
        """Copy the list of rows."""
        self.rows = list(rows)

    def __reduce__(self) -> tuple[Callable[..., RowList], tuple[Any, ...]]:
        """Pickle rows of one shape as stacked arrays."""
        if len(self.rows) > 1 and _are_alike(self.rows):
            return _unstacked, (_stacked(self.rows), len(self.rows))
        return RowList, (self.rows,)


def _unstacked(stacked: dict[str, Any], num_rows: int) -> RowList:
    return RowList(_rows_of(stacked, num_rows))


def _rows_of(stacked: dict[str, Any], num_rows: int) -> list[dict[str, Any]]:
    columns = [
        _rows_of(value, num_rows) if isinstance(value, dict) else value
        for value in stacked.values()
    ]
    return [dict(zip(stacked, values, strict=True)) for values in zip(*columns, strict=True)]


def _stacked(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    stacked: dict[str, Any] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        stacked[name] = _stacked(values) if isinstance(value, Mapping) else np.array(values)
    return stacked


def _are_alike(rows: Sequence[Any]) -> bool:
    """Return True if the rows are dictionaries of arrays with equal names, shapes and dtypes.

    Other rows are pickled as they are; the input that reads them checks them.
    """
    first = rows[0]
    if type(first) is not dict or not first:
        return False
    if any(type(row) is not dict or row.keys() != first.keys() for row in rows):
        return False
    for name, value in first.items():
        values = [row[name] for row in rows]
        if type(value) is dict:
            if not _are_alike(values):
                return False
            continue
        if type(value) is not np.ndarray or value.dtype.kind not in "biufc":
            return False
        shape, dtype = value.shape, value.dtype
        for other in values:
            if type(other) is not np.ndarray or other.shape != shape or other.dtype != dtype:
                return False
    return True


class RowsOfLists:
    """An iterator of single rows with the state methods of a Grain iterator."""

    def __init__(self, lists: Any):
        """Wrap a `grain.DatasetIterator` of RowLists."""
        self._lists = lists
        self._begin_at(None)

    def _begin_at(self, state: Any) -> None:
        self._state_before = self._state = state
        self._open: list[Any] = []
        self._rows_done = 0

    def _open_next(self) -> None:
        opened = next(self._lists).rows
        # None is the initial state, which a worker that has not started cannot report.
        self._state_before, self._state = self._state, copy.deepcopy(self._lists.get_state())
        self._open, self._rows_done = opened, 0

    def __next__(self) -> Any:
        """Return the next row."""
        if self._rows_done == len(self._open):
            self._open_next()
        self._rows_done += 1
        return self._open[self._rows_done - 1]

    def get_state(self) -> dict[str, Any]:
        """Return the position, which is JSON if the Grain state is."""
        if self._rows_done == len(self._open):
            return {"lists": self._state, "rows_done": 0}
        return {"lists": self._state_before, "rows_done": self._rows_done}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state of `get_state`; valid only before the first row is read."""
        if state["lists"] is not None:
            self._lists.set_state(state["lists"])
        self._begin_at(state["lists"])
        if state["rows_done"]:
            self._open_next()
            self._rows_done = state["rows_done"]
