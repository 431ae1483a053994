"""Packing: nothing lost, nothing twice, and segments that say what belongs together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit_inputs.packing import num_stream_rows, pack_documents, stream_rows


def test_three_documents_in_one_row():
    packed = pack_documents([[0, 7, 6, 9], [0, 18, 14], [0, 23, 25]], length=12)
    assert packed.ids.tolist() == [[0, 7, 6, 9, 0, 18, 14, 0, 23, 25, 0, 0]]
    assert packed.segment_ids.tolist() == [[1] * 4 + [2] * 3 + [3] * 3 + [0, 0]]
    assert packed.segment_pos.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 0]]


def test_a_document_goes_into_the_first_row_with_room():
    packed = pack_documents([[1, 1, 1], [2, 2, 2, 2], [3], []], length=4)
    assert packed.ids.tolist() == [[1, 1, 1, 3], [2, 2, 2, 2]]


def test_document_longer_than_a_row_raises(raises):
    with raises(ConfigError, field="tokens of document 1", value=3):
        pack_documents([[1], [1, 2, 3]], length=2)


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
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    length=st.integers(1, 7),
)
def test_streamed_rows_equal_cutting_by_hand(sizes, length):
    pairs = [(doc, at) for doc, size in enumerate(sizes) for at in range(size)]
    ends = np.cumsum(sizes)
    num_rows = num_stream_rows(ends, length)
    assert num_rows == -(-len(pairs) // length)
    if not num_rows:
        return
    rows = stream_rows(np.arange(num_rows), ends, length)
    for row in range(num_rows):
        cut = pairs[row * length : (row + 1) * length]
        kept = rows.segment_ids[row] > 0
        assert kept.tolist() == [True] * len(cut) + [False] * (length - len(cut))
        assert list(zip(rows.document[row, kept], rows.offset[row, kept], strict=True)) == cut
        segment, position, before = 0, 0, None
        for column, (document, _) in enumerate(cut):
            segment, position = (segment + 1, 0) if document != before else (segment, position + 1)
            before = document
            assert rows.segment_ids[row, column] == segment
            assert rows.segment_pos[row, column] == position


def rows_by_every_position(rows, ends, length):
    """The definition of `stream_rows`, by arrays as long as the data."""
    row_starts = rows[:, None] * length
    positions = row_starts + np.arange(length)
    valid = positions < ends[-1]
    document = np.where(valid, np.searchsorted(ends, positions, side="right"), 0)
    starts = np.concatenate([[0], ends[:-1]])[document]
    first = np.searchsorted(ends, row_starts, side="right")
    rank = np.cumsum(np.diff(ends, prepend=0) > 0)
    segment_ids = np.where(valid, rank[document] - rank[first] + 1, 0)
    segment_pos = np.where(valid, positions - np.maximum(starts, row_starts), 0)
    return (
        document,
        np.where(valid, positions - starts, 0),
        segment_ids.astype(np.int32),
        segment_pos.astype(np.int32),
    )


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=40).filter(any),
    length=st.integers(1, 30),
    data=st.data(),
)
def test_streamed_rows_equal_their_definition_to_the_bit(sizes, length, data):
    ends = np.cumsum(sizes)
    numbers = st.integers(0, num_stream_rows(ends, length) - 1)
    rows = np.array(data.draw(st.lists(numbers, min_size=1, max_size=6)))
    expected = rows_by_every_position(rows, ends, length)
    for found, defined in zip(stream_rows(rows, ends, length), expected, strict=True):
        assert found.dtype == defined.dtype
        np.testing.assert_array_equal(found, defined)


def test_the_index_is_not_read_through_for_a_row():
    class Index(np.ndarray):
        """Counts what is taken of it."""

        taken = 0

        def __getitem__(self, at):
            found = super().__getitem__(at)
            Index.taken += np.size(found)
            return found

    ends = np.arange(3, 3_000_000, 3).view(Index)
    stream_rows(np.array([7, 100_000]), ends, 16)
    assert Index.taken < 100


def test_streamed_rows_are_found_in_any_order():
    ends = np.cumsum([5, 1, 8])
    everything = stream_rows(np.arange(4), ends, 4)
    some = stream_rows(np.array([3, 0]), ends, 4)
    for part, whole in zip(some, everything, strict=True):
        np.testing.assert_array_equal(part, whole[[3, 0]])
