"""Checks the chunks of TensorStore's arrays before TensorStore decompresses them.

TensorStore decompresses a chunk before it compares its size with the shape of the array, so a
small file from another person could fill the memory. The functions here read the headers in the
compressed chunks. The index of an OCDBT database, which TensorStore decompresses when it opens the
database, is not checked.
"""

from __future__ import annotations

import math
import os
import urllib.parse
import zlib
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import TYPE_CHECKING, Any

from etils import epath

from layerkit_runner.checkpointing import structure
from layerkit_runner.checkpointing.errors import DamagedCheckpointError
from layerkit_runner.files.atomic_write import is_remote
from layerkit_runner.files.bounded_documents import parse_json

if TYPE_CHECKING:
    import tensorstore as ts

METADATA_KEY = ".zarray"
# Bound of the JSON text that describes one array.
_MAX_METADATA_BYTES = 64 * 2**10

# Largest block of a Zstandard frame. Writers also end blocks earlier.
_BLOCK_BYTES = 128 * 2**10
_SPARE_BLOCKS = 64
_BLOCKS_FOR_ONE = 16
_MAGIC = b"\x28\xb5\x2f\xfd"
_RAW, _RLE, _COMPRESSED = range(3)
_GZIP_PIECE_BYTES = 2**20
_READERS = 8


def open_store(state_directory: epath.Path, *, is_ocdbt: bool) -> ts.KvStore:
    """Open a folder of arrays as a store of keys, such as `params.w/.zarray`.

    Args:
      state_directory: Folder of arrays.
      is_ocdbt: True for an OCDBT database, False for one folder for each array.
    """
    import tensorstore as ts

    text = os.fspath(state_directory)
    base = f"{text if is_remote(text) else f'file://{urllib.parse.quote(text)}'}".rstrip("/") + "/"
    return ts.KvStore.open({"driver": "ocdbt", "base": base} if is_ocdbt else base).result()


def read_metadata(store: ts.KvStore, array: str) -> dict[str, Any]:
    """Return the Zarr metadata of an array.

    Raises:
      ValueError: It is missing, malformed or too long.
    """
    try:
        content = store[f"{array}/{METADATA_KEY}".encode()]
    except KeyError:
        raise ValueError(f"{METADATA_KEY} is missing") from None
    if len(content) > _MAX_METADATA_BYTES:
        raise ValueError(f"{METADATA_KEY} has {len(content):,} bytes")
    metadata = parse_json(content.decode())
    if not isinstance(metadata, dict):
        raise ValueError(f"{METADATA_KEY} is no JSON object")
    return metadata


def check_decoded_sizes(
    state_directory: epath.Path, leaves: Mapping[structure.LeafPath, structure.LeafSpec]
) -> None:
    """Raise an error if a chunk of a stored state decompresses to more than its array holds.

    Args:
      state_directory: The folder of a state that TensorStore wrote.
      leaves: Shape and dtype of each array, by path.

    Raises:
      DamagedCheckpointError: A chunk is malformed, or declares or holds too many bytes.
    """
    arrays = {".".join(path): spec for path, spec in leaves.items()}
    check_arrays(state_directory, arrays, is_ocdbt=True)


def check_arrays(
    state_directory: epath.Path, arrays: Mapping[str, structure.LeafSpec], *, is_ocdbt: bool
) -> None:
    """Raise an error if a chunk of an array decompresses to more than the array holds.

    Args:
      state_directory: Folder of arrays.
      arrays: Shape and dtype of each array, by its name in the store.
      is_ocdbt: True for an OCDBT database, False for one folder for each array.

    Raises:
      DamagedCheckpointError: A chunk is malformed, or declares or holds too many bytes.
    """

    def check(item: tuple[str, structure.LeafSpec]) -> None:
        array, spec = item
        try:
            _check_array(open_store(state_directory, is_ocdbt=is_ocdbt), array, spec)
        except (ValueError, KeyError, TypeError, IndexError, zlib.error) as error:
            raise DamagedCheckpointError(
                f"cannot be read safely: {error}",
                owner=str(state_directory),
                field="array",
                value=array.replace(".", "/"),
                expected=f"chunks of {spec}",
                hint="Save or copy the checkpoint again.",
            ) from error

    with futures.ThreadPoolExecutor(_READERS) as readers:
        for _ in readers.map(check, arrays.items()):
            pass


