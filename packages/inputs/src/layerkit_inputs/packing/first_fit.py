"""First-fit packing: each document is placed whole into the first row with room for it.

A plan depends only on the lengths of documents. So every host makes the same plan, and a reader of
rows by number can look up the documents of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from layerkit.config.checks import check_sizes, require


class DocumentPieces(NamedTuple):
    """Pieces of documents, in the order of the documents. Every array is int64 `[pieces]`."""

    document: np.ndarray
    """Number of the document."""
    start: np.ndarray
    """Position of the piece inside the document."""
    length: np.ndarray
    """Number of positions."""


def cut_documents(lengths: np.ndarray | Sequence[int], row_length: int) -> DocumentPieces:
    """Cut documents into pieces of at most `row_length` positions. Empty ones have no piece.

    >>> cut_documents([3, 0, 5], 4).length.tolist()
    [3, 4, 1]
    """
    sizes = np.asarray(lengths, np.int64)
    num_pieces = -(-sizes // row_length)
    document = np.repeat(np.arange(len(sizes)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    start = (np.arange(len(document)) - first_piece[document]) * row_length
    return DocumentPieces(document, start, np.minimum(sizes[document] - start, row_length))


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """The documents of each row."""

    documents: np.ndarray
    """Document numbers, row after row, int64 `[placed]`."""
    row_ends: np.ndarray
    """End of each row in `documents`, int64 `[rows]`."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_ends)

    def documents_of(self, row: int) -> np.ndarray:
        """Return the numbers of the documents in a row, int64 `[documents]`, in order."""
        start = self.row_ends[row - 1] if row else 0
        return self.documents[start : self.row_ends[row]]

    def documents_of_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents of several rows, row after row.

        Args:
          rows: int `[rows]`, at least one row.

        Returns:
          (numbers of the documents, int64 `[documents]`; index into `rows` of each document's row).
        """
        by_row = [self.documents_of(row) for row in rows.tolist()]
        places = np.arange(len(rows)).repeat([len(documents) for documents in by_row])
        return np.concatenate(by_row), places

    def rows(self) -> list[np.ndarray]:
        """Return the documents of every row."""
        return [self.documents_of(row) for row in range(self.num_rows)]


def plan_packing(
    lengths: np.ndarray | Sequence[int] | Sequence[Sequence[int]],
    row_length: int | Sequence[int],
    *,
    open_rows: int = 16,
) -> PackingPlan:
    """Plan rows of whole documents. Each document is placed into the first row with room for it.

    The plan depends only on the arguments, so every host makes the same plan. Only the last
    `open_rows` rows that are not full are searched. So the time is proportional to the number of
    documents, a few microseconds each.

    >>> [row.tolist() for row in plan_packing([3, 4, 1, 2], 4).rows()]
    [[0, 2], [1], [3]]

    Args:
      lengths: int `[documents]`, or `[documents, features]` if a document has several sequences
        that are packed side by side, such as inputs and targets. Documents of length 0 are skipped.
      row_length: Positions of a row, or the positions of each feature.
      open_rows: Maximum number of open rows. A larger number wastes less space.

    Raises:
      ConfigError: A document is longer than a row. `cut_documents` cuts documents into pieces.
    """
    limits = (row_length,) if isinstance(row_length, int) else tuple(row_length)
    rows = OpenRows(limits, open_rows)
    sizes = np.asarray(lengths, np.int64)
    sizes = sizes.reshape(len(sizes), len(limits))
    for feature, limit in enumerate(limits):
        most = int(sizes[:, feature].max(initial=0))
        expected = f"at most row_length={limit}; cut_documents cuts documents"
        require(most <= limit, "plan_packing", "tokens of a document", most, expected)
    kept = np.flatnonzero(sizes.any(axis=1))
    row_of = np.array([rows.place(size)[0] for size in sizes[kept].tolist()], np.int64)
    # A stable sort keeps the documents of a row in their order.
    order = np.argsort(row_of, kind="stable")
    return PackingPlan(kept[order], np.cumsum(np.bincount(row_of)))


_FEATURE_BITS = 32


class OpenRows:
    """A bounded number of rows with room, and the placement of documents into them.

    A document is placed into the first open row with room for it. If there is none, a new row is
    opened, and if there are too many open rows then, the oldest is closed. So the work for each
    document is bounded, and no row stays open for long.

    All features of a document, such as inputs and targets, must fit. Their lengths are joined to
    one 32-bit integer each, of which the highest bit is a guard bit. Subtracting a length that
    is too large clears it, so one operation compares all features.
    """

    def __init__(self, row_lengths: Sequence[int], max_open: int):
        """Start without open rows.

        Args:
          row_lengths: Positions of a row for each feature.
          max_open: Maximum number of open rows.
        """
        check_sizes("first-fit packing", open_rows=max_open)
        self._guards = _joined([1 << (_FEATURE_BITS - 1)] * len(row_lengths))
        self._whole = _joined(row_lengths) | self._guards
        self._max_open = max_open
        self._room: dict[int, int] = {}
        self._num_rows = 0

    def place(self, lengths: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Place a document.

        Args:
          lengths: Length of each feature, at most that of a row.

        Returns:
          (number of the document's row, counted from 0 in the order of opening; numbers of the rows
          that are closed by it: the oldest if there were too many, and its own if it is full).
        """
        needed, guards = _joined(lengths), self._guards
        rooms = self._room.items()
        row = next((row for row, room in rooms if (room - needed) & guards == guards), None)
        if row is None:
            row = self.begin_row(lengths)
        else:
            self._room[row] -= needed
        closed: tuple[int, ...] = ()
        if len(self._room) > self._max_open:
            closed += (next(iter(self._room)),)
        if self._room[row] == guards:
            closed += (row,)
        for number in closed:
            del self._room[number]
        return row, closed

    def begin_row(self, lengths: Sequence[int]) -> int:
        """Open a row that holds these lengths already, and return its number."""
        row = self._num_rows
        self._num_rows += 1
        self._room[row] = self._whole - _joined(lengths)
        return row


def _joined(lengths: Sequence[int]) -> int:
    joined = 0
    for length in lengths:
        joined = joined << _FEATURE_BITS | length
    return joined
