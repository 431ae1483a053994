"""Decoding: modes, orientations, and files that are damaged, foreign or too large."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest

from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.images.decode_image import center_crop, decode_image
from layerkit_inputs.testing.image_files import encode_image

Image = pytest.importorskip("PIL.Image")


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(data, channels=3):
    return np.asarray(decode_image(data, channels=channels, owner="x"))


def test_every_mode_becomes_rgb_or_gray():
    gray = np.full((2, 3), 90, np.uint8)
    color = np.broadcast_to(np.uint8([90, 90, 90]), (2, 3, 3))
    alpha = np.dstack([color, np.zeros((2, 3), np.uint8)])
    files = [
        encode_image(gray),
        encode_image(color),
        encode_image(alpha),
        saved(Image.fromarray(gray).convert("P")),
        saved(Image.fromarray(color).convert("CMYK"), "TIFF"),
        saved(Image.fromarray(gray.astype(np.uint16) * 257)),
        {"bytes": encode_image(color), "path": None},
        gray[..., None],
        Image.fromarray(color),
    ]
    for number, data in enumerate(files):
        np.testing.assert_array_equal(decoded(data), color, err_msg=f"file {number}")
        np.testing.assert_array_equal(decoded(data, channels=1), gray, err_msg=f"file {number}")


def test_gray_pixels_of_one_column_are_read():
    assert decoded(np.uint8([[1], [2]]), channels=1).tolist() == [[1], [2]]


@pytest.mark.parametrize(
    "value", [None, "a.png", np.full((4, 4), 0.5, np.float32), np.full((4, 4), 9, np.int32)]
)
def test_other_types_raise_with_their_name(value, raises):
    with raises(BadRecordError, owner="x"):
        decoded(value)


def test_path_of_a_hugging_face_image_is_read(tmp_path):
    (tmp_path / "a.png").write_bytes(encode_image(np.full((2, 2), 7, np.uint8)))
    image = {"bytes": None, "path": str(tmp_path / "a.png")}
    assert (decoded(image, channels=1) == 7).all()
    with pytest.raises(FileNotFoundError):
        decoded({"bytes": None, "path": str(tmp_path / "b.png")})


@pytest.mark.parametrize(
    ("orientation", "expected"),
    [(1, [[0, 80], [160, 240]]), (3, [[240, 160], [80, 0]]), (6, [[160, 0], [240, 80]])],
)
def test_orientation_of_exif_is_applied(orientation, expected):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode_image(np.uint8([[0, 80], [160, 240]]), exif=exif)
    assert decoded(data, channels=1).tolist() == expected


def png_of(width, height):
    """Return the header of a PNG of that size, and no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + header
        + struct.pack(">I", zlib.crc32(header))
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        encode_image(np.zeros((40, 40, 3), np.uint8), "JPEG")[:200],
        encode_image(np.random.default_rng(0).integers(256, size=(40, 40, 3), dtype=np.uint8))[
            :-99
        ],
        encode_image(np.zeros((4, 4, 3), np.uint8), "GIF"),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        png_of(20_000, 20_000),
        png_of(2**31 - 1, 2**31 - 1),
    ],
    ids=["empty", "text", "jpeg", "png", "gif", "postscript", "bomb", "largest bomb"],
)
def test_damaged_foreign_and_huge_files_raise_with_their_name(data, raises):
    with raises(BadRecordError, owner="x"):
        decoded(data)


@pytest.mark.parametrize("size", [(37, 21), (8, 8), (5, 90), (64, 48), (49, 98)])
def test_center_is_that_of_resize_and_center_crop(size):
    # torchvision: the short side becomes 32 pixels, the long one int(32 * long / short).
    image = Image.fromarray(np.random.default_rng(0).integers(256, size=size[::-1], dtype=np.uint8))
    short = min(size)
    resized = image.resize(tuple(int(32 * side / short) for side in size), Image.BILINEAR)
    left, top = (round((side - 28) / 2) for side in resized.size)
    expected = np.asarray(resized)[top : top + 28, left : left + 28]
    np.testing.assert_array_equal(center_crop(image, size=28, fraction=0.875), expected)
