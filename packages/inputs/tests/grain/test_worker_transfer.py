from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from layerkit_inputs.base.errors import BadRecordError
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


def crossed(rows):
    return pickle.loads(pickle.dumps(RowList(rows))).rows


def test_rows_of_one_shape_are_pickled_as_stacked_arrays():
    rows = [
        {
            "x": np.arange(3, dtype=np.int16) + n,
            "deep": {"y": np.array(n / 2), "z": np.ones((2, n))},
        }
        for n in (4, 4, 4)
    ]
    for row, found in zip(rows, crossed(rows), strict=True):
        assert list(found) == ["x", "deep"] and list(found["deep"]) == ["y", "z"]
        fields = [(row["x"], found["x"])]
        fields += [(row["deep"][name], found["deep"][name]) for name in ("y", "z")]
        for mine, other in fields:
            np.testing.assert_array_equal(mine, other)
            assert mine.dtype == other.dtype
    many = [{"x": np.arange(8) + n} for n in range(100)]
    assert len(pickle.dumps(RowList(many))) < 100 * 8 * 8 + 500


@pytest.mark.parametrize(
    "rows",
    [
        [{"x": np.arange(3)}],
        [{"x": np.arange(3)}, {"x": np.arange(4)}],
        [{"x": np.arange(3)}, {"x": np.arange(3, dtype=np.int32)}],
        [{"x": np.arange(3)}, {"y": np.arange(3)}],
        [{"x": np.arange(3)}, BadRecordError("broken")],
        [{"x": {"y": np.arange(3)}}, {"x": np.arange(3)}],
        [{"x": "text"}, {"x": "words"}],
        [{"x": 1}, {"x": 2.5}],
        [{}, {}],
        [1, 2],
    ],
    ids=str,
)
def test_rows_of_different_shapes_are_pickled_unchanged(rows):
    assert repr(crossed(rows)) == repr(rows)
