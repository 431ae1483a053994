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


def stream_rows(rows: np.ndarray, document_ends: np.ndarray, length: int) -> StreamRows:
    """Rows cut from documents laid end to end, by number.

    Args:
      rows: int `[rows]`, each below `num_stream_rows`.
      document_ends: int64 `[documents]`: the running sum of the documents' lengths.
      length: Positions of a row. A document may begin in one row and go on in later ones.
    """
    row_starts = np.asarray(rows, np.int64)[:, None] * length
    positions = row_starts + np.arange(length)
    valid = positions < document_ends[-1]
    document = np.searchsorted(document_ends, positions, side="right")
    document = np.where(valid, document, 0)
    starts = np.concatenate([[0], document_ends[:-1]])[document]
    first_document = np.searchsorted(document_ends, row_starts, side="right")
    # A document without positions, as an empty file may be, takes no segment number.
    is_real = np.diff(document_ends, prepend=0) > 0
    rank = np.cumsum(is_real)
    return StreamRows(
        document=document,
        offset=np.where(valid, positions - starts, 0),
        segment_ids=np.where(valid, rank[document] - rank[first_document] + 1, 0).astype(np.int32),
        segment_pos=np.where(valid, positions - np.maximum(starts, row_starts), 0).astype(np.int32),
    )


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
