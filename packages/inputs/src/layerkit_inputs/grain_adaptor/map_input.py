"""Inputs made of Grain pipelines (https://github.com/google/grain).

A pipeline gives rows, dictionaries of arrays; batches, hosts, epochs, padding and states are made
here. There are two, as Grain has two kinds of data set:

- GrainMapInput reads any row by its number (`grain.MapDataset`). Its state is one count, and any
  number of hosts may go on from it. Prefer it.
- GrainIterInput reads rows one after the other (`grain.IterDataset`), for what has no numbers:
  filters, packing, interleaved files. Every host has a pipeline and a state of its own.

    def rows():
        files = ArrayRecordFiles(find_array_records("images/"))
        return grain.MapDataset.source(files).map(parse).random_map(augment, seed=1)

    GrainMapInput.HParams.config(dataset=rows, batch_size=32, is_training=True)
"""

from __future__ import annotations

import concurrent.futures
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.bad_records import BadRecordError, BadRecords, OnBadRecord
from layerkit_inputs.extras import require
from layerkit_inputs.grain_adaptor.array_records import ArrayRecordFiles
from layerkit_inputs.grain_adaptor.row_batches import blank_rows, check_row, stack_rows
from layerkit_inputs.indexed_input import IndexedInput

_POLICIES = ("refuse", "skip")


