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


class SplitWriter:
    """Writer of the documents of a split, in constant memory."""

    def __init__(self, folder: Path, *, dtype: str, block_length: int = BLOCK_LENGTH):
        """Create the folder of a split.

        Args:
          folder: Folder to create.
          dtype: Type of the ids, `uint16` or `int32`.
          block_length: Number of ids in a block.
        """
        self._records = require_extra(
            "array_record.python.array_record_module", needed_by="SplitWriter"
        )
        folder.mkdir()
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._block_bytes = block_length * self._dtype.itemsize
        self._ends = (folder / ENDS_FILE).open("wb")
        self._ends_crc32 = 0
        self._num_documents = 0
        self._num_predictions = 0
        self._place: int | None = None
        self._writer: Any = None  # of the open shard
        self._shards: list[Shard] = []

    def __enter__(self) -> SplitWriter:
        """Return the writer."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files; without `finish`, the split is incomplete."""
        self._ends.close()
        if self._writer is not None:
            self._writer.close()

    def add(self, ids: np.ndarray, *, place: int) -> None:
        """Write a document.

        Args:
          ids: Two or more token ids `[length]`, with the start id and the end id, if any.
          place: Number of the part of the input. A new number begins a new shard.
        """
        if self._writer is None or place != self._place:
            self._finish_shard()
            self._place = place
            self._path = self._folder / f"tokens-{len(self._shards):05d}.array_record"
            self._writer = self._records.ArrayRecordWriter(str(self._path), WRITER_OPTIONS)
            self._pending = bytearray()
            self._num_bytes = self._crc32 = self._block_crc32 = 0
        data = ids.astype(self._dtype).tobytes()
        self._pending += data
        self._num_bytes += len(data)
        self._crc32 = zlib.crc32(data, self._crc32)
        while len(self._pending) >= self._block_bytes:
            self._write_block()
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

    def _write_block(self) -> None:
        block = bytes(self._pending[: self._block_bytes])
        del self._pending[: self._block_bytes]
        self._block_crc32 = zlib.crc32(block)
        self._writer.write(block)

    def _finish_shard(self) -> None:
        if self._writer is None:
            return
        if self._pending:
            self._write_block()
        self._writer.close()
        self._writer = None
        _sync(self._path)
        self._shards.append(
            Shard(
                file=self._path.name,
                num_bytes=self._path.stat().st_size,
                num_ids=self._num_bytes // self._dtype.itemsize,
                crc32=self._crc32,
                last_block_crc32=self._block_crc32,
            )
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
