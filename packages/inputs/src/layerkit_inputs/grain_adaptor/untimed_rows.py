"""UntimedRows: a Grain iterator without Grain's timing of each element.

Grain times each element of the outermost iterator. For single rows this takes as long as some
pipelines take for the row. This module imports Grain at once.
"""

from __future__ import annotations

from typing import Any

import grain


class UntimedRows(grain.DatasetIterator):
    """A Grain iterator around another one, which then is no longer the outermost."""

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
