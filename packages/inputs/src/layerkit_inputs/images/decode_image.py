"""Decoding of JPEG, PNG, WebP and other images by Pillow, and the crops of an evaluation.

A file may come from anywhere. Only the decoders of `FORMATS` read it. Before an image of more than
179 million pixels is decoded, Pillow raises an error.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from layerkit_inputs.base.errors import as_bad_record, require_extra

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Suffixes of names of image files, as in torchvision's ImageFolder."""
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
"""Formats that are decoded, by their names in Pillow."""


def pillow(module: str = "Image") -> Any:
    """Return a module of Pillow.

    Raises:
      MissingExtraError: Pillow is not installed.
    """
    return require_extra(f"PIL.{module}", needed_by="a reader of images")


def decode_image(encoded: Any, *, channels: int, owner: str) -> Any:
    """Return a Pillow image in the orientation that its EXIF tag states.

    Palettes and CMYK become RGB, 16-bit gray becomes 8-bit gray, and alpha is dropped.

    Args:
      encoded: Bytes of a file, a mapping with `bytes` or `path` (a Hugging Face image), pixels
        uint8 `[height, width]` or `[height, width, channels]`, or a Pillow image.
      channels: 1 for gray or 3 for RGB.
      owner: Name of the image in errors.

    Raises:
      BadRecordError: The image is damaged, too large, or in another format.
    """
    module, operations = pillow(), pillow("ImageOps")
    kinds = *_DECODING_ERRORS, module.DecompressionBombError
    with as_bad_record(owner, "not a readable image", *kinds):
        if isinstance(encoded, Mapping):
            data = encoded.get("bytes")
            encoded = Path(encoded["path"]).read_bytes() if data is None else data
        if isinstance(encoded, bytes):
            encoded = module.open(io.BytesIO(encoded), formats=FORMATS)
        elif isinstance(encoded, np.ndarray) and encoded.dtype == np.uint8:
            is_gray = encoded.ndim == 3 and encoded.shape[2] == 1
            encoded = module.fromarray(encoded[..., 0] if is_gray else encoded)
        elif not isinstance(encoded, module.Image):
            kind = getattr(encoded, "dtype", type(encoded).__qualname__)
            raise TypeError(f"{kind}, expected bytes, uint8 pixels or a Pillow image")
        image = operations.exif_transpose(encoded)
        if image.mode.startswith("I"):
            image = module.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
        return image.convert("RGB" if channels == 3 else "L")


# Decoders raise these for damaged files; OverflowError and MemoryError come from sizes in a header.
_DECODING_ERRORS: tuple[type[Exception], ...] = (
    *(OSError, ValueError, SyntaxError, LookupError, TypeError, EOFError),
    *(OverflowError, MemoryError, struct.error, zlib.error),
)


def center_crop(image: Any, *, size: int, fraction: float) -> Any:
    """Return the center of an image, `size` × `size` pixels.

    The shorter side is resized to `size / fraction` pixels first, as torchvision's Resize and
    CenterCrop do.
    """
    short = max(round(size / fraction), size)
    width, height = (int(short * side / min(image.size)) for side in image.size)
    image = image.resize((width, height), pillow().Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))
