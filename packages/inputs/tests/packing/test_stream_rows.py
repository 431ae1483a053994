"""Rows that are cut from concatenated documents."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from layerkit_inputs.packing.stream_rows import num_stream_rows, stream_pieces


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    length=st.integers(1, 30),
    order=st.randoms(),
)
@example(sizes=[2, 0, 3], length=5, order=random.Random(0))
def test_streamed_rows_equal_cutting_by_hand(sizes, length, order):
    pairs = [(doc, at) for doc, size in enumerate(sizes) for at in range(size)]
    ends = np.cumsum(sizes)
    num_rows = num_stream_rows(ends, length)
    assert num_rows == -(-len(pairs) // length)
    if not num_rows:
        return
    rows = order.choices(range(num_rows), k=order.randint(1, 2 * num_rows))
    pieces = stream_pieces(np.array(rows), ends, length)
    assert {array.dtype for array in pieces} == {np.dtype(np.int64)} and pieces.length.all()
    found = [[] for _ in rows]
    documents = [[] for _ in rows]
    for row, document, start, count in zip(*map(np.ndarray.tolist, pieces), strict=True):
        found[row] += [(document, at) for at in range(start, start + count)]
        documents[row].append(document)
    assert found == [pairs[row * length : (row + 1) * length] for row in rows]
    assert all(len(set(one)) == len(one) for one in documents)  # a piece for each segment


def test_the_index_is_not_read_through_for_a_row():
    class Index(np.ndarray):
        """Counts what is taken of it."""

        taken = 0

        def __getitem__(self, at):
            found = super().__getitem__(at)
            Index.taken += np.size(found)
            return found

    ends = np.arange(3, 3_000_000, 3).view(Index)
    stream_pieces(np.array([7, 100_000]), ends, 16)
    assert Index.taken < 100
