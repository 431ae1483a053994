"""Packing of documents of any length into rows of one length, in plain NumPy.

There are two methods. Concatenated documents are cut every `length` positions, so only the last row
has padding; `stream_pieces` finds the contents of any row by its number. Or each document is placed
whole into the first row with room for it: `plan_packing` plans the rows from lengths, and
`pack_documents` packs a few documents in memory. `StreamPacker` supports both methods for a stream
of documents.

In all rows, `segment_ids` number the documents of a row from 1, with 0 for padding, and
`segment_pos` are positions from 0 at the beginning of each segment in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from layerkit.errors import ConfigError
from layerkit_inputs.packing.model_features import as_tokens


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


class PackedRows(NamedTuple):
    """Rows of whole documents. Every array is int32 `[rows, length]`."""

    ids: np.ndarray
    segment_ids: np.ndarray
    segment_pos: np.ndarray


def pack_documents(documents: Sequence[np.ndarray | Sequence[int]], *, length: int) -> PackedRows:
    """Pack each document whole into the first row with room for it (first fit, in order).

    >>> pack_documents([[7, 6, 9], [18, 14], [23]], length=5).ids.tolist()
    [[7, 6, 9, 18, 14], [23, 0, 0, 0, 0]]

    Args:
      documents: Token ids of each document. Empty documents are skipped.
      length: Positions of a row.

    Raises:
      ConfigError: A document is longer than a row, or does not consist of token ids.
    """
    contents = [as_tokens(d, where=f"document {n}") for n, d in enumerate(documents)]
    room = np.zeros(len(contents), np.int64)
    placed: list[list[np.ndarray]] = []
    for number, document in enumerate(contents):
        if len(document) > length:
            raise ConfigError(
                owner="pack_documents",
                field=f"tokens of document {number}",
                value=len(document),
                expected=f"at most length={length}",
                hint="Cut the document, or use longer rows.",
            )
        if not len(document):
            continue
        fitting = np.flatnonzero(room[: len(placed)] >= len(document))
        row = int(fitting[0]) if len(fitting) else len(placed)
        if row == len(placed):
            placed.append([])
            room[row] = length
        placed[row].append(document)
        room[row] -= len(document)
    packed = PackedRows(*(np.zeros((len(placed), length), np.int32) for _ in PackedRows._fields))
    for row, segments in enumerate(placed):
        start = 0
        for segment, document in enumerate(segments, start=1):
            here = slice(start, start + len(document))
            packed.ids[row, here] = document
            packed.segment_ids[row, here] = segment
            packed.segment_pos[row, here] = np.arange(len(document))
            start = here.stop
    return packed
