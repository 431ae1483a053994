"""IdxImages: files of MNIST's form, written here byte by byte."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from layerkit_inputs import IdxImages
from layerkit_inputs.arrays.idx_images import read_idx
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.testing import laws


def idx(array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}i", *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path):
    images = np.arange(5 * 4 * 3).reshape(5, 4, 3)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.arange(5) % 3))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images[:2])))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([7, 8]))))
    return tmp_path


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, folder):
    law(
        lambda **more: IdxImages(
            **{"batch_size": 4, "folder": str(folder), "image_size": (4, 3), **more}
        )
    )


def test_pixels_and_labels_are_those_of_the_files(folder):
    source = IdxImages(batch_size=2, folder=str(folder), split="test", image_size=(4, 3))
    batch = source.get_next()
    expected = np.arange(2 * 4 * 3).reshape(2, 4, 3, 1) / 255
    np.testing.assert_allclose(batch.inputs, expected, rtol=1e-6)
    assert batch.inputs.dtype == np.float32
    assert batch.labels.tolist() == [7, 8] and batch.labels.dtype == np.int32
    assert batch.provenance.tolist() == [0, 1]


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0\x0d\x01", b"\0\0\x08\x03\0\0", idx(np.zeros((2, 2)))[:-1]],
    ids=["empty", "floats", "no sizes", "truncated"],
)
def test_damaged_files_raise(raises, data, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(data)
    with raises(BadRecordError, owner=str(path)):
        read_idx(path)


def test_blank_batch_has_the_spec_of_a_read_batch(folder):
    fields = {"folder": str(folder), "image_size": (4, 3), "is_training": True}
    blank = IdxImages.blank_batch(IdxImages.HParams.config(**fields), 2)
    assert spec_of(blank) == spec_of(IdxImages(batch_size=2, **fields).get_next())
