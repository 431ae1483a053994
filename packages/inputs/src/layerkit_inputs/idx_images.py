"""IdxImages: labelled pictures from the IDX files of MNIST and its kin.

Two files hold a split, images and labels: `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`,
or `t10k-…` for the test split, as they are or compressed (`.gz`). Fashion-MNIST and KMNIST come in
the same form. An IDX file begins with two zero bytes, a byte for the type of its numbers
and one for the number of dimensions, then has the sizes as big-endian int32, and then the numbers.
"""

from __future__ import annotations

import functools
import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit_inputs.generated_digits import blank_images
from layerkit_inputs.indexed_input import IndexedInput

_PREFIXES = {"train": "train", "test": "t10k"}
_UNSIGNED_BYTES = 0x08


def read_idx(path: Path) -> np.ndarray:
    """The numbers of an IDX file: uint8, of the shape that it says.

    Raises:
      ValueError: the file is cut off, is no IDX file, or holds other numbers than unsigned bytes.
    """
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTES:
        raise ValueError(
            f"{path} begins with {data[:4].hex(' ') or 'nothing'}; an IDX file of unsigned bytes"
            " begins with 00 00 08 and the number of its dimensions."
        )
    begin = 4 + 4 * data[3]
    if len(data) < begin:
        raise ValueError(f"{path} has {len(data)} bytes, too few for its {data[3]} sizes.")
    shape = np.frombuffer(data[4:begin], ">i4").tolist()
    expected = begin + math.prod(shape)
    if len(data) != expected:
        raise ValueError(f"{path} has {len(data)} bytes; its shape {shape} takes {expected}.")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)


class IdxImages(IndexedInput):
    """Rows of `inputs` float32 `[batch, height, width, 1]` in 0 … 1, and `labels` int32 `[batch]`.

    Outside of training also `provenance` and `eval_sample_weights`, each `[batch]`. The files are
    read when they are first needed, and kept in memory.
    """

    folder: str | None = None
    """Where the files lie."""
    split: str = "train"
    """`train` or `test`."""
    image_size: Sequence[int] = (28, 28)
    """Height and width of the pictures."""

    rows_in_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is None:
            raise self._config_error(
                "folder is not set; expected one with the IDX files of a data set."
            )
        if self.split not in _PREFIXES:
            raise self._config_error(
                f"split={self.split!r}{near_names(str(self.split), _PREFIXES)} Expected one of "
                f"{', '.join(_PREFIXES)}."
            )

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Black pictures of 0."""
        return blank_images(rows, config.image_size)

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 `[examples, height, width]` and labels uint8 `[examples]`."""
        images, labels = (
            read_idx(self._file(kind)) for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        if images.shape != (*labels.shape, *self.image_size):
            raise self._config_error(
                f"images of shape {list(images.shape)} and labels of shape {list(labels.shape)}; "
                f"expected [examples, height, width] and [examples], image_size={self.image_size}."
            )
        return images, labels

    def _file(self, kind: str) -> Path:
        plain = Path(str(self.folder), f"{_PREFIXES[self.split]}-{kind}")
        for path in (plain, plain.with_name(f"{plain.name}.gz")):
            if path.is_file():
                return path
        raise FileNotFoundError(
            f"{type(self).__qualname__}: there is neither {plain} nor {plain.name}.gz beside it."
        )

    def _num_rows(self) -> int:
        return len(self._arrays[1])

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        images, labels = self._arrays
        return NestedMap(
            inputs=(images[rows] / np.float32(255))[..., None],
            labels=labels[rows].astype(np.int32),
        )

    def _fingerprint(self) -> dict[str, Any]:
        images, labels = self._arrays
        return {
            "split": self.split,
            "images_crc32": zlib.crc32(images.tobytes()),
            "labels_crc32": zlib.crc32(labels.tobytes()),
        }
