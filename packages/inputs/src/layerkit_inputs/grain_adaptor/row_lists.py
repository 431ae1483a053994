"""Rows that come out of Grain's worker processes in lists: one crossing costs as much as many rows.

Alike rows, as those of a batch are, cross stacked: a few large arrays cost less than many small
ones. Grain would move them by shared memory of their own for each array, which for arrays below
some hundred kilobytes takes longer than the pipe does.

A position is that of the list that is open, and how many of its rows are done; going on from it
makes this one list again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class RowList:
    """Some rows. Grain sees no arrays in it, so it leaves them alone.

    Rows that were alike are views of arrays `[rows, ...]` after a crossing.
    """

    def __init__(self, rows: Sequence[Any]):
        self.rows = list(rows)

    def __reduce__(self) -> tuple[Callable[..., RowList], tuple[Any, ...]]:
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
    """Whether they are dictionaries of the same fields of numbers, of the same shapes and dtypes.

    Others cross as they are, and whoever reads them says what is wrong with them.
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
    """The rows one by one, with states as a Grain iterator has them."""

    def __init__(self, lists: Any):
        """Takes a `grain.DatasetIterator` of RowLists."""
        self._lists = lists
        self._begin_at(None)

    def _begin_at(self, state: Any) -> None:
        self._state_before = self._state = state
        self._open: list[Any] = []
        self._rows_done = 0

    def _open_next(self) -> None:
        opened = next(self._lists).rows
        # A worker that has not begun would have to tell its state: None stands for that one.
        self._state_before, self._state = self._state, copy.deepcopy(self._lists.get_state())
        self._open, self._rows_done = opened, 0

    def __next__(self) -> Any:
        if self._rows_done == len(self._open):
            self._open_next()
        self._rows_done += 1
        return self._open[self._rows_done - 1]

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON values if those of Grain's state are."""
        if self._rows_done == len(self._open):
            return {"lists": self._state, "rows_done": 0}
        return {"lists": self._state_before, "rows_done": self._rows_done}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called; from the beginning alone."""
        if state["lists"] is not None:
            self._lists.set_state(state["lists"])
        self._begin_at(state["lists"])
        if state["rows_done"]:
            self._open_next()
            self._rows_done = state["rows_done"]
