"""Checks how much memory the arrays of a TensorStore checkpoint take before they are decompressed.

TensorStore decompresses a chunk before it compares its size with the shape of the array, so a small
file of somebody else could fill the memory. Here the frames of each chunk are read without
decompressing them. The index of the OCDBT database is compressed as well and is not checked: it is
decompressed by TensorStore when the database is opened.
"""

from __future__ import annotations

import json
import math
import os
import urllib.parse
from collections.abc import Mapping

from etils import epath

from layerkit_runner.checkpointing.errors import DamagedCheckpointError
from layerkit_runner.checkpointing.structure import LeafPath, LeafSpec, join
from layerkit_runner.files.atomic_write import is_remote

# A block of a Zstandard frame holds at most so many bytes. Writers also end blocks earlier.
_BLOCK_BYTES = 128 * 2**10
_SPARE_BLOCKS = 64
_BLOCKS_FOR_ONE = 16
_MAGIC = b"\x28\xb5\x2f\xfd"
_RAW, _RLE, _COMPRESSED = range(3)


def check_decoded_sizes(state_directory: epath.Path, leaves: Mapping[LeafPath, LeafSpec]) -> None:
    """Raise an error if a chunk of these arrays decompresses to more than its array holds.

    Reads the compressed bytes, one chunk at a time.

    Args:
      state_directory: The folder of a state that TensorStore wrote.
      leaves: Shape and dtype of each array, by path.

    Raises:
      DamagedCheckpointError: Names the array and what is declared.
    """
    import tensorstore as ts

    text = os.fspath(state_directory)
    base = text if is_remote(text) else f"file://{urllib.parse.quote(text)}"
    for path, spec in leaves.items():
        try:
            store = ts.KvStore.open({"driver": "ocdbt", "base": f"{base.rstrip('/')}/"}).result()
            prefix = f"{'.'.join(path)}/".encode()
            limit = _chunk_bytes(json.loads(store[prefix + b".zarray"]), spec)
            for key in store.list(ts.KvStore.KeyRange(prefix, prefix[:-1] + b"0")).result():
                if key != prefix + b".zarray":
                    _check_frame(store[key], limit)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DamagedCheckpointError(
                f"The checkpoint {state_directory} cannot be read safely: array={join(path)}:"
                f" {error}. Expected chunks of {spec}. Save or copy the checkpoint anew."
            ) from error


def _chunk_bytes(metadata: Mapping[str, object], spec: LeafSpec) -> int:
    """Return the bytes of a decompressed chunk."""
    shape, chunks, compressor = (metadata[name] for name in ("shape", "chunks", "compressor"))
    if shape != list(spec.shape) or not isinstance(chunks, list) or len(chunks) != len(spec.shape):
        raise ValueError(f"shape={shape}, chunks={chunks}")
    if any(not 1 <= chunk <= size for chunk, size in zip(chunks, spec.shape, strict=True)):
        raise ValueError(f"chunks={chunks} of shape={shape}")
    if not isinstance(compressor, dict) or compressor.get("id") != "zstd":
        raise ValueError(f"compressor={compressor}; only zstd can be checked")
    return math.prod(chunks) * spec.dtype.itemsize


def _check_frame(chunk: bytes, limit: int) -> None:
    """Raise ValueError if a Zstandard frame declares or can hold more than `limit` bytes.

    The decoder compares the declared size with the real one after the last block alone, so the
    blocks are counted too.
    """
    if chunk[:4] != _MAGIC:
        raise ValueError("a chunk is no Zstandard frame")
    descriptor = chunk[4]
    is_single, size_code = bool(descriptor & 0x20), descriptor >> 6
    position = 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3]
    size_bytes = (int(is_single), 2, 4, 8)[size_code]
    if not size_bytes:
        raise ValueError("a chunk does not declare its size")
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
