"""CsvSeries, an input of windows of the columns of a CSV file, and the base of inputs of windows.

A batch has `series` float32 `[batch, window_length]`, `paddings` float32 of the same shape, which
is 1 where a value is missing, and `frequency` int32 `[batch]`. The frequency is a category that a
model may embed: TimesFM uses 0 for daily or finer, 1 for weekly and monthly, 2 for quarterly and
yearly.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from layerkit.config.checks import check_choice, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.errors import BadRecordError, MissingFileError
from layerkit_inputs.base.indexed_input import IndexedInput


class SeriesInput(IndexedInput):
    """Base class of inputs of windows."""

    window_length: int = 640
    """Number of values in a window: context plus horizon."""
    frequency: int = 0
    """Category of the frequency of all series."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(1, "window_length")
        self._check_at_least(0, "frequency")

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of zeros."""
        return series_batch(np.zeros((rows, config.window_length)), config.frequency)


class CsvSeries(SeriesInput):
    """Windows of the numeric columns of a CSV file with a header, such as ETTh1.

    The last `heldout_values` values of each column are held out. Training windows contain none of
    them. The last `stride` values of every evaluation window are held-out values, and the last
    window ends with the column. An empty cell is padding. The file is read on first use and kept in
    memory.
    """

    path: str
    """The file."""
    columns: Sequence[str] | None = None
    """Names of the columns, each a series; None for all with a name but the first, the time."""
    heldout_values: int = 0
    """Values at the end of each column that are held out."""
    stride: int = 1
    """Number of values between the starts of consecutive windows."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(1, "stride")
        self._check_at_least(0, "heldout_values")
        # An evaluation window ends with `stride` held-out values.
        expected = f"0, or at least stride={self.stride}"
        has_ends = self.is_training or not 0 < self.heldout_values < self.stride
        require(has_ends, self._label, "heldout_values", self.heldout_values, expected)

    @functools.cached_property
    def _values(self) -> np.ndarray:
        """Values float32 `[series, time]`, NaN where a cell is empty."""
        path = epath.Path(self.path)
        if not path.is_file():
            problem = "file not found"
            raise MissingFileError(problem, owner=self._label, field="path", value=self.path)
        with path.open() as file:
            reader = csv.reader(file)
            header = next(reader, [])
            header[:1] = [name.removeprefix("\ufeff") for name in header[:1]]  # Excel writes it
            lines = [(reader.line_num, cells) for cells in reader if cells]
        for name in self.columns or ():
            check_choice(self._label, header, columns=name)
        if self.columns is not None:
            places = [header.index(name) for name in self.columns]
        else:
            places = [place for place in range(1, len(header)) if header[place].strip()]
        values = np.empty((len(places), len(lines)), np.float32)
        for time, (line, cells) in enumerate(lines):
            where = f"{self.path}, line {line}"
            if len(cells) != len(header):
                problem = f"{len(cells)} cells, expected {len(header)} as in the header"
                raise BadRecordError(problem, owner=where)
            values[:, time] = [_number(cells[place].strip(), where) for place in places]
        return values

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """Index of the first value of each window of a column, int64."""
        length = self._values.shape[1]
        if self.is_training or not self.heldout_values:
            starts = np.arange(
                0, length - self.heldout_values - self.window_length + 1, self.stride
            )
        else:
            distances = self.stride * np.arange(self.heldout_values // self.stride)[::-1]
            starts = length - distances - self.window_length
        starts = starts[starts >= 0]
        count = f"{len(self._values)} series of {length} values"
        expected = f"windows in {self.path}, which has {count}"
        is_enough = starts.size and len(self._values)
        require(is_enough, self._label, "window_length", self.window_length, expected)
        return starts

    def _num_rows(self) -> int:
        return len(self._values) * len(self._starts)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        series, place = np.divmod(rows, len(self._starts))
        times = self._starts[place][:, None] + np.arange(self.window_length)
        return series_batch(self._values[series[:, None], times], self.frequency)

    def _fingerprint(self) -> dict[str, Any]:
        fields = ("window_length", "stride", "heldout_values", "is_training")
        checksum = zlib.crc32(self._values.tobytes())
        return {**{name: getattr(self, name) for name in fields}, "values_crc32": checksum}


def _number(cell: str, where: str) -> float:
    """Return the finite number of a cell, or NaN of an empty one."""
    with contextlib.suppress(ValueError):
        if not cell or math.isfinite(float(cell)):
            return float(cell or "nan")
    raise BadRecordError(
        owner=where, field="cell", value=cell, expected="a finite number, or nothing"
    )


def series_batch(values: np.ndarray, frequency: int) -> NestedMap:
    """Return the batch of windows `[rows, window_length]`, with zeros in the place of NaN."""
    is_missing = np.isnan(values)
    return NestedMap(
        series=np.where(is_missing, 0.0, values).astype(np.float32),
        paddings=is_missing.astype(np.float32),
        frequency=np.full(len(values), frequency, np.int32),
    )
