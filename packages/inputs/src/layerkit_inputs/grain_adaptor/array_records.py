"""ArrayRecord files as one numbered sequence of records, with errors that say where they stand.

ArrayRecord (https://github.com/google/array_record) finds any record by its number and keeps a hash
of each chunk. Its Python reader, however, takes a missing, empty, truncated or foreign file for one
of no records. Here such a file is refused when it is opened, and a damaged record when it is read.

ArrayRecordFiles is what Grain calls a source, so it goes into a pipeline as it is:

    grain.MapDataset.source(ArrayRecordFiles(paths)).map(parse)
"""

from __future__ import annotations

import bisect
import collections
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerkit_inputs.bad_records import BadRecordError, BadRecords
from layerkit_inputs.extras import require

WRITER_OPTIONS = "group_size:1"
"""For files to be read by number: each record can be decoded alone."""

_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_READ_BUFFER_BYTES = 1 << 15
_MOST_OPEN = 256


def open_array_record(path: str | os.PathLike[str], *, num_bytes: int | None = None) -> Any:
    """A reader of the file, for records by number.

    Args:
      path: The file.
      num_bytes: How large it must be, where that is known.

    Raises:
      FileNotFoundError: there is no such file.
      BadRecordError: it is truncated, or no ArrayRecord file.
    """
    path = os.fspath(path)
    module = require("array_record.python.array_record_module", needed_by="ArrayRecordFiles")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such ArrayRecord file.")
    size = os.path.getsize(path)
    if num_bytes is not None and size != num_bytes:
        raise BadRecordError(
            f"{path}: {size} bytes, but {num_bytes} were written; the file is truncated or another."
        )
    reader = module.ArrayRecordReader(
        path, options=_READER_OPTIONS, file_reader_buffer_size=_READ_BUFFER_BYTES
    )
    if not reader.ok():
        raise BadRecordError(
            f"{path}: {size} bytes, but no whole ArrayRecord file; it is truncated, damaged or of "
            "another format."
        )
    return reader


class ArrayRecordFiles:
    """The records of several ArrayRecord files, numbered from 0 through all of them.

    Nothing is opened before it is needed; at most 256 files are kept open. Safe to read from
    several threads, and to send to another process.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        num_records: Sequence[int] | None = None,
        num_bytes: Sequence[int] | None = None,
    ):
        """Names the files.

        Args:
          paths: The files, in the order of their records' numbers.
          num_records: Records of each; None: the files are asked when first needed.
          num_bytes: Size of each, checked when it is opened; None: not known.
        """
        if isinstance(paths, (str, os.PathLike)) or not paths:
            raise ValueError(f"ArrayRecordFiles: paths={paths!r}; expected a list of files.")
        self.paths = [os.fspath(path) for path in paths]
        self._num_bytes = None if num_bytes is None else list(num_bytes)
        self._num_records = None if num_records is None else list(num_records)
        self._ends: np.ndarray | None = None
        self._readers: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"ArrayRecordFiles({len(self.paths)} files from {self.paths[0]} on)"

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "_lock"}
        return {**kept, "_readers": collections.OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def __len__(self) -> int:
        ends = self.record_ends
        return int(ends[-1])

    def __getitem__(self, number: int) -> bytes:
        """The record of this number; raises BadRecordError where it is damaged."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self!r}: record {number}; there are {len(self)}.")
        file, within = self._place_of(number)
        record = self._read_one(self._reader(file), file, within, BadRecords())
        assert record is not None
        return record

    @property
    def record_ends(self) -> np.ndarray:
        """int64 `[files]`: running sum of the files' numbers of records."""
        with self._lock:
            if self._ends is None:
                if self._num_records is None:
                    files = range(len(self.paths))
                    self._num_records = [self._reader(file).num_records() for file in files]
                self._ends = np.cumsum(self._num_records, dtype=np.int64)
            return self._ends

    def read(self, numbers: Sequence[int] | np.ndarray, bad: BadRecords) -> list[bytes | None]:
        """Records by number, in the order asked for; None for one that is skipped.

        Args:
          numbers: From 0, below `len(self)`.
          bad: What to do with damaged records.

        Raises:
          IndexError: there is no record of that number.
          BadRecordError: a record is damaged and `bad` refuses it, or a file cannot be opened.
        """
        wanted = np.asarray(numbers, np.int64)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"{self!r}: records {wanted.tolist()}; there are {len(self)}.")
        files = np.searchsorted(self.record_ends, wanted, side="right")
        records: list[bytes | None] = [None] * len(wanted)
        for file in np.unique(files).tolist():
            begin = int(self.record_ends[file - 1]) if file else 0
            places = np.flatnonzero(files == file)
            found = self._read_file(file, (wanted[places] - begin).tolist(), bad)
            for place, record in zip(places.tolist(), found, strict=True):
                records[place] = record
        return records

    def locate(self, number: int) -> tuple[str, int]:
        """The file of a record, and the record's number in it."""
        file, within = self._place_of(number)
        return self.paths[file], within

    def close(self) -> None:
        """Lets go of the files; they are opened again when needed."""
        with self._lock:
            self._readers.clear()

    def _read_file(self, file: int, records: list[int], bad: BadRecords) -> list[bytes | None]:
        reader = self._reader(file)
        try:
            return list(reader.read(records))
        except RuntimeError:  # one of them is damaged: which?
            return [self._read_one(reader, file, record, bad) for record in records]

    def _read_one(self, reader: Any, file: int, record: int, bad: BadRecords) -> bytes | None:
        try:
            return reader.read([record])[0]
        except RuntimeError as error:
            problem = f"the record is damaged ({str(error).partition(';')[0]})."
            bad.report(file=self.paths[file], record=record, problem=problem)
            return None

    def _place_of(self, number: int) -> tuple[int, int]:
        """The number of a record's file, and the record's in it."""
        ends = self.record_ends
        file = bisect.bisect_right(ends, number)
        return file, int(number - (ends[file - 1] if file else 0))

    def _open(self, file: int) -> Any:
        num_bytes = None if self._num_bytes is None else self._num_bytes[file]
        reader = open_array_record(self.paths[file], num_bytes=num_bytes)
        expected = None if self._num_records is None else self._num_records[file]
        if expected is not None and reader.num_records() != expected:
            raise BadRecordError(
                f"{self.paths[file]}: {reader.num_records()} records, but {expected} were written; "
                "it is another file."
            )
        return reader

    def _reader(self, file: int) -> Any:
        with self._lock:
            if file not in self._readers:
                self._readers[file] = self._open(file)
            self._readers.move_to_end(file)
            # One that another thread still reads from is closed when that thread lets go of it.
            while len(self._readers) > _MOST_OPEN:
                self._readers.popitem(last=False)
            return self._readers[file]


def find_array_records(folder: str | os.PathLike[str]) -> list[str]:
    """The `*.array_record*` files of a folder, by name.

    Raises:
      FileNotFoundError: there are none.
    """
    found = sorted(
        str(path) for path in Path(folder).glob("*.array_record*") if path.name[0] != "."
    )
    if not found:
        raise FileNotFoundError(f"{folder}: no *.array_record files there.")
    return found
