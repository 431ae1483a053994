"""CsvSeries: windows of the columns of a file."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit_inputs import CsvSeries
from layerkit_inputs.base.errors import BadRecordError, MissingFileError
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.testing import laws

NUM_TIMES, HELDOUT = 40, 8


@pytest.fixture
def path(tmp_path):
    """Return a file in which column a counts the times and column b their negatives."""
    file = tmp_path / "series.csv"
    lines = [f"t{time},{time},{-time}" for time in range(NUM_TIMES)]
    file.write_text("\n".join(["date,a,b", *lines[:20], "", *lines[20:]]))
    return str(file)


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "epoch"])
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_inputs_of_time_series_obey(law, is_training, path):
    csv = {"path": path, "window_length": 5, "stride": 3, "heldout_values": HELDOUT}
    mode = {"batch_size": 4, "is_training": is_training}
    law(lambda **more: CsvSeries(**{**csv, **mode, **more}))


def test_training_windows_hold_no_heldout_value_and_evaluation_windows_end_in_one(path):
    fields = {"path": path, "window_length": 5, "columns": ["a"], "batch_size": 4}
    fields["heldout_values"] = HELDOUT
    training = CsvSeries(is_training=True, **fields)
    seen = np.concatenate([training.get_next().series for _ in range(18)])
    assert seen.max() == NUM_TIMES - HELDOUT - 1
    heldout = [
        batch.series[batch.eval_sample_weights > 0] for batch in CsvSeries(**fields).eval_batches()
    ]
    last_values = np.concatenate(heldout)[:, -1]
    assert last_values.tolist() == list(range(NUM_TIMES - HELDOUT, NUM_TIMES))


def test_last_stride_values_of_evaluation_windows_are_held_out_up_to_the_end(path):
    fields = {"path": path, "window_length": 12, "columns": ["a"], "batch_size": 4}
    heldout = CsvSeries(stride=3, heldout_values=HELDOUT, **fields)
    (batch,) = heldout.eval_batches()
    horizons = batch.series[batch.eval_sample_weights > 0][:, -3:]
    assert horizons.tolist() == [[34, 35, 36], [37, 38, 39]]


def test_columns_without_a_name_are_left_out_and_equal_names_are_two_series(tmp_path):
    file = tmp_path / "names.csv"
    file.write_text(",a,a,\nx,1,2,\ny,3,4,\n")
    batch = CsvSeries(path=str(file), window_length=2, batch_size=2, shuffle=False).get_next()
    assert batch.series.tolist() == [[1, 3], [2, 4]]


@pytest.mark.parametrize("text", ["", "date,a\n", "date,a\nx,1\n", "date\nx\ny\n"])
def test_file_without_a_window_is_an_error(raises, tmp_path, text):
    file = tmp_path / "short.csv"
    file.write_text(text)
    with raises(ValueError, field="window_length", value=2):
        list(CsvSeries(path=str(file), window_length=2, batch_size=1).eval_batches())


def test_missing_file_is_named_with_its_field(raises, tmp_path):
    source = CsvSeries.HParams.config(path=str(tmp_path), batch_size=2).Instantiate()
    with raises(MissingFileError, field="path", value=str(tmp_path)):
        source.get_next()


def test_windows_are_consecutive_values_of_one_column(path):
    series = CsvSeries(path=path, window_length=5, batch_size=72)
    rows = series.get_next().series
    steps = np.diff(rows, axis=1)
    assert set(map(tuple, steps)) == {(1.0,) * 4, (-1.0,) * 4}


def test_empty_cell_is_padding(tmp_path):
    file = tmp_path / "gap.csv"
    file.write_text("date,a\nx,1\ny,\nz,3\n")
    batch = CsvSeries(path=str(file), window_length=3, batch_size=1).get_next()
    assert batch.paddings.tolist() == [[0, 1, 0]]
    assert batch.series[0, [0, 2]].tolist() == [1, 3]


@pytest.mark.parametrize("line", ["y,three", "y,inf", "y,nan", "y", "y,1,2"])
def test_line_without_a_finite_number_in_each_column_raises(raises, tmp_path, line):
    file = tmp_path / "bad.csv"
    file.write_text(f"date,a\nx,1\n\n{line}\n")
    with raises(BadRecordError, owner=f"{file}, line 4"):
        CsvSeries(path=str(file), window_length=1, batch_size=1).get_next()


def test_blank_batch_has_the_spec_of_a_read_batch(path):
    fields = {"path": path, "window_length": 5, "is_training": True}
    blank = CsvSeries.blank_batch(CsvSeries.HParams.config(**fields), 2)
    assert spec_of(blank) == spec_of(CsvSeries(batch_size=2, **fields).get_next())
