"""Tests of padding for evaluation."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.evaluation import (
    agreed_num_batches,
    empty_batch,
    end_together,
    mark_rows,
    num_rows_of,
    pad_rows,
    split_rows,
)
from layerkit_inputs.base.host_batches import spec_of


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


@given(num_rows=st.integers(0, 60), batch_size=st.integers(1, 5), num_hosts=st.integers(1, 6))
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


def test_host_with_the_most_rows_determines_the_number_of_batches():
    assert agreed_num_batches([11, 10, 10, 10], 2) == 6
    assert agreed_num_batches([0, 0], 2) == 0


def test_arrays_with_different_leading_dimensions_raise(raises):
    with raises(ConfigError, value={"ids": (2,), "weights": (3,)}):
        num_rows_of(NestedMap(ids=np.ones(2), weights=np.ones(3)))


def in_lockstep(streams):
    """Return the batches or error of `end_together` on each of several hosts."""
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
        except ConfigError as error:
            made[host] = error

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
def test_hosts_with_unequal_data_end_at_the_same_batch(sizes):
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


def test_batches_of_different_shapes_raise_on_every_host():
    wider = NestedMap(provenance=np.zeros(2, np.int32))
    narrow = NestedMap(provenance=np.zeros(1, np.int32))
    made = in_lockstep([[narrow, narrow], [narrow, wider], [narrow]])
    for error in made:
        assert error.field == "batch of host 1" and error.value == {"provenance": [[2], "int32"]}
        assert str({"provenance": [[1], "int32"]}) in error.expected


def test_unmarked_rows_are_marked_if_hosts_have_unequal_data():
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
