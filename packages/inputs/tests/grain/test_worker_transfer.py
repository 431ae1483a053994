from __future__ import annotations

import json

import pytest

from layerkit_inputs.grain.worker_transfer import RowList, RowsOfLists

grain = pytest.importorskip("grain")


def rows_in_lists(num_rows, size):
    rows = grain.MapDataset.range(num_rows)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return RowsOfLists(iter(rows.to_iter_dataset(options).batch(size, batch_fn=RowList)))


@pytest.mark.parametrize(("num_rows", "size"), [(0, 2), (7, 1), (7, 3), (6, 3), (2, 5)])
def test_rows_resume_from_any_row(num_rows, size):
    rows = rows_in_lists(num_rows, size)
    for number in range(num_rows + 1):
        state = json.dumps(rows.get_state())
        fresh = rows_in_lists(num_rows, size)
        fresh.set_state(json.loads(state))
        assert json.dumps(fresh.get_state()) == state
        assert [next(fresh, None) for _ in range(number, num_rows)] == [*range(number, num_rows)]
        assert next(fresh, None) is None and next(fresh, None) is None
        assert next(rows, None) == (number if number < num_rows else None)
