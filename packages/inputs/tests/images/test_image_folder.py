"""ImageFolder: order of classes and images, crops of evaluations, and the laws of inputs."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import ImageFolder
from layerkit_inputs.base.errors import BadRecordError, MissingExtraError, MissingFileError
from layerkit_inputs.testing import laws
from layerkit_inputs.testing.image_files import encode_image

pytest.importorskip("PIL.Image")
pytest.importorskip("grain")

MIXED = {"is_training": True, "mixup_alpha": 0.2, "cutmix_alpha": 1.0, "rand_augment": (2, 10)}


def source(folder, **fields):
    sizes = {"num_classes": 2, "image_size": 8, "batch_size": 4}
    return ImageFolder(**{**sizes, "folder": str(folder), **fields})


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("fields", [MIXED, {}], ids=["training", "evaluation"])
def test_reader_obeys_the_laws_of_inputs(law, fields, folder):
    law(lambda **more: source(folder, **{**fields, **more}))


def test_classes_and_images_are_in_the_order_of_torchvision(tmp_path):
    # sorted() puts capitals first, "10" before "9", and the files of a folder before those below.
    names = ["B/x.JPG", "a/10.png", "a/9.png", "a/z.webp", "a/deep/1.png", "c/0.bmp"]
    for number, name in enumerate(names):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = {".JPG": "JPEG", ".webp": "WEBP", ".bmp": "BMP"}.get(path.suffix, "PNG")
        path.write_bytes(encode_image(np.full((8, 8, 3), 20 * number, np.uint8), kind))
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "README").write_text("no class")
    plain = {"mean": (0, 0, 0), "std": (1, 1, 1), "batch_size": 6}
    batch = source(tmp_path, num_classes=3, **plain).get_next()
    assert batch.labels.tolist() == [0, 1, 1, 1, 1, 2]
    np.testing.assert_allclose(batch.inputs[:, 4, 4, 0] * 255, 20 * np.arange(6), atol=2)


def test_evaluation_normalizes_the_center(folder, noise):
    batch = source(folder, image_size=10, crop_fraction=1.0, batch_size=10).get_next()
    square = noise[1]  # 10 × 10 pixels
    expected = (square / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(batch.inputs[1], expected, atol=1e-5)
    assert batch.inputs.shape == (10, 10, 10, 3)
    gray = source(folder, channels=1, mean=(0.5,), std=(0.5,)).get_next().inputs
    assert gray.shape == (4, 8, 8, 1)


def test_epochs_are_augmented_differently_and_seeds_too(folder):
    def epochs(**fields):
        reader = source(folder, is_training=True, shuffle=False, batch_size=10, **fields)
        return [reader.get_next().inputs for _ in range(2)]

    first, second = epochs()
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, epochs(input_random_seed=1)[0])
    same, again = epochs(crop_scale=None, flip=False)
    np.testing.assert_array_equal(same, again)


def test_state_resumes_with_another_size_of_images(folder):
    reader = source(folder, is_training=True)
    reader.get_next()
    larger = source(folder, is_training=True, image_size=16)
    larger.set_state(reader.get_state())
    assert larger.get_next().labels.tolist() == reader.get_next().labels.tolist()


def test_damaged_image_raises_with_its_name_or_is_skipped(folder, raises):
    path = folder / "0" / "00001.png"
    path.write_bytes(path.read_bytes()[:60])
    with raises(BadRecordError, owner=str(path)):
        source(folder).get_next()
    batch = source(folder, on_bad_record="skip").get_next()
    assert batch.eval_sample_weights.tolist() == [1, 0, 1, 1]
    trained = source(folder, on_bad_record="skip", is_training=True, batch_size=10)
    assert trained.get_next().inputs.shape == (10, 8, 8, 3)
    assert trained.num_skipped == 1


def test_wrong_folders_and_fields_raise(folder, raises, monkeypatch):
    with raises(MissingFileError, field="folder"):
        source(folder / "none").get_next()
    with raises(ConfigError, field="folder"):  # classes would be `train`
        source(folder.parent).get_next()
    with raises(ConfigError, field="num_classes", value=3):
        source(folder, num_classes=3).get_next()
    (folder / "2").mkdir()
    with raises(ConfigError, field="files of class '2'"):
        source(folder, num_classes=3).get_next()
    wrong: dict[str, list[object]] = {
        "mean": [(0.5,)],
        "std": [(0.5,), (0, 1, 1)],
        "crop_fraction": [0.0],
        "crop_scale": [(0.5,), (0.9, 0.2), (-1, 1), (0.5, 2)],
        "rand_augment": [(2, 11), (0, 5), (2.5, 5)],
        "mixup_alpha": [0.0],
        "cutmix_alpha": [-1.0],
    }
    for name, values in wrong.items():
        for value in values:
            with raises(ConfigError, field=name):
                source(folder, **{name: value})
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with raises(MissingExtraError):
        source(folder, num_classes=3).get_next()


@pytest.mark.parametrize("fields", [MIXED, {}], ids=["training", "evaluation"])
def test_blank_batch_has_the_shapes_of_batches(fields, folder):
    reader = source(folder, **fields)
    blank = ImageFolder.blank_batch(reader, 4)
    for name, array in blank.items():
        assert (array.shape, array.dtype) == (reader.peek()[name].shape, reader.peek()[name].dtype)
