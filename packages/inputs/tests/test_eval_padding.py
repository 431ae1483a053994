"""Padding for evaluation: as many batches on every host, and rows that count for nothing."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.nested_map import NestedMap
from layerkit_inputs.eval_padding import (
    agree_on_num_batches,
    agreed_num_batches,
    empty_batch,
    end_together,
    mark_rows,
    num_rows_of,
    pad_epoch,
    pad_rows,
    split_rows,
)
from layerkit_inputs.specs import spec_of


def test_padding_is_zeros_but_for_provenance_and_paddings():
    batch = NestedMap(
        ids=np.array([[7, 8]], np.int32),
        weights=np.ones((1, 2), np.float32),
        inner=NestedMap(provenance=np.array([5], np.int32), paddings=np.zeros((1, 2))),
    )
    padded = pad_rows(batch, 2)
    assert padded.ids.tolist() == [[7, 8], [0, 0], [0, 0]] and padded.ids.dtype == np.int32
    assert padded.weights.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert padded.inner.provenance.tolist() == [5, -1, -1]
    assert padded.inner.paddings.tolist() == [[0, 0], [1, 1], [1, 1]]
    assert empty_batch(batch, 2).inner.provenance.tolist() == [-1, -1]
    with pytest.raises(ValueError, match="num_rows=-1"):
        pad_rows(batch, -1)


def test_without_padding_arrays_are_copies_unless_they_are_the_callers():
    table = np.arange(4)
    batch = NestedMap(own=np.arange(2), view=table[:2], inner=NestedMap(frozen=np.arange(2)))
    batch.inner.frozen.flags.writeable = False
    copied = pad_rows(batch, 0)
    assert not any(np.shares_memory(copied[name], batch[name]) for name in ("own", "view"))
    handed_on = pad_rows(batch, 0, copy=False)
    assert handed_on.own is batch.own and handed_on is not batch
    assert not np.shares_memory(handed_on.view, table) and handed_on.view.tolist() == [0, 1]
    assert handed_on.inner.frozen.flags.writeable
    assert pad_rows(batch, 1, copy=False).own.tolist() == [0, 1, 0]


def test_eleven_examples_on_three_hosts_of_three():
    batches = []
    for first_row in (0, 9):
        for host in range(3):
            rows = split_rows(first_row, 11, batch_size=3, host_index=host)
            batch = NestedMap(ids=rows, weights=np.ones(len(rows)))
            batches.append(pad_rows(batch, 3 - len(rows)))
    expected = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 0], [0, 0, 0], [0, 0, 0]]
    assert [batch.ids.tolist() for batch in batches] == expected
    weights = [[1] * 3] * 3 + [[1, 1, 0]] + [[0] * 3] * 2
    assert [batch.weights.tolist() for batch in batches] == weights


def test_thirteen_examples_on_three_hosts_of_three():
    def count(host: int) -> int:
        return sum(len(split_rows(at, 13, batch_size=3, host_index=host)) for at in (0, 9))

    assert [count(host) for host in range(3)] == [6, 4, 3]


@given(
    num_rows=st.integers(0, 60),
    batch_size=st.integers(1, 5),
    num_hosts=st.integers(1, 6),
)
def test_hosts_split_an_epoch_without_loss_in_as_many_batches(num_rows, batch_size, num_hosts):
    seen: list[int] = []
    counts = []
    for host in range(num_hosts):
        starts = range(0, num_rows, batch_size * num_hosts)
        shares = [split_rows(at, num_rows, batch_size=batch_size, host_index=host) for at in starts]
        seen += [int(row) for share in shares for row in share]
        counts.append(len(seen) - sum(counts))
        assert agreed_num_batches([sum(map(len, shares))], batch_size) <= len(starts)
    assert sorted(seen) == list(range(num_rows))
    # The blocks of the first host are filled first, so its count decides.
    assert agreed_num_batches(counts, batch_size) == -(-num_rows // (batch_size * num_hosts))


def test_the_fullest_host_decides_and_the_counts_come_from_one_exchange():
    assert agreed_num_batches([11, 10, 10, 10], 2) == 6
    assert agreed_num_batches([0, 0], 2) == 0
    assert agree_on_num_batches(10, 2, lambda own: [11, own, own, own]) == 6
    with pytest.raises(ValueError, match="one count >= 0 per host"):
        agreed_num_batches([], 2)


def test_forty_one_examples_on_four_uneven_hosts_make_six_batches_each():
    shards = [np.arange(host, 41, 4) for host in range(4)]
    num_batches = agreed_num_batches([len(shard) for shard in shards], 2)
    template = NestedMap(provenance=np.zeros(1, np.int32), weights=np.ones(1))
    seen: list[int] = []
    for shard in shards:
        own = (
            NestedMap(provenance=shard[at : at + 2], weights=np.ones(len(shard[at : at + 2])))
            for at in range(0, len(shard), 2)
        )
        batches = list(pad_epoch(own, batch_size=2, num_batches=num_batches, template=template))
        assert len(batches) == 6 and all(num_rows_of(batch) == 2 for batch in batches)
        for batch in batches:
            assert ((batch.provenance >= 0) == (batch.weights > 0)).all()
            seen += [int(row) for row in batch.provenance if row >= 0]
    assert sorted(seen) == list(range(41))


def test_an_empty_shard_pads_from_the_template():
    template = NestedMap(ids=np.ones((4, 3), np.int32), weights=np.ones((4, 3), np.float32))
    batches = list(pad_epoch([], batch_size=2, num_batches=2, template=template))
    assert [batch.ids.shape for batch in batches] == [(2, 3), (2, 3)]
    assert not any(batch.weights.any() or batch.ids.any() for batch in batches)


def test_more_batches_than_agreed_is_an_error():
    batch = NestedMap(ids=np.ones(2))
    with pytest.raises(ValueError, match="batch 2 with 2 rows, but the hosts agreed on 1 batches"):
        list(pad_epoch([batch, batch], batch_size=2, num_batches=1, template=batch))


def test_arrays_that_disagree_about_rows_are_no_batch():
    with pytest.raises(ValueError, match="share their leading dimension"):
        num_rows_of(NestedMap(ids=np.ones(2), weights=np.ones(3)))


def in_lockstep(streams):
    """What `end_together` makes of the batches of several hosts that run side by side."""
    count = len(streams)
    barrier = threading.Barrier(count, timeout=30)
    told = [None] * count
    made = [None] * count

    def run(host):
        def all_gather(value):
            told[host] = json.loads(json.dumps(value))
            barrier.wait()
            answer = list(told)
            barrier.wait()
            return answer

        try:
            made[host] = list(end_together(streams[host], all_gather))
        except ValueError as error:
            made[host] = str(error)

    threads = [threading.Thread(target=run, args=(host,)) for host in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return made


def batches_of(numbers):
    return [
        NestedMap(
            provenance=np.array([n], np.int32),
            tgt=NestedMap(weights=np.ones((1, 2), np.float32), paddings=np.zeros((1, 2))),
        )
        for n in numbers
    ]


@pytest.mark.parametrize(
    "sizes", [(3, 1), (0, 2), (2, 0, 0, 1), (0, 0), (1, 1, 1)], ids=lambda sizes: str(sizes)
)
def test_hosts_whose_data_end_apart_end_together(sizes):
    streams = [batches_of(range(10 * host, 10 * host + n)) for host, n in enumerate(sizes)]
    made = in_lockstep(streams)
    for host, (batches, size) in enumerate(zip(made, sizes, strict=True)):
        assert len(batches) == max(sizes)
        numbers = [int(batch.provenance[0]) for batch in batches]
        assert numbers == [10 * host + n for n in range(size)] + [-1] * (max(sizes) - size)
        for batch in batches[size:]:
            assert batch.tgt.weights.tolist() == [[0, 0]]
            assert batch.tgt.paddings.tolist() == [[1, 1]]
            assert spec_of(batch) == spec_of(batches_of([0])[0])


def test_hosts_with_batches_of_unlike_shapes_all_hear_of_it():
    wider = NestedMap(provenance=np.zeros(2, np.int32))
    narrow = NestedMap(provenance=np.zeros(1, np.int32))
    made = in_lockstep([[narrow, narrow], [narrow, wider], [narrow]])
    text = (
        "hosts 0 and 1 have batches of unlike shapes: {'provenance': [[1], 'int32']} and "
        "{'provenance': [[2], 'int32']}."
    )
    assert made == [text] * 3


def test_rows_that_a_reader_does_not_mark_are_marked_where_hosts_end_apart():
    def all_gather(value):
        """The other host has a batch more."""
        return [value, value if value is not None or len(made) > 1 else {"x": [[2, 3], "float32"]}]

    made = []
    own = NestedMap(x=np.ones((2, 3), np.float32))
    for batch in end_together([own], all_gather):
        made.append(batch)
        if len(made) == 2:
            break
    assert [batch.eval_sample_weights.tolist() for batch in made] == [[1, 1], [0, 0]]


@pytest.mark.parametrize("mark", ["provenance", "eval_sample_weights"])
def test_marks_of_a_reader_stay_as_they_are(mark):
    batch = NestedMap({"x": np.ones((2, 3)), mark: np.array([0, -1])})
    assert mark_rows(batch, 1) is batch
    assert mark_rows(NestedMap(x=batch.x), 1).eval_sample_weights.tolist() == [1, 0]
