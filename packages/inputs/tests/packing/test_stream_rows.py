"""Packing: nothing lost, nothing twice, and segments that say what belongs together."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit_inputs.packing.stream_rows import num_stream_rows, pack_documents, stream_pieces


def test_three_documents_in_one_row():
    packed = pack_documents([[0, 7, 6, 9], [0, 18, 14], [0, 23, 25]], length=12)
    assert packed.ids.tolist() == [[0, 7, 6, 9, 0, 18, 14, 0, 23, 25, 0, 0]]
    assert packed.segment_ids.tolist() == [[1] * 4 + [2] * 3 + [3] * 3 + [0, 0]]
    assert packed.segment_pos.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 0]]


@pytest.mark.parametrize(
    ("document", "field", "value"),
    [
        ([1, 2, 3], "tokens of document 1", 3),
        ([2**32 + 7], "document 1", f"ids from {2**32 + 7} to {2**32 + 7}"),
    ],
    ids=["too long", "wider than int32"],
)
def test_document_that_a_row_cannot_hold_raises(raises, document, field, value):
    with raises(ConfigError, field=field, value=value):
        pack_documents([[1], document], length=2)


@given(sizes=st.lists(st.integers(0, 9), max_size=30), spare=st.integers(0, 5))
def test_packed_documents_come_back_whole(sizes, spare):
    length = max([*sizes, 1]) + spare
    documents = [[number + 1] * size for number, size in enumerate(sizes)]
    packed = pack_documents(documents, length=length)
    found = []
    for ids, segments, positions in zip(*packed, strict=True):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            assert positions[here].tolist() == list(range(here.sum()))
            found.append(ids[here].tolist())
        assert not ids[segments == 0].any() and not positions[segments == 0].any()
    assert sorted(found) == sorted(document for document in documents if document)


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
