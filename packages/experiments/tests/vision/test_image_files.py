"""Image classifiers read files of several forms by one field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit.config import build
from layerkit_experiments.vision.imagenet import PlainViTS16
from layerkit_inputs.testing.image_files import encode_image, write_image_folder, write_tar

pytest.importorskip("PIL.Image")
pytest.importorskip("grain")


def write_files(folder: Path, kind: str, count: int = 8) -> None:
    for split in ("train", "validation"):
        images = np.zeros((count, 28, 28), np.uint8)
        labels = [number % 2 for number in range(count)]
        if kind == "folder":
            write_image_folder(folder / split.replace("validation", "val"), images, labels)
            continue
        files: list[tuple[str, bytes]] = []
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            files += [(f"{number}.png", encode_image(image)), (f"{number}.cls", b"%d" % label)]
        write_tar(folder / f"imagenet-{split}-0000.tar", files)


@pytest.mark.parametrize("kind", ["folder", "web_dataset"])
def test_one_field_names_the_form_of_the_files(kind: str, tmp_path: Path):
    write_files(tmp_path, kind)
    fields: dict[str, Any] = {"DATA_FORMAT": kind, "DATA_FOLDER": str(tmp_path), "NUM_CLASSES": 2}
    made = PlainViTS16(**fields, IMAGE_SIZE=32)
    train, heldout = (build(config.set(batch_size=4)) for config in made.datasets())
    batch = train.get_next()
    assert batch.inputs.shape == (4, 32, 32, 3)
    assert batch.labels.shape == (4, 2)  # of mixup
    assert train.rand_augment == [2, 10] and not heldout.is_training
    assert sorted(heldout.get_next().labels.tolist()) in ([0, 0, 0, 0], [0, 0, 1, 1])


def test_readers_of_all_forms_have_the_split_and_the_folder():
    made = [
        PlainViTS16(DATA_FORMAT=kind, DATA_FOLDER="d").datasets()
        for kind in ("folder", "web_dataset", "tfds", "hugging_face")
    ]
    folder, tars, tfds, parquet = (configs[1] for configs in made)
    assert folder.folder == "d/val" and tars.paths == ["d/*val*.tar"]
    assert (tfds.data_set, tfds.split, tfds.folder) == ("imagenet2012:5.1.0", "validation", "d")
    assert (parquet.path, parquet.split) == ("d", "validation")
