"""Rows that are cut from concatenated documents, found by their numbers.

Only the last row has padding. `stream_pieces` finds the contents of any row, so that a reader needs
no index of rows. Rows of whole documents are planned by `first_fit`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


def num_stream_rows(document_ends: np.ndarray, length: int) -> int:
    """Return the number of rows of `length` positions that hold documents by their ends."""
    total = int(document_ends[-1]) if len(document_ends) else 0
    return -(-total // length)


class RowPieces(NamedTuple):
    """Pieces of documents in some rows, in order. Every array is int64 `[pieces]`."""

    row: np.ndarray
    """Index of the row, from 0."""
    document: np.ndarray
    """Number of the document."""
    start: np.ndarray
    """Position of the piece inside the document."""
    length: np.ndarray
    """Number of positions, at least 1."""


def stream_pieces(rows: np.ndarray, document_ends: np.ndarray, length: int) -> RowPieces:
    """Return the pieces of documents in rows that are cut from concatenated documents.

    Only the needed part of `document_ends` is read, since it may be larger than the memory.

    Args:
      rows: Row numbers, int `[rows]`, each below `num_stream_rows`.
      document_ends: Cumulative sum of the documents' lengths, int64 `[documents]`.
      length: Positions of a row. A document may span several rows.
    """
    begins = np.asarray(rows, np.int64) * length
    ends = np.minimum(begins + length, document_ends[-1])
    first = document_ends.searchsorted(begins, side="right")
    counts = document_ends.searchsorted(ends, side="left") - first + 1
    document = ranges(first, counts)
    row = np.arange(len(counts)).repeat(counts)
    document_begins = document_ends[document - 1]
    document_begins[document == 0] = 0
    starts = np.maximum(begins[row], document_begins)
    lengths = np.minimum(document_ends[document], ends[row]) - starts
    pieces = RowPieces(row, document, starts - document_begins, lengths)
    # A document without positions, such as an empty file, has no piece.
    is_real = lengths > 0
    return pieces if is_real.all() else RowPieces(*(array[is_real] for array in pieces))


def ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenate ranges of `sizes` integers that start at `begins`, int64.

    >>> ranges(np.array([7, 2]), np.array([3, 2])).tolist()
    [7, 8, 9, 2, 3]
    """
    numbers = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
    numbers += np.arange(len(numbers))
    return numbers
