"""ImageFolder, an input of image files in a folder for each class, as torchvision's ImageFolder."""

from __future__ import annotations

import functools
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from layerkit.config.checks import require
from layerkit_inputs.base.base_input import counted
from layerkit_inputs.base.errors import MissingFileError
from layerkit_inputs.images.decode_image import SUFFIXES
from layerkit_inputs.images.image_input import EncodedImage, ImageInput

_SPLITS = {"train", "val", "valid", "validation", "test"}


class ImageFolder(ImageInput):
    """An input of image files `folder/class/name.jpg`.

    Classes are the folders in order of their names, and the images of a class are those in its
    folder and the folders below it, in order of their paths.
    """

    folder: str
    """Folder of the folders of the classes, such as `imagenet/train`."""

    @functools.cached_property
    def _files(self) -> tuple[list[str], np.ndarray]:
        """Paths of the images relative to the folder, and their labels int32 `[images]`."""
        expected = "a folder with a folder of images for each class"
        if not Path(self.folder).is_dir():
            owner = self._label
            raise MissingFileError(
                owner=owner, field="folder", value=self.folder, expected=expected
            )
        classes = sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
        # The numbers of all labels would be wrong.
        is_valid = bool(classes) and not _SPLITS.issuperset(classes)
        require(is_valid, self._label, "folder", self.folder, f"{expected}, not {classes}")
        count, expected = self.num_classes, f"{len(classes)}, the folders in {self.folder}"
        require(len(classes) == count, self._label, "num_classes", count, expected)
        files: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            class_files = _images_below(self.folder, name)
            expected = f"files with the suffixes {', '.join(SUFFIXES)}"
            require(class_files, self._label, f"files of class {name!r}", [], expected)
            files += class_files
            labels += [label] * len(class_files)
        return files, np.array(labels, np.int32)

    def _num_images(self) -> int:
        return len(self._files[0])

    def _encoded(self, row: int) -> EncodedImage:
        files, labels = self._files
        path = Path(self.folder, files[row])
        return EncodedImage(path.read_bytes(), labels[row], str(path))

    def _data_text(self) -> str:
        images = counted(len(self._files[0]), "image")
        return f"{self.folder}: {images} of {self.num_classes} classes"

    def _fingerprint(self) -> dict[str, Any]:
        names = "\n".join(self._files[0]).encode(errors="surrogateescape")
        return {"files_crc32": zlib.crc32(names)}


def _images_below(root: str, name: str) -> list[str]:
    paths = []
    for folder, _, files in sorted(os.walk(Path(root, name), followlinks=True)):
        below = os.path.relpath(folder, root)
        paths += [f"{below}/{file}" for file in sorted(files) if file.lower().endswith(SUFFIXES)]
    return paths
