"""HuggingFaceColumns: columns of numbers as arrays."""

from __future__ import annotations

import re

import numpy as np
import pytest

from layerkit_inputs.bad_records import BadRecordError
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
def test_obeys(law, mode, fields):
    law(lambda **more: HuggingFaceColumns(**{**fields, **mode, **more}))


def test_values_shapes_and_dtypes(fields):
    batch = HuggingFaceColumns(**fields).get_next()
    assert batch.pixels.dtype == np.int32 and batch.pixels.shape == (4, 3, 2)
    assert batch.pixels[3].tolist() == [[3, 1], [2, 3], [4, 3]]
    assert batch.label.dtype == np.int32 and batch.label.tolist() == [0, 1, 2, 3]
    assert batch.share.dtype == np.float32 and batch.share.tolist() == [0, 0.125, 0.25, 0.375]
    assert batch.is_odd.dtype == np.bool_ and batch.is_odd.tolist() == [False, True] * 2
    assert batch.provenance.tolist() == [0, 1, 2, 3]


def test_an_epoch_has_every_row_once(fields):
    batches = list(HuggingFaceColumns(**fields, shuffle=True).eval_batches())
    weights = np.concatenate([batch.eval_sample_weights for batch in batches])
    labels = np.concatenate([batch.label for batch in batches])[weights > 0]
    assert sorted(labels.tolist()) == list(range(NUM_ROWS)) and weights.sum() == NUM_ROWS


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"columns": None}, "columns=None; expected a list of at least one column."),
        ({"columns": "label"}, "columns='label'; expected a list of at least one column."),
        ({"columns": ["lable"]}, "columns='lable': there is no such column; did you mean 'label'?"),
        ({"columns": ["name"]}, "column 'name' holds string; expected numbers, booleans or lists"),
        ({"columns": ["ragged"]}, "column 'ragged', rows [0, 1, 2, 3]: lists of [0, 1, 2] values;"),
        ({"columns": ["large"]}, "column 'large', rows [0, 1, 2, 3]: numbers from 0 to"),
        ({"columns": ["ragged"], "batch_size": 1}, "column 'ragged', row 1: shape [1], but row 0"),
        ({"on_bad_record": "skip"}, "on_bad_record='skip'; rows are found by number and cannot be"),
    ],
)
def test_what_cannot_work_is_refused_in_words(more, text, fields):
    with pytest.raises(ValueError, match=re.escape(f"HuggingFaceColumns: {text}")):
        for _ in HuggingFaceColumns(**{**fields, **more}).eval_batches():
            pass


def test_a_null_is_refused_by_row(fields):
    source = HuggingFaceColumns(**{**fields, "columns": ["missing"]})
    source.get_next()
    with pytest.raises(BadRecordError, match=r"split 'train', row 5: null in column 'missing'\."):
        source.get_next()
