"""IdxImages, an input of labeled images from IDX files, the format of MNIST.

A split consists of two files, images and labels: `train-images-idx3-ubyte` and
`train-labels-idx1-ubyte`, or `t10k-…` for the test split, plain or compressed (`.gz`).
Fashion-MNIST and KMNIST have the same format. An IDX file begins with two zero bytes, a byte for
the type of its numbers and a byte for the number of dimensions. The sizes as big-endian int32 and
the numbers follow.
"""

from __future__ import annotations

import functools
import gzip
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.errors import MissingFileError, as_bad_record
from layerkit_inputs.base.indexed_input import IndexedInput

_PREFIXES = {"train": "train", "test": "t10k"}
_UNSIGNED_BYTES = 0x08


def read_idx(path: Path) -> np.ndarray:
    """Return the array of an IDX file, uint8.

    Raises:
      BadRecordError: The file is truncated, is no IDX file, or does not hold unsigned bytes.
    """
    kinds = EOFError, gzip.BadGzipFile, zlib.error, struct.error, ValueError
    with as_bad_record(str(path), "not a whole IDX file of unsigned bytes", *kinds):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, num_dims = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{num_dims}i", data, 4)
        if zeros or kind != _UNSIGNED_BYTES:
            raise ValueError(f"it begins with {data[:4].hex(' ')}")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * num_dims).reshape(shape)


def blank_images(rows: int, size: Sequence[int]) -> NestedMap:
    """Return labeled images of zeros, `[rows, height, width, 1]` and `[rows]`."""
    return NestedMap(inputs=np.zeros((rows, *size, 1), np.float32), labels=np.zeros(rows, np.int32))


class IdxImages(IndexedInput):
    """An input of `inputs` float32 `[batch, height, width, 1]` and `labels` int32 `[batch]`.

    Pixels are in [0, 1]. Evaluation batches also have `provenance` and
    `eval_sample_weights`, each `[batch]`. The files are read on first use and kept in memory.
    """

    folder: str
    """Folder of the files."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`."""
    image_size: Sequence[int] = (28, 28)
    """Height and width of the images."""

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of black images with the label 0."""
        return blank_images(rows, config.image_size)

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 `[examples, height, width]` and labels uint8 `[examples]`."""
        images, labels = (
            read_idx(self._file(kind)) for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        shape = [*labels.shape, *self.image_size]
        expected = f"{shape}, of labels {list(labels.shape)} and image_size={self.image_size}"
        is_same = list(images.shape) == shape
        require(is_same, self._label, "shape of the images", list(images.shape), expected)
        return images, labels

    def _file(self, kind: str) -> Path:
        plain = Path(self.folder, f"{_PREFIXES[self.split]}-{kind}")
        for path in (plain, plain.with_name(f"{plain.name}.gz")):
            if path.is_file():
                return path
        expected = f"a folder with {plain.name} or {plain.name}.gz"
        raise MissingFileError(
            owner=self._label, field="folder", value=self.folder, expected=expected
        )

    def _num_rows(self) -> int:
        return len(self._arrays[1])

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        images, labels = self._arrays
        return NestedMap(
            inputs=(images[rows] / np.float32(255))[..., None], labels=labels[rows].astype(np.int32)
        )

    def _fingerprint(self) -> dict[str, Any]:
        images, labels = (zlib.crc32(array.tobytes()) for array in self._arrays)
        return {"split": self.split, "images_crc32": images, "labels_crc32": labels}
