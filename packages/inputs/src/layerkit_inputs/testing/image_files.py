"""Image files, folders of them and tars, as the readers of images read them, for tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerkit_inputs.images.decode_image import pillow


def encode_image(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of an image file.

    Args:
      pixels: uint8 `[height, width]` or `[height, width, 3]`.
      kind: Name of the format in Pillow.
      **options: Options of Pillow's `Image.save`.
    """
    file = io.BytesIO()
    pillow().fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def write_image_folder(
    folder: str | Path, images: Iterable[np.ndarray], labels: Sequence[int]
) -> None:
    """Write `folder/<label>/<number>.png` for each of some images uint8 `[height, width, …]`."""
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        file = Path(folder, str(label), f"{number:05}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode_image(pixels))


def write_tar(path: str | Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write a tar of files with these names and bytes."""
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
