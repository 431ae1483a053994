from __future__ import annotations

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.hugging_face.columns import HuggingFaceColumns
from layerkit_inputs.testing import laws

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

NUM_ROWS = 29
COLUMNS = ["pixels", "label", "share", "is_odd"]
ROWS = [
    {
        "pixels": [[number, 1], [2, 3], [4, number]],
        "label": number,
        "share": number / 8,
        "is_odd": number % 2 == 1,
        "name": str(number),
        "ragged": list(range(number % 3)),
        "large": number << 40,
        "missing": None if number == 5 else number,
    }
    for number in range(NUM_ROWS)
]


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    datasets.Dataset.from_list(ROWS).to_parquet(str(folder / "rows.parquet"), batch_size=7)
    return {
        "path": "parquet",
        "data_files": str(folder / "rows.parquet"),
        "cache_dir": str(folder / "cache"),
        "columns": COLUMNS,
        "batch_size": 4,
    }


@pytest.mark.parametrize(
    "mode",
    [pytest.param({"is_training": True}, marks=pytest.mark.slow), {}],
    ids=["training", "epoch"],
)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, mode, fields):
    law(lambda **more: HuggingFaceColumns(**{**fields, **mode, **more}))


def test_columns_become_arrays_of_their_shapes_and_dtypes(fields):
    batch = HuggingFaceColumns(**fields).get_next()
    assert batch.pixels.dtype == np.int32 and batch.pixels.shape == (4, 3, 2)
    assert batch.pixels[3].tolist() == [[3, 1], [2, 3], [4, 3]]
    assert batch.label.dtype == np.int32 and batch.label.tolist() == [0, 1, 2, 3]
    assert batch.share.dtype == np.float32 and batch.share.tolist() == [0, 0.125, 0.25, 0.375]
    assert batch.is_odd.dtype == np.bool_ and batch.is_odd.tolist() == [False, True] * 2
    assert batch.provenance.tolist() == [0, 1, 2, 3]
    shuffled = HuggingFaceColumns(**fields, shuffle=True).get_next()
    assert shuffled.label.tolist() == shuffled.provenance.tolist() != [0, 1, 2, 3]


ROWS_READ = "rows [0, 1, 2, 3]"


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ({"columns": None}, "columns", None),
        ({"columns": "label"}, "columns", "label"),
        ({"columns": ["lable"]}, "columns", "lable"),
        ({"columns": ["name"]}, "type of column 'name'", "string"),
        ({"columns": ["ragged"]}, f"list lengths of column 'ragged' in {ROWS_READ}", [0, 1, 2]),
        ({"columns": ["large"]}, f"column 'large' in {ROWS_READ}", [0, 3 << 40]),
        ({"columns": ["ragged"], "batch_size": 1}, "shape of column 'ragged' in row 1", [1]),
    ],
)
def test_columns_raise_for_invalid_fields_and_data(raises, more, field, value, fields):
    with raises(ConfigError, owner="HuggingFaceColumns", field=field, value=value):
        list(HuggingFaceColumns(**{**fields, **more}).eval_batches())


def test_columns_raise_for_a_null_with_its_row(raises, fields):
    source = HuggingFaceColumns(**{**fields, "columns": ["missing"]})
    source.get_next()
    with raises(BadRecordError):
        source.get_next()
