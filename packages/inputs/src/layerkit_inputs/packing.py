"""Packing: documents of any length into rows of one length, told apart by segments.

Two ways, both in plain NumPy. Documents laid end to end are cut every `length` positions, so that
nothing is padded but the end of the last row; `stream_rows` finds any such row by its number. Or
documents are kept whole, and each goes into the first row with room for it: `plan_packing` tells
from lengths alone which documents make up which row, `pack_documents` packs a few that are here.
`StreamPacker` does either for documents that come one after the other.

In all of them, `segment_ids` count a row's documents from 1, 0 being padding, and `segment_pos`
counts positions from 0 where a segment begins in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from layerkit_inputs.features import in_rows
from layerkit_inputs.first_fit import cut_documents as cut_documents
from layerkit_inputs.first_fit import plan_packing as plan_packing
from layerkit_inputs.stream_packer import StreamPacker as StreamPacker


class StreamRows(NamedTuple):
    """Where each position of some rows comes from; every array is `[rows, length]`."""

    document: np.ndarray
    """int64: number of the document; 0 where padded."""
    offset: np.ndarray
    """int64: position inside that document; 0 where padded."""
    segment_ids: np.ndarray
    """int32: from 1 in each row; 0 where padded."""
    segment_pos: np.ndarray
    """int32: from 0 in each segment of the row; 0 where padded."""


def num_stream_rows(document_ends: np.ndarray, length: int) -> int:
    """Rows of `length` positions that hold documents ending at `document_ends`."""
    total = int(document_ends[-1]) if len(document_ends) else 0
    return -(-total // length)


class RowPieces(NamedTuple):
    """What some rows hold, row after row from the left; every array is int64 `[pieces]`."""

    row: np.ndarray
    """Which of the rows, counted from 0."""
    document: np.ndarray
    """Number of the document."""
    start: np.ndarray
    """Position inside that document."""
    length: np.ndarray
    """How many positions, at least 1."""


def stream_pieces(rows: np.ndarray, document_ends: np.ndarray, length: int) -> RowPieces:
    """The pieces of documents in rows cut from documents laid end to end, by number.

    Of `document_ends`, which may be larger than the memory, only what the rows need is touched.

    Args:
      rows: int `[rows]`, each below `num_stream_rows`.
      document_ends: int64 `[documents]`: the running sum of the documents' lengths.
      length: Positions of a row. A document may begin in one row and go on in later ones.
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
    # A document without positions, as an empty file may be, has no piece.
    is_real = lengths > 0
    return pieces if is_real.all() else RowPieces(*(array[is_real] for array in pieces))


def stream_rows(rows: np.ndarray, document_ends: np.ndarray, length: int) -> StreamRows:
    """Where each position of the rows of `stream_pieces` comes from; takes the same arguments."""
    pieces = stream_pieces(rows, document_ends, length)
    sizes = pieces.length
    valid = np.arange(length) < np.bincount(pieces.row, sizes, minlength=len(rows))[:, None]
    segment = np.arange(len(sizes)) - np.searchsorted(pieces.row, pieces.row) + 1
    return StreamRows(
        document=in_rows(np.repeat(pieces.document, sizes), valid, np.int64),
        offset=in_rows(ranges(pieces.start, sizes), valid, np.int64),
        segment_ids=in_rows(np.repeat(segment, sizes), valid, np.int32),
        segment_pos=in_rows(ranges(np.zeros_like(sizes), sizes), valid, np.int32),
    )


def ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Whole numbers from each of `begins` on, so many as `sizes` says, end to end: int64.

    >>> ranges(np.array([7, 2]), np.array([3, 2])).tolist()
    [7, 8, 9, 2, 3]
    """
    numbers = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
    numbers += np.arange(len(numbers))
    return numbers


class PackedRows(NamedTuple):
    """Whole documents in rows; every array is int32 `[rows, length]`."""

    ids: np.ndarray
    segment_ids: np.ndarray
    segment_pos: np.ndarray


def pack_documents(documents: Sequence[np.ndarray | Sequence[int]], *, length: int) -> PackedRows:
    """Puts each document whole into the first row with room for it (first fit, in order).

    >>> pack_documents([[7, 6, 9], [18, 14], [23]], length=5).ids.tolist()
    [[7, 6, 9, 18, 14], [23, 0, 0, 0, 0]]

    Args:
      documents: Token ids of each document; empty ones are left out.
      length: Positions of a row.

    Raises:
      ValueError: a document is longer than a row.
    """
    contents = [np.asarray(document, np.int32) for document in documents]
    room = np.zeros(len(contents), np.int64)
    placed: list[list[np.ndarray]] = []
    for number, document in enumerate(contents):
        if len(document) > length:
            raise ValueError(
                f"pack_documents: document {number} has {len(document)} tokens, a row holds "
                f"length={length}; cut it first, or use longer rows."
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
