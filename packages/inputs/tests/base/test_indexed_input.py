"""IndexedInput: epochs that miss nothing, and states that know their data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.indexed_input import (
    MOST_ROWS_DRAWN,
    IndexedInput,
    _permuted,
    epoch_order,
    shuffled_rows,
    window_shuffled_rows,
)
from layerkit_inputs.testing import laws


class Numbers(IndexedInput):
    """Rows that hold their number."""

    num_rows: int | None = 13

    def _num_rows(self) -> int | None:
        return self.num_rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return NestedMap(ids=np.stack([np.int32(row) for row in rows]))


class Views(Numbers):
    """Rows that lie in a table which the reader keeps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._table = np.arange(13, dtype=np.int32)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return NestedMap(ids=self._table[rows[0] : rows[-1] + 1])


def stream(source: IndexedInput, num_batches: int) -> list[int]:
    return [int(i) for _ in range(num_batches) for i in source.get_next().ids]


@given(num_rows=st.integers(1, 20), batch_size=st.integers(1, 7), seed=st.integers(0, 2**64 - 1))
def test_each_epoch_of_training_is_a_permutation(num_rows, batch_size, seed):
    source = Numbers(
        batch_size=batch_size, num_rows=num_rows, is_training=True, input_random_seed=seed
    )
    rows = stream(source, -(-3 * num_rows // batch_size))
    for epoch in range(3):
        part = rows[epoch * num_rows : (epoch + 1) * num_rows]
        assert part == epoch_order(num_rows, seed=seed, epoch=epoch).tolist()
        assert sorted(part) == list(range(num_rows))


def test_epochs_and_seeds_differ():
    orders = [epoch_order(50, seed=s, epoch=e).tolist() for s in (0, 1) for e in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@given(
    num_rows=st.integers(1, 40),
    global_batch=st.sampled_from([1, 2, 4, 6, 8, 12]),
    steps=st.integers(0, 9),
    is_training=st.booleans(),
)
def test_every_number_of_hosts_makes_the_same_global_batch(
    num_rows, global_batch, steps, is_training
):
    state = None
    for num_hosts in (n for n in (1, 2, 3, 4, 6, 8) if global_batch % n == 0):
        parts = []
        for host in range(num_hosts):
            source = Numbers(
                batch_size=global_batch // num_hosts,
                infeed_host_index=host,
                num_infeed_hosts=num_hosts,
                num_rows=num_rows,
                is_training=is_training,
            )
            if state is not None:
                source.set_state(state)
            else:
                for _ in range(min(steps, (num_rows - 1) // global_batch)):
                    source.get_next()
            parts.append(source)
        state = parts[0].get_state()
        batch = np.concatenate([part.get_next().ids for part in parts]).tolist()
        if num_hosts == 1:
            expected = batch
        assert batch == expected


def test_one_epoch_pads_and_marks_its_last_batch():
    source = Numbers(batch_size=4, infeed_host_index=1, num_infeed_hosts=2)
    batches = [source.get_next(), source.get_next()]
    with pytest.raises(StopIteration):
        source.get_next()
    assert batches[0].provenance.tolist() == [4, 5, 6, 7]
    assert batches[1].provenance.tolist() == [12, -1, -1, -1]
    assert batches[1].eval_sample_weights.tolist() == [1, 0, 0, 0]


def test_a_rolling_evaluation_runs_on_into_the_next_epoch():
    source = Numbers(batch_size=2, num_rows=5, eval_loop_num_batches=2)
    assert [batch.ids.tolist() for batch in source.eval_batches()] == [[0, 1], [2, 3]]
    assert [batch.ids.tolist() for batch in source.eval_batches()] == [[4, 0], [1, 2]]


def test_state_resumes_at_its_row_with_another_batch_size():
    source = Numbers(batch_size=6, is_training=True)
    rows = stream(source, 4)
    source.reset()
    stream(source, 2)
    other = Numbers(batch_size=3, is_training=True)
    other.set_state(source.get_state())
    assert stream(other, 4) == rows[12:]


def test_state_of_other_data_raises_with_the_differences(raises):
    state = Numbers(batch_size=2, name="a", is_training=True).get_state()
    other = Numbers(batch_size=2, name="b", num_rows=7, is_training=True, input_random_seed=3)
    with raises(ConfigError, owner="Numbers 'b'", value={"num_rows": 13, "seed": 0}):
        other.set_state(state)


def test_windows_keep_stored_neighbors_together():
    source = Numbers(batch_size=5, num_rows=20, is_training=True, shuffle_window=5)
    batches = [source.get_next().ids for _ in range(8)]
    for epoch in (batches[:4], batches[4:]):
        assert sorted(np.concatenate(epoch)) == list(range(20))
        for batch in epoch:
            assert np.ptp(batch) == 4 or np.ptp((batch + 10) % 20) == 4
    assert [b.tolist() for b in batches[:4]] != [b.tolist() for b in batches[4:]]


def test_order_of_many_rows_is_not_kept_in_memory():
    num_rows = 2 * MOST_ROWS_DRAWN
    source = Numbers(batch_size=1000, num_rows=num_rows, is_training=True)
    rows = stream(source, 3)
    assert len(set(rows)) == 3000 and source._orders == {}
    expected = shuffled_rows(np.arange(3000), num_rows, seed=0, epoch=0)
    assert rows == expected.tolist()


@pytest.mark.parametrize("fields", [{}, {"is_training": True}, {"shuffle": True}], ids=str)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_any_order_obeys_the_laws(law, window, fields):
    if window is not None and not fields:
        fields = {"shuffle": True, "input_random_seed": 5}
    law(lambda **more: Numbers(**{"batch_size": 4, "shuffle_window": window, **fields, **more}))


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_a_computed_order_obeys_the_laws(law, monkeypatch):
    monkeypatch.setattr("layerkit_inputs.base.indexed_input.MOST_ROWS_DRAWN", 5)
    law(lambda **more: Numbers(**{"batch_size": 4, "is_training": True, **more}))


def test_seed_beyond_64_bits_raises(raises):
    with raises(ConfigError, field="input_random_seed", value=2**64):
        Numbers(batch_size=1, num_rows=2, is_training=True, input_random_seed=2**64)


def test_row_number_beyond_int32_raises(raises):
    source = Numbers(batch_size=1, num_rows=2**31 + 2)
    source._rows_done = 2**31 - 1
    assert source.get_next().provenance.tolist() == [2**31 - 1]
    with raises(ConfigError, field="row", value=2**31):
        source.get_next()


def test_batches_that_are_views_belong_to_the_caller():
    for batch_size in (1, 4, 13):
        laws.batches_belong_to_the_caller(
            lambda size=batch_size, **fields: Views(batch_size=size, **fields)
        )


seeds = st.integers(0, 2**64 - 1)


def order(num_rows, *, seed=0, epoch=0, window=None):
    places = np.arange(num_rows)
    if window is None:
        return shuffled_rows(places, num_rows, seed=seed, epoch=epoch)
    return window_shuffled_rows(places, num_rows, window=window, seed=seed, epoch=epoch)


@given(num_rows=st.integers(1, 400), seed=seeds, epoch=seeds)
def test_each_row_comes_exactly_once(num_rows, seed, epoch):
    assert sorted(order(num_rows, seed=seed, epoch=epoch)) == list(range(num_rows))


@given(num_rows=st.integers(1, 300), window=st.integers(1, 320), seed=seeds, epoch=seeds)
def test_each_row_of_the_windows_comes_exactly_once(num_rows, window, seed, epoch):
    places = order(num_rows, seed=seed, epoch=epoch, window=window)
    assert sorted(places) == list(range(num_rows))
    for start in range(0, num_rows, window):
        rows = places[start : start + window]
        # Neighbors in storage, the last row being the first one's.
        gaps = np.diff(np.sort(rows), append=np.sort(rows)[0] + num_rows)
        assert np.sort(gaps)[:-1].tolist() == [1] * (len(rows) - 1)


@given(num_rows=st.integers(1, 2**62), seed=seeds, data=st.data())
def test_any_place_is_found_without_the_others(num_rows, seed, data):
    places = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=5, unique=True))
    for window in (None, 1000):
        shuffled = shuffled_rows if window is None else window_shuffled_rows
        more = {} if window is None else {"window": window}
        rows = shuffled(np.array(places), num_rows, seed=seed, epoch=1, **more)
        assert len(set(rows.tolist())) == len(places)
        assert rows.min() >= 0 and rows.max() < num_rows
        last = shuffled(np.array(places[-1:]), num_rows, seed=seed, epoch=1, **more)
        assert last[0] == rows[-1]


def test_orders_stay_as_they_are():
    # A change would give runs that go on other data than before.
    assert order(10).tolist() == [6, 1, 4, 8, 3, 0, 7, 9, 5, 2]
    assert order(10, seed=1, epoch=3, window=4).tolist() == [0, 1, 9, 8, 2, 4, 3, 5, 7, 6]


def test_seeds_and_epochs_have_orders_of_their_own():
    for window in (None, 8):
        orders = {
            tuple(order(50, seed=seed, epoch=epoch, window=window))
            for seed in (0, 1, 2)
            for epoch in (0, 1, 2)
        }
        assert len(orders) == 9


NUM_ORDERS = 20_000


def many_orders(num_rows):
    """Orders under keys of their own, `[orders, num_rows]`; epochs have such keys, and windows."""
    keys = np.random.default_rng(0).integers(2**64, size=(8, NUM_ORDERS), dtype=np.uint64)
    columns = [_permuted(np.full(NUM_ORDERS, n), num_rows, keys) for n in range(num_rows)]
    return np.stack(columns, axis=1)


def excess(counts):
    """By how many standard deviations chi-square is above its mean, all cells being as likely."""
    expected = np.mean(counts)
    degrees = np.size(counts) - 1
    return (np.sum((counts - expected) ** 2 / expected) - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("num_rows", [3, 4, 5, 6])
def test_all_orders_of_few_rows_come_equally_often(num_rows):
    codes = many_orders(num_rows) @ num_rows ** np.arange(num_rows)
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == math.factorial(num_rows)
    assert abs(excess(counts)) < 4


@pytest.mark.parametrize("num_rows", [7, 16, 33])
def test_every_row_comes_to_every_place_and_after_every_other_equally_often(num_rows):
    orders = many_orders(num_rows)
    for place in range(0, num_rows - 1, 4):
        assert abs(excess(np.bincount(orders[:, place], minlength=num_rows))) < 4
        steps = (orders[:, place + 1] - orders[:, place]) % num_rows
        assert abs(excess(np.bincount(steps, minlength=num_rows)[1:])) < 4


def test_windows_are_shuffled_each_in_its_own_way():
    places = order(5 * NUM_ORDERS, window=5).reshape(NUM_ORDERS, 5)
    first = np.min(places, axis=1, keepdims=True)
    inside = np.max(places - first, axis=1) == 4  # all but the window around the end of the data
    codes = (places - first)[inside] @ 5 ** np.arange(5)
    assert abs(excess(np.unique(codes, return_counts=True)[1])) < 4
    # And so are the windows themselves: each tenth of the epoch has some of each tenth of the data.
    tenths = np.histogram2d(first[:, 0], np.arange(NUM_ORDERS), bins=10)[0]
    assert abs(excess(tenths)) < 4


def test_neighbors_of_many_rows_are_spread_over_all_of_them():
    rows = shuffled_rows(np.arange(100_000), 2**40 + 12345, seed=3, epoch=0)
    counts = np.histogram(rows, bins=100, range=(0, 2**40 + 12345))[0]
    assert abs(excess(counts)) < 4
