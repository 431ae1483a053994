"""Inputs of images from data sets with numbered rows: of TFDS, of Hugging Face, or of any source.

TFDS is read without TensorFlow, from folders that were prepared with
`tfds build --file_format=array_record`.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from layerkit.config.checks import check_choice, require
from layerkit_inputs.base.errors import require_extra
from layerkit_inputs.grain.map_input import RowSource
from layerkit_inputs.hugging_face.dataset_base import HuggingFaceData
from layerkit_inputs.images.image_input import EncodedImage, ImageInput


class ImageColumns(ImageInput):
    """Base class of inputs of rows that are dictionaries with an image and a label.

    An image is the bytes of a file, a dictionary with `bytes` or `path`, pixels uint8
    `[height, width, channels]`, or a Pillow image.
    """

    image_field: str = "image"
    """Name of the image in a row."""
    label_field: str = "label"
    """Name of the label in a row, an integer."""

    @functools.cached_property
    def _rows(self) -> RowSource:
        source = self._open_rows()
        expected = "a sequence of dictionaries, or a function that returns one"
        require(isinstance(source, RowSource), self._label, "dataset", source, expected)
        return source

    def _open_rows(self) -> Any:
        """Return the rows."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _open_rows().")

    def _num_images(self) -> int:
        return len(self._rows)

    def _encoded(self, row: int) -> EncodedImage:
        fields = self._rows[row]
        names = {"image_field": self.image_field, "label_field": self.label_field}
        check_choice(self._label, list(fields), **names)
        image, label = fields[self.image_field], fields[self.label_field]
        return EncodedImage(image, label, self._name_of(row))


class ImageRows(ImageColumns):
    """An input of the images of a sequence of rows."""

    dataset: RowSource | Callable[[], RowSource] | None = None
    """A sequence of dictionaries, or a function without arguments that returns one. Required."""

    def _open_rows(self) -> Any:
        return self.dataset() if callable(self.dataset) else self.dataset


class TfdsImages(ImageColumns):
    """An input of the images of a data set of TFDS, in ArrayRecord files."""

    data_set: str
    """Name of the data set, such as `imagenet2012:5.1.0`."""
    split: str = "train"
    """Split, such as `train` or `train[:99%]`."""
    folder: str | None = None
    """Folder of the data sets. None: that of TFDS."""

    def _open_rows(self) -> Any:
        tfds = require_extra("tensorflow_datasets", needed_by="TfdsImages")
        builder = tfds.builder(self.data_set, data_dir=self.folder)
        decoders = {self.image_field: tfds.decode.SkipDecoding()}
        return builder.as_data_source(split=self.split, decoders=decoders)

    def _fingerprint(self) -> dict[str, Any]:
        return {"data_set": self.data_set, "split": self.split}


class HuggingFaceImages(HuggingFaceData, ImageColumns):
    """An input of a Hugging Face data set, such as Parquet files with a column of images.

    `path`, `data_files` and `split` name the data set as in `HuggingFaceInput`.
    """

    def _open_rows(self) -> Any:
        rows = self._open_mapped()
        names = {"image_field": self.image_field, "label_field": self.label_field}
        check_choice(self._label, rows.column_names, **names)
        image = self._library().Image(decode=False)
        return rows.select_columns(list(names.values())).cast_column(self.image_field, image)

    def _num_documents(self) -> int:
        return len(self._rows)

    def _fingerprint(self) -> dict[str, Any]:
        rows: Any = self._rows
        labels = rows.select_columns([self.label_field])[:][self.label_field]
        checksum = zlib.crc32(np.array(labels, np.int64).tobytes())
        return {"split": self.split, "labels_crc32": checksum}
