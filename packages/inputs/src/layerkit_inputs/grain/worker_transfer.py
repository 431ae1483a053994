"""Transfer of rows from Grain's worker processes in lists, which costs less than single rows.

Grain would use shared memory for each array, which is slower than the pipe below some hundred
kilobytes.

The state is that of the list in use, and the number of rows read from it. Resuming makes this list
again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any


class RowList:
    """A list of rows whose arrays Grain does not move to shared memory."""

    def __init__(self, rows: Sequence[Any]):
        """Copy the list of rows."""
        self.rows = list(rows)


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
