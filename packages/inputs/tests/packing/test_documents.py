"""Documents: ids laid end to end, and the rows cut from them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from layerkit_inputs.packing.documents import (
    DocumentBuilder,
    Documents,
    PiecewiseStream,
    RowPlan,
    framed,
    stream_pieces,
)
from layerkit_inputs.packing.model_features import Segment, lm_features, segment_features
from layerkit_inputs.text.tokenizers import ByteTokenizer

pieces_of_ids = st.lists(st.lists(st.integers(0, 60000), max_size=9), min_size=1, max_size=6)


@given(pieces_of_ids, st.data())
def test_several_arrays_read_as_one(contents, data):
    whole = np.array([number for piece in contents for number in piece], np.int32)
    if not len(whole):
        return
    stream = PiecewiseStream([np.array(piece, np.uint16) for piece in contents])
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    part = stream[start:stop]
    assert part.dtype == np.int32
    np.testing.assert_array_equal(part, whole[start:stop])


def stream_rows(documents, rows, *, length):
    return documents.rows_of(RowPlan(documents.ends, length), rows, pad_id=0)


def documents_of(examples, *, with_inputs=False):
    """Documents of (inputs, targets)."""
    tokenizer = ByteTokenizer()
    pieces = [framed([np.array(i, int), np.array(t, int)], tokenizer) for i, t in examples]
    num_inputs = np.array([len(inputs) for inputs, _ in examples]) if with_inputs else None
    sizes = np.array([len(piece) for piece in pieces])
    return Documents.of(PiecewiseStream(pieces), sizes, num_inputs=num_inputs)


EXAMPLES = [([7, 8], [9, 10, 11]), ([], [5]), ([12], []), ([20, 21, 22, 23], [24])]


def test_document_is_framed_by_start_and_end_ids():
    assert framed([[7, 8], [9]], ByteTokenizer()).tolist() == [1, 7, 8, 9, 2]
    documents = documents_of(EXAMPLES)
    assert len(documents) == 4
    assert documents.num_predictions.tolist() == [6, 2, 2, 6]
    assert documents.begins.tolist() == [0, 7, 10, 13]


def test_rows_of_whole_documents_equal_those_of_features():
    documents = documents_of(EXAMPLES, with_inputs=True)
    row = stream_rows(documents, np.array([0]), length=20)
    expected = lm_features(
        [inputs for inputs, _ in EXAMPLES],
        [[*targets, 2] for _, targets in EXAMPLES],
        length=20,
        rows=[range(4)],
        bos_id=1,
        weights_on_targets_only=True,
    )
    assert set(row) == set(expected)
    for name in expected:
        assert row[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(row[name], expected[name], err_msg=name)


def segment_of(documents, number, start, length):
    """Return `length` predictions of a document, from its prediction `start` on."""
    begin = int(documents.begins[number] + start)
    ids = documents.ids[begin : begin + int(length) + 1]
    return Segment(ids[1:], int(documents.num_inputs[number] - start), int(ids[0]))


@pytest.mark.parametrize("length", [1, 3, 4, 7])
def test_rows_cut_anywhere_hold_what_segments_hold(length):
    documents = documents_of(EXAMPLES, with_inputs=True)
    ends = documents.ends
    for row in range(RowPlan(ends, length).num_rows):
        batch = stream_rows(documents, np.array([row]), length=length)
        segments = []
        for number, end in enumerate(ends):
            begin = end - documents.num_predictions[number]
            start, stop = max(begin, row * length), min(end, (row + 1) * length)
            if start < stop:
                segments.append(segment_of(documents, number, start - begin, stop - start))
        expected = segment_features(
            [segments], length=length, has_inputs=True, weights_on_targets_only=True
        )
        for name in expected:
            np.testing.assert_array_equal(batch[name], expected[name], err_msg=f"{row} {name}")


def test_without_inputs_every_token_counts_and_there_is_no_indicator():
    row = stream_rows(documents_of(EXAMPLES), np.array([0]), length=20)
    assert row.weights.sum() == 16 and "inputs_indicator" not in row


def test_prompts_end_before_the_end_id_and_with_inputs_after_them():
    rows, tokenizer = np.arange(4), ByteTokenizer()
    batch = documents_of(EXAMPLES).prompts(rows, length=5, tokenizer=tokenizer)
    assert batch.ids.tolist() == [
        [1, 7, 8, 9, 10],
        [1, 5, 0, 0, 0],
        [1, 12, 0, 0, 0],
        [1, 20, 21, 22, 23],
    ]
    assert batch.prompt_lengths.tolist() == [5, 2, 2, 5]
    assert batch.paddings.sum(1).tolist() == [0, 3, 3, 0]
    batch = documents_of(EXAMPLES, with_inputs=True).prompts(rows, length=5, tokenizer=tokenizer)
    assert batch.prompt_lengths.tolist() == [3, 1, 2, 5]
    assert batch.ids[0].tolist() == [1, 7, 8, 0, 0]


def test_a_vocabulary_without_an_end_has_prompts_of_whole_documents():
    class Endless(ByteTokenizer):
        eos_id = None

    tokenizer = Endless()
    pieces = [framed([[7, 8]], tokenizer), framed([[]], tokenizer)]
    documents = Documents.of(PiecewiseStream(pieces), np.array([3, 1]))
    assert documents.num_predictions.tolist() == [2, 0]
    batch = documents.prompts(np.arange(2), length=4, tokenizer=tokenizer)
    assert batch.ids.tolist() == [[1, 7, 8, 0], [1, 0, 0, 0]]
    row = stream_rows(documents, np.array([0]), length=3)
    assert row.labels.tolist() == [[7, 8, 0]] and row.segment_ids.tolist() == [[1, 1, 0]]


def test_stretches_are_read_in_the_order_asked_for_and_empty_ones_are_nothing():
    documents = documents_of(EXAMPLES)
    whole = documents.read(np.array([0]), np.array([20]))
    begins, sizes = np.array([7, 9, 20, 0, 20]), np.array([2, 3, 0, 4, 0])
    expected = np.concatenate([whole[7:9], whole[9:12], whole[:4]])
    np.testing.assert_array_equal(documents.read(begins, sizes), expected)
    assert not len(documents.read(begins[[2]], sizes[[2]]))
    assert not len(documents.read(begins[:0], sizes[:0]))


def test_builder_frames_documents_and_drops_one_whose_parts_fail():
    def failing():
        yield np.array([5])
        raise ValueError("broken")

    builder = DocumentBuilder(ByteTokenizer())
    builder.add([np.array([7, 8]), np.array([9])])
    with pytest.raises(ValueError, match="broken"):
        builder.add(failing())
    builder.add([])
    documents = builder.build()
    assert documents.ids[0:None].tolist() == [1, 7, 8, 9, 2, 1, 2]
    assert documents.begins.tolist() == [0, 5]
    assert documents.num_predictions.tolist() == [4, 1]


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    length=st.integers(1, 30),
    order=st.randoms(),
)
@example(sizes=[2, 0, 3], length=5, order=random.Random(0))
def test_streamed_rows_equal_cutting_by_hand(sizes, length, order):
    pairs = [(doc, at) for doc, size in enumerate(sizes) for at in range(size)]
    ends = np.cumsum(sizes)
    num_rows = RowPlan(ends, length).num_rows
    assert num_rows == -(-len(pairs) // length)
    if not num_rows:
        return
    rows = order.choices(range(num_rows), k=order.randint(1, 2 * num_rows))
    pieces = stream_pieces(np.array(rows), ends, length)
    assert {array.dtype for array in pieces} == {np.dtype(np.int64)} and pieces.length.all()
    result = [[] for _ in rows]
    documents = [[] for _ in rows]
    for row, document, start, count in zip(*map(np.ndarray.tolist, pieces), strict=True):
        result[row] += [(document, at) for at in range(start, start + count)]
        documents[row].append(document)
    assert result == [pairs[row * length : (row + 1) * length] for row in rows]
    assert all(len(set(one)) == len(one) for one in documents)  # a piece for each segment


def test_the_index_is_not_read_through_for_a_row():
    class Index(np.ndarray):
        """Counts what is taken of it."""

        taken = 0

        def __getitem__(self, at):
            result = super().__getitem__(at)
            Index.taken += np.size(result)
            return result

    ends = np.arange(3, 3_000_000, 3).view(Index)
    stream_pieces(np.array([7, 100_000]), ends, 16)
    assert Index.taken < 100
