"""IndexedInput: epochs that miss nothing, and states that know their data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.index_shuffle import shuffled_rows
from layerkit_inputs.base.indexed_input import MOST_ROWS_DRAWN, IndexedInput, epoch_order
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


def test_data_without_rows_raise(raises):
    with raises(ConfigError):
        Numbers(batch_size=2, num_rows=0, is_training=True).get_next()


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


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"shuffle_window": 0}, "shuffle_window", 0),
        ({"shuffle": False, "shuffle_window": 8}, "shuffle_window", 8),
        ({"input_random_seed": -1}, "input_random_seed", -1),
    ],
    ids=str,
)
def test_wrong_fields_raise_when_built(raises, fields, field, value):
    with raises(ConfigError, owner="Numbers", field=field, value=value):
        Numbers(batch_size=2, **fields)


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
