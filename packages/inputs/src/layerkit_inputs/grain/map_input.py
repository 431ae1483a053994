"""Inputs that read the rows of Grain pipelines by number (https://github.com/google/grain).

The pipeline yields rows, which are dictionaries of arrays. The input makes batches and handles
hosts, epochs, padding and states. Each of the two kinds of Grain data set has its input:

- GrainMapInput reads rows by number (`grain.MapDataset`). Its state is one count, from which any
  number of hosts can resume. Prefer this input.
- GrainIterInput reads rows in order (`grain.IterDataset`), for filters, packing and interleaved
  files, whose rows have no numbers. Each host has its own pipeline and state.

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
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np

from layerkit.config.checks import check_choice, check_integers, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.bad_records import BadRecordError, BadRecords, OnBadRecord
from layerkit_inputs.base.errors import require_extra
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.grain.array_records import ArrayRecordFiles
from layerkit_inputs.grain.row_batches import check_row, stack_rows


@runtime_checkable
class RowSource(Protocol):
    """Rows that can be read in any order by their number, such as a `grain.MapDataset`."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: Any) -> Any:
        """Return the row with this number. For a slice, return a source of its rows."""


_EXPECTED_DATASET = "a grain.MapDataset, or a function that returns one"


class GrainMapInput(IndexedInput):
    """An input that reads rows of a `grain.MapDataset` by number.

    The input shuffles and repeats the data set (`shuffle`, `shuffle_window`, `is_training`). The
    data set itself should do neither. In epoch `e`, row `i` of `n` is read as number `e * n + i`,
    as Grain's own `repeat` does, so random transformations differ by epoch.

    If reading a row raises ValueError or OSError, the input raises this error by default. With
    `on_bad_record="skip"` it counts the row instead. Training then reads the next readable row in
    its place, and evaluation uses a row of padding.
    """

    dataset: RowSource | Callable[[], RowSource] | None = None
    """A `grain.MapDataset` of rows, or a function without arguments that returns one. Required."""
    num_threads: int = 0
    """Number of threads that read the rows of a batch, for slow storage; 0 for no threads."""
    on_bad_record: OnBadRecord = "refuse"
    """Policy for rows that cannot be read: `refuse` raises the error, `skip` counts the row."""

    def __post_init__(self) -> None:
        """Check the fields; the data set is made when it is first needed."""
        super().__post_init__()
        check_integers(self._label, minimum=0, num_threads=self.num_threads)
        check_choice(self._label, get_args(OnBadRecord), on_bad_record=self.on_bad_record)
        self._check_dataset()
        self._bad = BadRecords(self.on_bad_record)
        self._epochs = np.zeros(0, np.int64)
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def _check_dataset(self) -> None:
        require(self.dataset is not None, self._label, "dataset", None, _EXPECTED_DATASET)

    def _make_dataset(self) -> Any:
        """Return the data set. A subclass may build it from its own fields."""
        return self.dataset() if callable(self.dataset) else self.dataset

    @functools.cached_property
    def _dataset(self) -> Any:
        grain = require_extra("grain", needed_by=type(self).__qualname__)
        dataset = self._make_dataset()
        if not isinstance(dataset, grain.MapDataset):
            is_iter = isinstance(dataset, grain.IterDataset)
            raise self._config_error(
                field="dataset",
                value=type(dataset).__qualname__,
                expected=_EXPECTED_DATASET,
                hint="Use GrainIterInput." if is_iter else None,
            )
        if len(dataset) >= 2**62:
            raise self._config_error("the data set never ends", hint="Remove repeat() from it.")
        return dataset

    @property
    def num_skipped(self) -> int:
        """Number of failed reads of rows; a row that fails in two epochs counts twice."""
        return self._bad.num_skipped

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
        found = self._read_places(places)
        self._is_unreadable = np.array([row is None for row in found])
        read = [
            self._read_after(place) if row is None else row
            for row, place in zip(found, places, strict=True)
        ]
        return stack_rows(read, name_of=lambda place: f"{self._label}, row {rows[place]}")

    def _read_places(self, places: list[tuple[int, int]]) -> list[NestedMap | None]:
        """Return the row at each place (row number, epoch), or None if it is skipped."""
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
        """Return the row at a place (row number, epoch), or the error raised while reading it."""
        row, epoch = place

        def where() -> str:
            return f"{self._label}, row {row}"

        try:
            element = self._dataset[epoch * self._length + row]
            if element is None:
                raise BadRecordError(
                    "the data set returned None, as a grain.MapDataset does after filter()",
                    owner=where(),
                    hint="Call filter() after to_iter_dataset(), and use GrainIterInput.",
                )
            return check_row(element, where=where)
        except (ValueError, OSError) as error:
            error.add_note(f"In {where()}.")
            return error

    def _read_after(self, place: tuple[int, int]) -> NestedMap:
        """Return the next readable row after an unreadable one."""
        row, epoch = place
        num_rows = self._length
        for step in range(1, num_rows):
            (found,) = self._read_places([((row + step) % num_rows, epoch)])
            if found is not None:
                return found
        raise self._config_error(
            f"none of {num_rows} rows can be read; the first error is: {self._bad.first[0]}"
        )

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class ArrayRecordRows(GrainMapInput):
    """An input of ArrayRecord files with one serialized row per record.

    A state can be restored only if each file has the same number of records as before. A missing or
    incomplete file raises even with `on_bad_record="skip"`, since it would change the numbers of
    all later rows.
    """

    paths: Sequence[str] | None = None
    """Files in the order of their rows' numbers; see `array_records.find_array_records`."""
    parse: Callable[[bytes], Any] | None = None
    """Function that parses a serialized record and returns its row, a dictionary of arrays."""

    def _check_dataset(self) -> None:
        label, paths = self._label, self.paths
        expected = "None, since paths and parse define the data set"
        require(self.dataset is None, label, "dataset", self.dataset, expected)
        require(self.parse is not None, label, "parse", None, "a function that parses a record")
        require(paths and not isinstance(paths, str), label, "paths", paths, "a list of files")

    def _make_dataset(self) -> Any:
        grain = require_extra("grain", needed_by=type(self).__qualname__)
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
