"""Writer of the files of a split of a token store; see `layerkit_inputs.text.token_store`."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from layerkit_inputs.base.errors import require_extra
from layerkit_inputs.grain.array_records import WRITER_OPTIONS
from layerkit_inputs.text.token_store import BLOCK_LENGTH, ENDS_FILE, Shard, SplitAbout


class _ShardWriter:
    """Writer of one file of blocks."""

    def __init__(self, path: Path, dtype: np.dtype, block_length: int):
        module = require_extra("array_record.python.array_record_module", needed_by="SplitWriter")
        self._path = path
        self._writer: Any = module.ArrayRecordWriter(str(path), WRITER_OPTIONS)
        self._block_bytes = block_length * dtype.itemsize
        self._itemsize = dtype.itemsize
        self._pending = bytearray()
        self._num_bytes = 0
        self._crc32 = 0
        self._block_crc32 = 0

    def add(self, data: bytes) -> None:
        self._pending += data
        self._num_bytes += len(data)
        self._crc32 = zlib.crc32(data, self._crc32)
        whole = len(self._pending) - len(self._pending) % self._block_bytes
        for begin in range(0, whole, self._block_bytes):
            self._write(bytes(self._pending[begin : begin + self._block_bytes]))
        del self._pending[:whole]

    def finish(self) -> Shard:
        if self._pending:
            self._write(bytes(self._pending))
        self._writer.close()
        _sync(self._path)
        size = self._path.stat().st_size
        return Shard(
            file=self._path.name,
            num_bytes=size,
            num_ids=self._num_bytes // self._itemsize,
            crc32=self._crc32,
            last_block_crc32=self._block_crc32,
        )

    def close(self) -> None:
        self._writer.close()

    def _write(self, block: bytes) -> None:
        self._block_crc32 = zlib.crc32(block)
        self._writer.write(block)


class SplitWriter:
    """Writer of the documents of a split, in constant memory."""

    def __init__(self, folder: Path, *, dtype: str, block_length: int = BLOCK_LENGTH):
        """Create the folder of a split.

        Args:
          folder: Folder to create.
          dtype: Type of the ids, `uint16` or `int32`.
          block_length: Number of ids in a block.
        """
        folder.mkdir()
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._block_length = block_length
        self._ends = (folder / ENDS_FILE).open("wb")
        self._ends_crc32 = 0
        self._num_documents = 0
        self._num_predictions = 0
        self._shard: _ShardWriter | None = None
        self._place: int | None = None
        self._shards: list[Shard] = []

    def __enter__(self) -> SplitWriter:
        """Return the writer."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files; without `finish`, the split is incomplete."""
        self._ends.close()
        if self._shard is not None:
            self._shard.close()

    def add(self, ids: np.ndarray, *, place: int) -> None:
        """Write a document.

        Args:
          ids: Two or more token ids `[length]`, with the start id and the end id, if any.
          place: Number of the part of the input. A new number begins a new shard.
        """
        if self._shard is None or place != self._place:
            self._finish_shard()
            path = self._folder / f"tokens-{len(self._shards):05d}.array_record"
            self._shard = _ShardWriter(path, self._dtype, self._block_length)
            self._place = place
        self._shard.add(ids.astype(self._dtype).tobytes())
        self._num_documents += 1
        self._num_predictions += len(ids) - 1
        end = np.array(self._num_predictions, "<i8").tobytes()
        self._ends_crc32 = zlib.crc32(end, self._ends_crc32)
        self._ends.write(end)

    def finish(self) -> SplitAbout:
        """Write everything to disk, and return a description of the split."""
        self._finish_shard()
        self._ends.close()
        _sync(self._folder / ENDS_FILE)
        _sync(self._folder)
        return SplitAbout(
            num_documents=self._num_documents,
            num_ids=self._num_predictions + self._num_documents,
            ends_crc32=self._ends_crc32,
            shards=tuple(self._shards),
        )

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._shards.append(self._shard.finish())
            self._shard = None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
