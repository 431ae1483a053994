"""Inputs that read the rows of Grain pipelines by number (https://github.com/google/grain).

The pipeline yields rows, which are dictionaries of arrays. The input makes batches and handles
hosts, epochs, padding and states. Each of the two kinds of Grain data set has its input:

- GrainMapInput reads rows by number (`grain.MapDataset`). Its state is one count, from which any
  number of hosts can resume. Prefer this input.
- GrainIterInput reads rows in order (`grain.IterDataset`), for filters, packing and interleaved
  files, whose rows have no numbers. Each host has its own pipeline and state.

    def rows():
        files = ArrayRecordFiles(sorted(glob.glob("images/*.array_record")))
        return grain.MapDataset.source(files).map(parse).random_map(augment, seed=1)

    GrainMapInput.HParams.config(dataset=rows, batch_size=32, is_training=True)
"""

from __future__ import annotations

import concurrent.futures
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.errors import (
    BadRecordError,
    OnBadRecord,
    is_storage_failure,
    require_extra,
)
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.grain.array_records import ArrayRecordFiles
from layerkit_inputs.grain.row_batches import stack_rows, to_arrays


@runtime_checkable
class RowSource(Protocol):
    """Rows that can be read in any order by their number, such as a `grain.MapDataset`."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: Any) -> Any:
        """Return the row with this number. For a slice, return a source of its rows."""


_EXPECTED_DATASET = (
    "a grain.MapDataset without repeat(), or a function that returns one; GrainIterInput reads a"
    " grain.IterDataset"
)


class GrainRows(IndexedInput):
    """Base class of inputs that make a `grain.MapDataset` from their fields and read it by number.

    The input shuffles and repeats the data set (`shuffle`, `shuffle_window`, `is_training`). The
    data set itself should do neither. In epoch `e`, row `i` of `n` is read as number `e * n + i`,
    as Grain's own `repeat` does, so random transformations differ by epoch.

    If reading a row raises ValueError or OSError, the input raises this error by default. With
    `on_bad_record="skip"` it counts the row instead. Training then reads the next readable row in
    its place, and evaluation uses a row of padding.
    """

    num_threads: int = 0
    """Number of threads that read the rows of a batch, for slow storage; 0 for no threads."""
    on_bad_record: OnBadRecord = "refuse"
    """Policy for rows that cannot be read: `refuse` raises the error, `skip` counts the row."""

    def __post_init__(self) -> None:
        """Check the fields; the data set is made when it is first needed."""
        super().__post_init__()
        self._check_at_least(0, "num_threads")
        self._epochs = np.zeros(0, np.int64)
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def _make_dataset(self) -> Any:
        """Return the data set, a `grain.MapDataset` of rows."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _make_dataset().")

    @functools.cached_property
    def _dataset(self) -> Any:
        grain = require_extra("grain", needed_by=type(self).__qualname__)
        dataset = self._make_dataset()
        is_valid = isinstance(dataset, grain.MapDataset) and len(dataset) < 2**62
        require(is_valid, self._label, "dataset", type(dataset).__qualname__, _EXPECTED_DATASET)
        return dataset

    def _num_rows(self) -> int:
        return self._length

    @functools.cached_property
    def _length(self) -> int:
        """Length of the data set, cached because Grain recomputes it at each call."""
        return len(self._dataset)

    def _read_at(self, positions: np.ndarray, num_rows: int | None) -> tuple[NestedMap, np.ndarray]:
        assert num_rows is not None
        self._epochs = positions // num_rows
        return super()._read_at(positions, num_rows)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        places = list(zip(rows.tolist(), self._epochs.tolist(), strict=True))
        read = self._read_places(places)
        self._is_unreadable = np.array([row is None for row in read])
        readable = [
            self._read_after(place) if row is None else row
            for row, place in zip(read, places, strict=True)
        ]
        return stack_rows(readable, name_of=lambda index: self._name_of(rows[index]))

    def _name_of(self, row: int) -> str:
        return f"{self._label}, row {row}"

    def _read_places(self, places: list[tuple[int, int]]) -> list[NestedMap | None]:
        """Return the row at each place (row number, epoch), or None if it is skipped."""
        if self.num_threads and self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(self.num_threads)
        run = map if self._pool is None else self._pool.map
        read: list[NestedMap | None] = []
        for (row, _), answer in zip(places, run(self._try_to_read, places), strict=True):
            if isinstance(answer, NestedMap):
                read.append(answer)
                continue
            if self.on_bad_record == "refuse":
                raise answer
            self._bad.report(file=self._label, record=row, problem=str(answer))
            read.append(None)
        return read

    def _try_to_read(self, place: tuple[int, int]) -> NestedMap | ValueError | OSError:
        """Return the row at a place (row number, epoch), or the error raised while reading it."""
        row, epoch = place
        try:
            return to_arrays(self._dataset[epoch * self._length + row])
        except BadRecordError as error:
            error.owner = error.owner or self._name_of(row)
            return error
        except (ValueError, OSError) as error:
            if is_storage_failure(error):
                raise
            error.add_note(f"In {self._name_of(row)}.")
            return error

    def _read_after(self, place: tuple[int, int]) -> NestedMap:
        """Return the next readable row after an unreadable one."""
        row, epoch = place
        num_rows = self._length
        for step in range(1, num_rows):
            (next_row,) = self._read_places([((row + step) % num_rows, epoch)])
            if next_row is not None:
                return next_row
        raise self._config_error(
            f"none of {num_rows} rows can be read; the first error is: {self._bad.first[0]}"
        )

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class GrainMapInput(GrainRows):
    """An input that reads rows of a `grain.MapDataset` by number, shuffles and repeats them."""

    dataset: RowSource | Callable[[], RowSource] | None = None
    """A `grain.MapDataset` of rows, or a function without arguments that returns one. Required."""

    def _make_dataset(self) -> Any:
        return self.dataset() if callable(self.dataset) else self.dataset


class ArrayRecordRows(GrainRows):
    """An input of ArrayRecord files with one serialized row per record.

    A state can be restored only if each file has the same number of records as before. A missing or
    incomplete file raises even with `on_bad_record="skip"`, since it would change the numbers of
    all later rows.
    """

    paths: Sequence[str] | None = None
    """Files in the order of their rows' numbers."""
    parse: Callable[[bytes], Any]
    """Function that parses a serialized record and returns its row, a dictionary of arrays."""

    def _make_dataset(self) -> Any:
        grain = require_extra("grain", needed_by=type(self).__qualname__)
        return grain.MapDataset.source(self._files).map(self.parse)

    @functools.cached_property
    def _files(self) -> ArrayRecordFiles:
        return ArrayRecordFiles(self.paths or ())

    def _fingerprint(self) -> dict[str, Any]:
        ends = self._files.record_ends
        return {"num_files": len(ends), "files_crc32": zlib.crc32(ends.tobytes())}

    def _close(self) -> None:
        super()._close()
        if "_files" in vars(self):
            self._files.close()
