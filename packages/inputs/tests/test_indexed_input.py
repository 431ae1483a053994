"""IndexedInput: epochs that miss nothing, and states that know their data."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.nested_map import NestedMap
from layerkit_inputs.indexed_input import IndexedInput, epoch_order


class Numbers(IndexedInput):
    """Rows that hold their number."""

    num_rows: int | None = 13

    def _num_rows(self) -> int | None:
        return self.num_rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return NestedMap(ids=np.stack([np.int32(row) for row in rows]))


def stream(source: IndexedInput, num_batches: int) -> list[int]:
    return [int(i) for _ in range(num_batches) for i in source.get_next().ids]


@given(
    num_rows=st.integers(1, 20),
    batch_size=st.integers(1, 7),
    seed=st.integers(0, 2**64 - 1),
)
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


def test_one_epoch_pads_the_end_and_says_so():
    source = Numbers(batch_size=4, infeed_host_index=1, num_infeed_hosts=2)
    batches = [source.get_next(), source.get_next()]
    with pytest.raises(StopIteration):
        source.get_next()
    assert batches[0].provenance.tolist() == [4, 5, 6, 7]
    assert batches[1].provenance.tolist() == [12, -1, -1, -1]
    assert batches[1].eval_sample_weights.tolist() == [1, 0, 0, 0]


def test_a_host_whose_share_is_used_up_pads_with_the_same_shapes():
    source = Numbers(batch_size=2, num_rows=1, infeed_host_index=3, num_infeed_hosts=4)
    batch = source.get_next()
    assert batch.provenance.tolist() == [-1, -1]
    assert batch.ids.tolist() == [0, 0] and batch.ids.dtype == np.int32


def test_a_rolling_evaluation_runs_on_into_the_next_epoch():
    source = Numbers(batch_size=2, num_rows=5, eval_loop_num_batches=2)
    assert [batch.ids.tolist() for batch in source.eval_batches()] == [[0, 1], [2, 3]]
    assert [batch.ids.tolist() for batch in source.eval_batches()] == [[4, 0], [1, 2]]


def test_a_state_goes_on_at_its_row_with_another_batch_size():
    source = Numbers(batch_size=6, is_training=True)
    rows = stream(source, 4)
    source.reset()
    stream(source, 2)
    other = Numbers(batch_size=3, is_training=True)
    other.set_state(source.get_state())
    assert stream(other, 4) == rows[12:]


def test_a_state_of_other_data_is_refused_with_what_differs():
    state = Numbers(batch_size=2, name="a", is_training=True).get_state()
    other = Numbers(batch_size=2, name="b", num_rows=7, is_training=True, input_random_seed=3)
    whole = (
        "Numbers 'b': the state does not fit this data: num_rows was 13 and is 7; seed was 0 and "
        "is 3. Restore with the data and fields it was written with, or start a new run from the "
        "weights alone."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
        other.set_state(state)


def test_no_rows_and_a_negative_seed_are_refused():
    with pytest.raises(ValueError, match="there are no rows to read"):
        Numbers(batch_size=2, num_rows=0, is_training=True).get_next()
    with pytest.raises(ValueError, match="input_random_seed=-1; expected 0 or more"):
        Numbers(batch_size=2, input_random_seed=-1)