def _check_array(store: ts.KvStore, array: str, spec: structure.LeafSpec) -> None:
    import tensorstore as ts

    metadata = read_metadata(store, array)
    limit = _chunk_bytes(metadata, spec)
    check = _frame_check(metadata["compressor"])
    prefix = f"{array}/".encode()
    for key in store.list(ts.KvStore.KeyRange(prefix, prefix[:-1] + b"0")).result():
        if key != prefix + METADATA_KEY.encode():
            check(store[key], limit)


def _chunk_bytes(metadata: Mapping[str, Any], spec: structure.LeafSpec) -> int:
    """Return the bytes of a decompressed chunk."""
    shape, chunks = metadata["shape"], metadata["chunks"]
    if shape != list(spec.shape) or not isinstance(chunks, list) or len(chunks) != len(spec.shape):
        raise ValueError(f"shape={shape}, chunks={chunks}")
    if any(not 1 <= chunk <= size for chunk, size in zip(chunks, spec.shape, strict=True)):
        raise ValueError(f"chunks={chunks} of shape={shape}")
    return math.prod(chunks) * spec.dtype.itemsize


def _frame_check(compressor: Any) -> Callable[[bytes, int], None]:
    """Return the check of chunks with this compressor, `None` or `{"id": name}`."""
    checks = {"zstd": _check_frame, "gzip": _check_gzip, "zlib": _check_gzip}
    if isinstance(compressor, dict) and compressor.get("id") in checks:
        return checks[compressor["id"]]
    raise ValueError(f"compressor={compressor}; only {', '.join(checks)} can be checked")


def _check_gzip(chunk: bytes, limit: int) -> None:
    """Raise ValueError if a gzip or zlib stream holds more than `limit` bytes.

    The stream declares no size, so it is decompressed in small pieces, which are dropped.
    """
    # 32 added to the window detects gzip's and zlib's headers.
    decoder, size = zlib.decompressobj(32 + zlib.MAX_WBITS), 0
    while not decoder.eof:
        piece = decoder.decompress(chunk, _GZIP_PIECE_BYTES)
        size += len(piece)
        chunk = decoder.unconsumed_tail
        if size > limit:
            raise ValueError(f"a chunk holds more than {limit:,} bytes")
        if not piece and not chunk and not decoder.eof:
            raise ValueError("a chunk is cut off")
    if decoder.unused_data:
        raise ValueError("a chunk has bytes after its stream")


def _check_frame(chunk: bytes, limit: int) -> None:
    """Raise ValueError if a Zstandard frame declares or can hold more than `limit` bytes.

    The blocks are counted too, since a decoder compares the declared size with the real one only
    after the last block.
    """
    if chunk[:4] != _MAGIC:
        raise ValueError("a chunk is no Zstandard frame")
    descriptor = chunk[4]
    is_single, size_code = bool(descriptor & 0x20), descriptor >> 6
    position = 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3]
    size_bytes = (int(is_single), 2, 4, 8)[size_code]
    # Without a declared size, as older versions of TensorStore write it, the blocks are the bound.
    declared = int.from_bytes(chunk[position : position + size_bytes], "little")
    declared += 256 if size_bytes == 2 else 0
    if declared > limit:
        raise ValueError(f"a chunk declares {declared:,} bytes, and {limit:,} fit")
    position += size_bytes
    stored, num_compressed, is_last = 0, 0, False
    while not is_last:
        header = int.from_bytes(chunk[position : position + 3], "little")
        if position + 3 > len(chunk):
            raise ValueError("a chunk is cut off")
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        stored += size if kind in (_RAW, _RLE) else 0
        num_compressed += kind == _COMPRESSED
        position += 3 + (1 if kind == _RLE else size)
    if stored > limit or num_compressed > _SPARE_BLOCKS + _BLOCKS_FOR_ONE * limit // _BLOCK_BYTES:
        raise ValueError(f"a chunk holds {stored:,} bytes and {num_compressed:,} compressed blocks")
    if position + (4 if descriptor & 4 else 0) != len(chunk):
        raise ValueError("a chunk has bytes after its frame")
