"""ArrayRecordFiles: ArrayRecord files as one numbered sequence of records, with precise errors.

ArrayRecord (https://github.com/google/array_record) finds any record by its number and keeps a hash
of each chunk. But its Python reader reads a missing, empty, truncated or foreign file as a file
without records. This module raises an error when such a file is opened, and when a damaged record
is read.

ArrayRecordFiles is a Grain source, so it can begin a pipeline:

    grain.MapDataset.source(ArrayRecordFiles(paths)).map(parse)
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit.config.checks import require
from layerkit_inputs.base.errors import BadRecordError, BadRecords, require_extra

WRITER_OPTIONS = "group_size:1"
"""Writer options for files that are read by number: each record can be decoded alone."""

_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_READ_BUFFER_BYTES = 1 << 15
_MOST_OPEN = 256


def open_array_record(path: str | os.PathLike[str]) -> Any:
    """Return a reader of an ArrayRecord file that reads records by number.

    Args:
      path: Path of the file.

    Raises:
      FileNotFoundError: The file does not exist.
      BadRecordError: The file is truncated, or not an ArrayRecord file.
    """
    path = os.fspath(path)
    module = require_extra("array_record.python.array_record_module", needed_by="ArrayRecordFiles")
    size = os.path.getsize(path)
    reader = module.ArrayRecordReader(
        path, options=_READER_OPTIONS, file_reader_buffer_size=_READ_BUFFER_BYTES
    )
    if not reader.ok():
        raise BadRecordError(
            "not a complete ArrayRecord file", owner=path, field="bytes", value=size
        )
    return reader


class ArrayRecordFiles:
    """A numbered sequence of the records of several ArrayRecord files.

    Files are opened when needed, and at most 256 are kept open. The object may be read by several
    threads and pickled.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        num_records: Sequence[int] | None = None,
    ):
        """Set the files without opening them.

        Args:
          paths: Paths of the files, in the order of their record numbers.
          num_records: Number of records of each file. None: read from the files when needed.
        """
        require(paths, "ArrayRecordFiles", "paths", paths, "a list of files")
        self.paths = [os.fspath(path) for path in paths]
        self._num_records = None if num_records is None else list(num_records)
        self._ends: np.ndarray | None = None
        self._readers: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        """Return the number of files and the first file; Grain shows it for a source."""
        return f"ArrayRecordFiles({len(self.paths)} files from {self.paths[0]} on)"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open files and the lock."""
        kept = {name: value for name, value in vars(self).items() if name != "_lock"}
        return {**kept, "_readers": collections.OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled object, with a new lock."""
        vars(self).update(state, _lock=threading.RLock())

    def __len__(self) -> int:
        """Return the number of records in all files."""
        ends = self.record_ends
        return int(ends[-1])

    def __getitem__(self, number: int) -> bytes:
        """Return a record by number; raise `BadRecordError` if it is damaged."""
        (record,) = self.read([number], BadRecords())
        assert record is not None  # the default policy raises
        return record

    @property
    def record_ends(self) -> np.ndarray:
        """Cumulative number of records by file, int64 `[files]`."""
        with self._lock:
            if self._ends is None:
                if self._num_records is None:
                    files = range(len(self.paths))
                    self._num_records = [self._reader(file).num_records() for file in files]
                self._ends = np.cumsum(self._num_records, dtype=np.int64)
            return self._ends

    def read(self, numbers: Sequence[int] | np.ndarray, bad: BadRecords) -> list[bytes | None]:
        """Return records in the order of `numbers`, with None for each skipped record.

        Args:
          numbers: Record numbers in [0, `len(self)`).
          bad: Policy for damaged records.

        Raises:
          IndexError: A number is out of range.
          BadRecordError: A record is damaged and `bad` does not skip it, or a file is invalid.
        """
        files, within = self._places_of(np.asarray(numbers, np.int64))
        records: list[bytes | None] = [None] * len(files)
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            read = self._read_file(file, within[places].tolist(), bad)
            for place, record in zip(places.tolist(), read, strict=True):
                records[place] = record
        return records

    def locate(self, number: int) -> tuple[str, int]:
        """Return the path of the file of a record, and the number of the record in that file."""
        (file,), (within,) = self._places_of(np.array([number], np.int64))
        return self.paths[file], int(within)

    def close(self) -> None:
        """Close all files; they are opened again when needed."""
        with self._lock:
            self._readers.clear()

    def _read_file(self, file: int, records: list[int], bad: BadRecords) -> list[bytes | None]:
        reader = self._reader(file)
        try:
            return list(reader.read(records))
        except RuntimeError:  # at least one record is damaged
            return [self._read_one(reader, file, record, bad) for record in records]

    def _read_one(self, reader: Any, file: int, record: int, bad: BadRecords) -> bytes | None:
        try:
            return reader.read([record])[0]
        except RuntimeError as error:
            problem = f"the record is damaged ({str(error).partition(';')[0]})."
            bad.report(file=self.paths[file], record=record, problem=problem)
            return None

    def _places_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the files of records, and the numbers of the records in these."""
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= len(self)):
            raise IndexError(f"{self!r}: records {numbers.tolist()}; there are {len(self)}.")
        files = np.searchsorted(self.record_ends, numbers, side="right")
        return files, numbers - np.insert(self.record_ends, 0, 0)[files]

    def _open(self, file: int) -> Any:
        reader = open_array_record(self.paths[file])
        expected = None if self._num_records is None else self._num_records[file]
        if expected is not None and reader.num_records() != expected:
            problem = f"{reader.num_records()} records instead of {expected}"
            raise BadRecordError(problem, owner=self.paths[file])
        return reader

    def _reader(self, file: int) -> Any:
        with self._lock:
            if file not in self._readers:
                self._readers[file] = self._open(file)
            self._readers.move_to_end(file)
            # A reader in use by another thread is closed when that thread drops its reference.
            while len(self._readers) > _MOST_OPEN:
                self._readers.popitem(last=False)
            return self._readers[file]
