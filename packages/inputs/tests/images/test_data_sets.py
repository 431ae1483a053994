"""Images of Hugging Face data sets, of TFDS folders and of sequences of rows."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import HuggingFaceImages, ImageRows, TfdsImages
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.testing import laws
from layerkit_inputs.testing.image_files import encode_image

pytest.importorskip("PIL.Image")
pytest.importorskip("grain")

PLAIN = {"mean": (0, 0, 0), "std": (1, 1, 1), "image_size": 8, "num_classes": 9, "batch_size": 4}
IMAGES = [np.full((8, 8, 3), 10 * number, np.uint8) for number in range(6)]


def assert_rows(reader):
    batch = reader.get_next()
    assert batch.labels.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(batch.inputs[:, 0, 0, 0] * 255, [0, 10, 20, 30], atol=1e-3)
    laws.every_state_resumes(lambda: type(reader)(**{**vars_of(reader), "is_training": True}))


def vars_of(reader):
    names = ("path", "data_files", "data_set", "folder", "dataset", "image_field", "cache_dir")
    return {**PLAIN, **{name: getattr(reader, name) for name in names if hasattr(reader, name)}}


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_of_rows_obeys_the_laws_of_inputs(law):
    rows = [{"image": image, "label": label} for label, image in enumerate(IMAGES)]
    law(lambda **more: ImageRows(**{**PLAIN, "dataset": rows, "is_training": True, **more}))


def test_rows_of_a_sequence_are_read(raises):
    rows = [{"image": image, "label": label} for label, image in enumerate(IMAGES)]
    assert_rows(ImageRows(**PLAIN, dataset=rows))
    assert_rows(ImageRows(**PLAIN, dataset=lambda: rows))
    with raises(ConfigError, field="image_field", value="img"):
        ImageRows(**PLAIN, dataset=rows, image_field="img").get_next()
    with raises(ConfigError, field="dataset"):
        ImageRows(**PLAIN).get_next()
    with raises(BadRecordError, field="label", value=3):
        ImageRows(**{**PLAIN, "num_classes": 3}, dataset=rows).get_next()


@pytest.mark.parametrize("label", [1.5, "dog", None, [1], 9, -1])
def test_labels_that_are_no_classes_raise_or_are_skipped(label, raises):
    rows = [{"image": IMAGES[0], "label": label}, {"image": IMAGES[1], "label": np.int64(1)}]
    with raises(BadRecordError, field="label", value=label):
        ImageRows(**PLAIN, dataset=rows).get_next()
    batch = ImageRows(**PLAIN, dataset=rows, on_bad_record="skip").get_next()
    assert batch.eval_sample_weights.tolist() == [0, 1, 0, 0]


def test_parquet_files_with_an_image_column_are_read(tmp_path, raises):
    datasets = pytest.importorskip("datasets")
    columns = {
        "img": [{"bytes": encode_image(image), "path": None} for image in IMAGES],
        "label": list(range(6)),
    }
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "a.parquet")
    fields = {**PLAIN, "path": "parquet", "data_files": str(tmp_path / "a.parquet")}
    fields["cache_dir"] = str(tmp_path / "cache")
    assert_rows(HuggingFaceImages(**fields, image_field="img"))
    with raises(ConfigError, field="image_field", value="image"):
        HuggingFaceImages(**fields).get_next()


def test_array_records_of_tfds_are_read(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    rows = [(label, {"image": image, "label": label}) for label, image in enumerate(IMAGES)]
    image = tfds.features.Image(shape=(None, None, 3), encoding_format="png")
    tfds.dataset_builders.store_as_tfds_dataset(
        name="tiny",
        version="1.0.0",
        data_dir=tmp_path,
        split_datasets={"train": rows},
        features=tfds.features.FeaturesDict(
            {"image": image, "label": tfds.features.ClassLabel(num_classes=9)}
        ),
        file_format="array_record",
        disable_shuffling=True,
    )
    assert_rows(TfdsImages(**PLAIN, data_set="tiny:1.0.0", folder=str(tmp_path)))
