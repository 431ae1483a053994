"""First fit: plans that lose nothing, waste little, and are the same everywhere."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit_inputs.packing.first_fit import cut_documents, plan_packing
from layerkit_inputs.packing.model_features import Segment, segment_features


def rows_of(plan):
    return [row.tolist() for row in plan.rows()]


def test_a_document_goes_into_the_first_row_with_room():
    assert rows_of(plan_packing([3, 4, 1, 2, 0, 2], 4)) == [[0, 2], [1], [3, 5]]


def test_all_features_of_a_document_must_fit():
    lengths = [[6, 3], [3, 3], [4, 2], [0, 2]]
    assert rows_of(plan_packing(lengths, (10, 5))) == [[0, 2], [1, 3]]


@given(
    sizes=st.lists(st.integers(0, 9), max_size=40),
    spare=st.integers(0, 5),
    open_rows=st.integers(1, 50),
)
def test_every_document_has_one_place_and_no_row_is_too_full(sizes, spare, open_rows):
    length = max([*sizes, 1]) + spare
    rows = rows_of(plan_packing(sizes, length, open_rows=open_rows))
    placed = sorted(document for row in rows for document in row)
    assert placed == [number for number, size in enumerate(sizes) if size]
    assert all(0 < sum(sizes[document] for document in row) <= length for row in rows)
    assert all(row == sorted(row) for row in rows)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=40))
def test_documents_of_two_features_go_into_the_first_row_with_room_for_both(sizes):
    expected = []
    for document in (number for number, size in enumerate(sizes) if any(size)):
        taken = [np.sum([sizes[each] for each in [*row, document]], axis=0) for row in expected]
        fitting = [row for row, both in zip(expected, taken, strict=True) if (both <= (9, 7)).all()]
        if not fitting:
            expected.append([])
        (fitting or expected[-1:])[0].append(document)
    assert rows_of(plan_packing(sizes, (9, 7), open_rows=40)) == expected


def test_few_open_rows_waste_little():
    sizes = np.random.default_rng(0).lognormal(4, 1, 5000).astype(int).clip(1, 512)
    plan = plan_packing(sizes, 512)
    assert sizes.sum() / (plan.num_rows * 512) > 0.98


@given(lengths=st.lists(st.integers(0, 20), max_size=20), row_length=st.integers(1, 8))
def test_cut_documents_are_whole_again_end_to_end(lengths, row_length):
    pieces = cut_documents(lengths, row_length)
    result = {number: [] for number in range(len(lengths))}
    for document, start, length in zip(*pieces, strict=True):
        assert 1 <= length <= row_length
        result[document] += range(start, start + length)
    assert result == {number: list(range(length)) for number, length in enumerate(lengths)}


def test_a_document_longer_than_a_row_raises(raises):
    with raises(ConfigError, field="tokens of a document", value=7):
        plan_packing([1, 5, 7], 4)


def test_three_documents_in_one_row():
    documents = [[0, 7, 6, 9], [0, 18, 14], [0, 23, 25]]
    rows = plan_packing([len(document) for document in documents], 12).rows()
    segments = [[Segment(np.array(documents[number])) for number in row] for row in rows]
    packed = segment_features(segments, length=12)
    assert packed.labels.tolist() == [[0, 7, 6, 9, 0, 18, 14, 0, 23, 25, 0, 0]]
    assert packed.segment_ids.tolist() == [[1] * 4 + [2] * 3 + [3] * 3 + [0, 0]]
    assert packed.segment_pos.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 0]]
