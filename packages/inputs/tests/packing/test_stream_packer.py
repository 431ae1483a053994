"""StreamPacker: the rows of the index-based ways, and the same rows after any restore."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit_inputs.packing.documents import stream_pieces
from layerkit_inputs.packing.first_fit import plan_packing
from layerkit_inputs.packing.model_features import Segment, lm_features, segment_features
from layerkit_inputs.packing.stream_packer import StreamPacker
from layerkit_inputs.testing.laws import assert_same_batches

MODES = ("cut", "first_fit")


def documents_of(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 70_000, size).astype(np.int32) for size in sizes]


def taken(packer):
    rows = []
    while (row := packer.take()) is not None:
        rows.append(row)
    return rows


def packed(documents, length, **fields):
    packer = StreamPacker(length, **fields)
    rows = []
    for document in documents:
        packer.add(document)
        rows += taken(packer)
    packer.finish()
    return rows + taken(packer)


sizes_of_documents = st.lists(st.integers(0, 12), max_size=15)


@given(sizes=sizes_of_documents, length=st.integers(1, 7))
def test_cut_rows_are_those_found_by_number(sizes, length):
    documents = documents_of(sizes)
    rows = packed(documents, length, bos_id=2)
    assert len(rows) == -(-sum(sizes) // length)
    if not rows:
        return
    segments = [[] for _ in rows]
    pieces = stream_pieces(np.arange(len(rows)), np.cumsum(sizes), length)
    for row, document, start, size in zip(*pieces, strict=True):
        tokens = documents[document]
        first_id = tokens[start - 1] if start else 2
        segments[row].append(Segment(tokens[start : start + size], first_id=first_id))
    expected = segment_features(segments, length=length)
    for number, row in enumerate(rows):
        assert_same_batches([row], [expected.transform(lambda array, at=number: array[at])])


@given(sizes=st.lists(st.integers(0, 7), max_size=15), open_rows=st.integers(1, 4))
def test_first_fit_rows_are_those_of_the_plan(sizes, open_rows):
    documents = documents_of(sizes)
    plan = plan_packing(sizes, 7, open_rows=open_rows)
    expected = lm_features(None, documents, length=7, rows=plan.rows())
    rows = packed(documents, 7, mode="first_fit", open_rows=open_rows)
    # The same rows, in the order in which they are done.
    assert sorted(row.labels.tolist() for row in rows) == sorted(expected.labels.tolist())
    assert sorted(row.ids.tolist() for row in rows) == sorted(expected.ids.tolist())


def test_document_longer_than_a_row_continues_in_the_next():
    first, second = packed([[5, 6, 7, 8, 9]], 3, mode="first_fit", bos_id=2)
    assert first.ids.tolist() == [2, 5, 6] and first.labels.tolist() == [5, 6, 7]
    assert second.ids.tolist() == [7, 8, 0] and second.segment_pos.tolist() == [0, 1, 0]


@given(
    sizes=sizes_of_documents,
    mode=st.sampled_from(MODES),
    length=st.integers(1, 7),
    stop=st.tuples(st.integers(0, 15), st.integers(0, 3)),
)
def test_the_rows_after_a_restore_are_the_same(sizes, mode, length, stop):
    documents = documents_of(sizes)
    fields = {"mode": mode, "open_rows": 2}
    packer = StreamPacker(length, **fields)
    num_added, num_taken = min(stop[0], len(documents)), stop[1]
    for document in documents[:num_added]:
        packer.add(document)
    for _ in range(num_taken):
        packer.take()
    restored = StreamPacker(length, **fields)
    restored.add([1, 2, 3])  # forgotten
    restored.set_state(json.loads(json.dumps(packer.state())))
    assert restored.state() == packer.state()
    tails = []
    for each in (packer, restored):
        for document in documents[num_added:]:
            each.add(document)
        each.finish()
        tails.append(taken(each))
    assert_same_batches(tails[1], tails[0])


@pytest.mark.parametrize("mode", MODES)
def test_inputs_are_known_in_every_piece_of_a_document(mode):
    packer = StreamPacker(3, mode=mode, has_inputs=True, weights_on_targets_only=True)
    packer.add([8, 9, 10], inputs=[5, 6, 7, 4])
    packer.finish()
    rows = taken(packer)
    assert [row.weights.tolist() for row in rows] == [[0, 0, 0], [0, 1, 1], [1, 0, 0]]
    assert [row.inputs_indicator.tolist() for row in rows] == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert rows[2].ids.tolist() == [9, 0, 0]


def test_a_state_is_a_few_kilobytes():
    packer = StreamPacker(1024, mode="first_fit")
    for document in documents_of([300] * 40):
        packer.add(document)
        taken(packer)
    # Eight open rows of random ids, which cannot be compressed, at four bytes each.
    assert len(json.dumps(packer.state())) < 8 * 1024 * 4 * 1.4


def restore_into_fewer_open_rows() -> None:
    packer = StreamPacker(4, mode="first_fit", open_rows=3)
    for _ in range(3):
        packer.add([1, 2, 3])
    StreamPacker(4, mode="first_fit", open_rows=2).set_state(packer.state())


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        (lambda: StreamPacker(4, mode="first-fit"), "mode", "first-fit"),
        (lambda: StreamPacker(4).add([1], inputs=[2]), "inputs of a document", [2]),
        (lambda: StreamPacker(4).add([1.5]), "the next document, targets", "float64[1]"),
        (lambda: StreamPacker(4).set_state(StreamPacker(5).state()), "state.data", {"length": 5}),
        (restore_into_fewer_open_rows, "state.data", {"open rows": 3}),
    ],
    ids=["mode", "inputs", "floats", "state", "open rows"],
)
def test_wrong_arguments_raise(raises, call, field, value):
    with raises(ConfigError, field=field, value=value):
        call()
