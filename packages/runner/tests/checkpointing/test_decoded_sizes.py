"""Chunks that would fill the memory are found before they are decompressed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from etils import epath

from layerkit_runner.checkpointing import CheckpointManager, DamagedCheckpointError, integrity
from layerkit_runner.checkpointing.chunks import check_arrays, check_decoded_sizes
from layerkit_runner.checkpointing.structure import LeafPath, LeafSpec
from layerkit_runner.init_from.sources import StoredCheckpoint

LEAVES: dict[LeafPath, LeafSpec] = {
    ("params", "w"): LeafSpec((300, 400), np.dtype(np.float32)),
    ("params", "zeros"): LeafSpec((600, 400), np.dtype(np.float32)),
    ("step",): LeafSpec((), np.dtype(np.int32)),
}
RLE_OF_128_KIB = (128 * 2**10 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
LAST = (1).to_bytes(3, "little")


def frame(declared: int, num_blocks: int) -> bytes:
    """A Zstandard frame that declares so many bytes and holds so many times 128 KiB."""
    header = b"\x28\xb5\x2f\xfd\xa0" + declared.to_bytes(4, "little")
    return header + RLE_OF_128_KIB * num_blocks + LAST


@pytest.fixture
def folder(tmp_path: Path) -> epath.Path:
    return saved(tmp_path)


def saved(directory: Path) -> epath.Path:
    """Return the folder after a checkpoint of `LEAVES` was saved in it."""
    w = jax.random.normal(jax.random.key(0), (300, 400))
    state = {"params": {"w": w, "zeros": jnp.zeros((600, 400))}, "step": jnp.int32(1)}
    with CheckpointManager(directory) as manager:
        manager.save(1, state, input_states={}, metadata={}, force=True)
    return epath.Path(directory)


def replace(folder: epath.Path, key: str, value: bytes) -> None:
    """Changes a value of the database, and the manifest as whoever wrote it could."""
    step = folder / "checkpoint_00000001"
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{step}/state/"}).result()
    assert key.encode() in store.list().result()
    store[key] = value
    integrity.write(step, manifest_directory=step / "integrity")


def test_checkpoints_of_ours_pass(folder: epath.Path):
    check_decoded_sizes(folder / "checkpoint_00000001" / "state", LEAVES)


@pytest.mark.parametrize("name", ["a b", "a#b", "a?b", "a%41b"])
def test_folder_whose_name_has_characters_of_urls_passes(tmp_path: Path, name: str):
    folder = saved(tmp_path / name)
    check_decoded_sizes(folder / "checkpoint_00000001" / "state", LEAVES)


@pytest.mark.parametrize(
    "value",
    [
        frame(2**31, 50_000),
        frame(480_000, 50_000),
        frame(480_000, 1) + frame(480_000, 50_000),
        b"x" * 100,
        frame(480_000, 1)[:-2],
    ],
    ids=["declared size", "size of the blocks", "second frame", "no frame", "cut off"],
)
def test_chunk_that_is_too_large_is_an_error(raises, folder: epath.Path, value: bytes):
    replace(folder, "params.w/0.0", value)
    with raises(DamagedCheckpointError, field="array", value="params/w"):
        check_decoded_sizes(folder / "checkpoint_00000001" / "state", LEAVES)
    source = StoredCheckpoint(folder, step=1, report=pytest.fail)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.ShapeDtypeStruct((300, 400), jnp.float32, sharding=sharding)
    with raises(DamagedCheckpointError, field="array", value="params/w"):
        source.read({("params", "w"): target})


def test_chunks_that_are_larger_than_their_array_are_an_error(raises, folder: epath.Path):
    step = folder / "checkpoint_00000001"
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{step}/state/"}).result()
    text = store["params.w/.zarray"].decode()
    replace(folder, "params.w/.zarray", text.replace("[300,400]", "[30000,40000]", 1).encode())
    with raises(DamagedCheckpointError, field="array", value="params/w"):
        check_decoded_sizes(step / "state", LEAVES)


def gzip_array(tmp_path: Path, content: bytes) -> epath.Path:
    """A folder of one Zarr array, `float32[2, 8]`, whose only chunk is `content`."""
    folder = tmp_path / "w"
    folder.mkdir()
    metadata = {
        "zarr_format": 2,
        "shape": [2, 8],
        "chunks": [2, 8],
        "dtype": "<f4",
        "compressor": {"id": "gzip", "level": 1},
    }
    (folder / ".zarray").write_text(json.dumps(metadata))
    (folder / "0.0").write_bytes(content)
    return epath.Path(tmp_path)


def test_gzip_chunk_of_the_size_of_the_array_passes(tmp_path: Path):
    folder = gzip_array(tmp_path, gzip.compress(bytes(64)))
    check_arrays(folder, {"w": LeafSpec((2, 8), np.dtype(np.float32))}, is_ocdbt=False)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (gzip.compress(bytes(65)), "holds more than 64 bytes"),
        (gzip.compress(bytes(2**30 // 8), 1), "holds more than 64 bytes"),
        (gzip.compress(bytes(64))[:-9], "cut off"),
        (gzip.compress(bytes(64)) * 2, "bytes after its stream"),
        (b"no gzip", "incorrect header check"),
    ],
    # The header of gzip holds the time, so the bytes are no stable name.
    ids=["too large", "far too large", "cut off", "two streams", "no gzip"],
)
def test_gzip_chunk_that_does_not_fit_is_an_error(tmp_path: Path, chunk: bytes, reason: str):
    folder = gzip_array(tmp_path, chunk)
    with pytest.raises(DamagedCheckpointError, match=reason):
        check_arrays(folder, {"w": LeafSpec((2, 8), np.dtype(np.float32))}, is_ocdbt=False)
