"""Rows that come out of Grain's worker processes in lists: one crossing costs as much as many rows.

A position is that of the list that is open, and how many of its rows are done; going on from it
makes this one list again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any


class RowList:
    """Some rows. Grain sees no arrays in it, each of which it would give its own shared memory."""

    def __init__(self, rows: Sequence[Any]):
        self.rows = list(rows)


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