class GrainMapInput(IndexedInput):
    """Rows of a `grain.MapDataset`, by number.

    Leave shuffling and repeating to the input: `shuffle`, `shuffle_window` and `is_training` give
    every epoch another order and each row once. In epoch `e` row `i` of `n` is read as number
    `e * n + i`, as Grain's own `repeat` does, so random transformations differ in each epoch.

    A row that cannot be read (reading it raises ValueError or OSError) is refused or, with
    `on_bad_record="skip"`, left out and counted: an evaluation has padding in its place, training
    the next row that can be read.
    """

    dataset: Any = None
    """A `grain.MapDataset` of rows, or a function without arguments that makes one. Required."""
    num_threads: int = 0
    """Threads that read the rows of a batch, for storage that takes long to answer. 0: none."""
    on_bad_record: OnBadRecord = "refuse"
    """`refuse` rows that cannot be read, or `skip` and count them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_threads < 0:
            raise self._config_error(f"num_threads={self.num_threads}; expected 0 or more.")
        if self.on_bad_record not in _POLICIES:
            raise self._config_error(
                f"on_bad_record={self.on_bad_record!r}; expected one of {_POLICIES}."
            )
        self._check_dataset()
        self._bad = BadRecords(self.on_bad_record)
        self._unreadable = np.zeros(0, bool)
        self._epochs = np.zeros(0, np.int64)
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def _check_dataset(self) -> None:
        if self.dataset is None:
            raise self._config_error(
                "dataset is not set; give a grain.MapDataset, or a function that makes one."
            )

    def _make_dataset(self) -> Any:
        """The data set; a subclass may make it of its own fields."""
        return self.dataset() if callable(self.dataset) else self.dataset

    @functools.cached_property
    def _dataset(self) -> Any:
        grain = require("grain", needed_by=type(self).__qualname__)
        dataset = self._make_dataset()
        if isinstance(dataset, grain.IterDataset):
            raise self._config_error(
                "dataset is a grain.IterDataset, whose rows have no numbers; use GrainIterInput."
            )
        if not isinstance(dataset, grain.MapDataset):
            raise self._config_error(
                f"dataset is {type(dataset).__qualname__}; expected a grain.MapDataset, or a "
                "function that makes one."
            )
        if len(dataset) >= 2**62:
            raise self._config_error("dataset never ends; leave repeat() to the input.")
        return dataset

    @property
    def num_skipped(self) -> int:
        """Rows that could not be read so far; one that is read again counts again."""
        return self._bad.num_skipped

    def _num_rows(self) -> int:
        return self._length

    @functools.cached_property
    def _length(self) -> int:
        """What Grain counts anew each time."""
        return len(self._dataset)

    def _read_positions(self, positions: np.ndarray, num_rows: int | None) -> NestedMap:
        assert num_rows is not None
        self._epochs = positions // num_rows
        batch = super()._read_positions(positions, num_rows)
        if self.is_training or not len(positions) or not self._unreadable.any():
            return batch
        is_blank = np.zeros(self.local_batch_size, bool)
        is_blank[: len(positions)] = self._unreadable
        return blank_rows(batch, is_blank)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        # A host without rows asks for one only to know its shape.
        epochs = self._epochs if len(self._epochs) == len(rows) else np.zeros_like(rows)
        places = list(zip(rows.tolist(), epochs.tolist(), strict=True))
        found = self._read_places(places)
        self._unreadable = np.array([row is None for row in found])
        read = [
            self._read_after(place) if row is None else row
            for row, place in zip(found, places, strict=True)
        ]
        return stack_rows(read, name_of=lambda place: f"{self._label}, row {rows[place]}")

    def _read_places(self, places: list[tuple[int, int]]) -> list[NestedMap | None]:
        """The rows at (row, epoch); None for one that is skipped."""
        if self.num_threads and self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(self.num_threads)
        run = map if self._pool is None else self._pool.map
        found: list[NestedMap | None] = []
        for (row, _), answer in zip(places, run(self._try_to_read, places), strict=True):
            if isinstance(answer, NestedMap):
                found.append(answer)
                continue
            if self.on_bad_record == "refuse":
                raise answer
            self._bad.report(file=self._label, record=row, problem=str(answer))
            found.append(None)
        return found

    def _try_to_read(self, place: tuple[int, int]) -> NestedMap | ValueError | OSError:
        """A row, or why there is none."""
        row, epoch = place

        def where() -> str:
            return f"{self._label}, row {row}"

        try:
            element = self._dataset[epoch * self._length + row]
            if element is None:
                raise BadRecordError(
                    f"{where()}: None, which is what filter() leaves in a grain.MapDataset; filter "
                    "after to_iter_dataset(), and use GrainIterInput."
                )
            return check_row(element, where=where)
        except (ValueError, OSError) as error:
            error.add_note(f"In {where()}.")
            return error

    def _read_after(self, place: tuple[int, int]) -> NestedMap:
        """The next row that can be read, for the place of one that cannot."""
        row, epoch = place
        num_rows = self._length
        for step in range(1, num_rows):
            (found,) = self._read_places([((row + step) % num_rows, epoch)])
            if found is not None:
                return found
        raise self._config_error(
            f"none of {num_rows} rows can be read; the first: {self._bad.first[0]}"
        )

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class ArrayRecordRows(GrainMapInput):
    """Rows that lie in ArrayRecord files, one serialised row a record.

    A state fits files with the same numbers of records. A file that is missing or not whole is
    always refused, since no row after it would have its number.
    """

    paths: Sequence[str] | None = None
    """The files, in the order of their rows' numbers; see `array_records.find_array_records`."""
    parse: Callable[[bytes], Any] | None = None
    """Makes a record a row, a dictionary of arrays."""

    def _check_dataset(self) -> None:
        if self.dataset is not None:
            raise self._config_error("dataset is made of paths and parse; set those alone.")
        for field in ("paths", "parse"):
            if getattr(self, field) is None:
                raise self._config_error(f"{field} is not set.")
        if isinstance(self.paths, str) or not self.paths:
            raise self._config_error(f"paths={self.paths!r}; expected a list of files.")

    def _make_dataset(self) -> Any:
        grain = require("grain", needed_by=type(self).__qualname__)
        return grain.MapDataset.source(self._files).map(self.parse)

    @functools.cached_property
    def _files(self) -> ArrayRecordFiles:
        assert self.paths is not None
        return ArrayRecordFiles(self.paths)

    def _fingerprint(self) -> dict[str, Any]:
        ends = self._files.record_ends
        return {"num_files": len(ends), "files_crc32": zlib.crc32(ends.tobytes())}

    def _close(self) -> None:
        super()._close()
        if "_files" in vars(self):
            self._files.close()
