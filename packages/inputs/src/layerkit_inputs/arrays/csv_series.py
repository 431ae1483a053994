"""Windows of time series: `CsvSeries` reads columns of a file; `GeneratedSeries` generates series.

A batch has `series` float32 `[batch, window_length]`, `paddings` float32 of the same shape, which
is 1 where a value is missing, and `frequency` int32 `[batch]`. The frequency is a category that a
model may embed: TimesFM uses 0 for daily or finer, 1 for weekly and monthly, 2 for quarterly and
yearly.
"""

from __future__ import annotations

import csv
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from layerkit.config.checks import check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.bad_records import BadRecordError
from layerkit_inputs.base.indexed_input import IndexedInput

_TRAINING_ROWS, _EVAL_ROWS = range(2)


class _Series(IndexedInput):
    """Base class of inputs of windows."""

    window_length: int = 640
    """Number of values in a window: context plus horizon."""
    frequency: int = 0
    """Category of the frequency of all series."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_sizes(self._label, window_length=self.window_length)
        is_valid = self.frequency >= 0
        require(is_valid, self._label, "frequency", self.frequency, "a category, at least 0")

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of zeros."""
        return _batch(np.zeros((rows, config.window_length)), config.frequency)


class CsvSeries(_Series):
    """Windows of the numeric columns of a CSV file with a header, such as ETTh1.

    The last `heldout_values` values of each column are held out. Training windows contain none of
    them. The last `stride` values of every evaluation window are held-out values, and the last
    window ends with the column. An empty cell is padding. The file is read on first use and kept in
    memory.
    """

    path: str | None = None
    """The file. Required."""
    columns: Sequence[str] | None = None
    """Names of the columns, each a series; None for all with a name but the first, the time."""
    heldout_values: int = 0
    """Values at the end of each column that are held out."""
    stride: int = 1
    """Number of values between the starts of consecutive windows."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        require(self.path is not None, self._label, "path", None, "a CSV file with a header")
        check_sizes(self._label, stride=self.stride)
        self._check_at_least(0, "heldout_values")
        # An evaluation window ends with `stride` held-out values.
        is_valid = self.is_training or not 0 < self.heldout_values < self.stride
        expected = f"0, or at least stride={self.stride}"
        require(is_valid, self._label, "heldout_values", self.heldout_values, expected)

    @functools.cached_property
    def _values(self) -> np.ndarray:
        """Values float32 `[series, time]`, NaN where a cell is empty."""
        with epath.Path(str(self.path)).open() as file:
            reader = csv.reader(file)
            header = next(reader, [])
            header[:1] = [name.removeprefix("\ufeff") for name in header[:1]]  # Excel writes it
            lines = [(reader.line_num, cells) for cells in reader if cells]
        for name in self.columns or ():
            if name not in header:
                raise self._config_error(field="columns", value=name, choices=header)
        if self.columns is not None:
            places = [header.index(name) for name in self.columns]
        else:
            places = [place for place in range(1, len(header)) if header[place].strip()]
        values = np.empty((len(places), len(lines)), np.float32)
        for time, (line, cells) in enumerate(lines):
            if len(cells) != len(header):
                raise BadRecordError(
                    owner=f"{self.path}, line {line}",
                    field="number of cells",
                    value=len(cells),
                    expected=f"{len(header)}, as in the header",
                )
            for row, place in enumerate(places):
                cell = cells[place].strip()
                try:
                    values[row, time] = float(cell)
                except ValueError:
                    values[row, time] = np.nan
                if cell and not np.isfinite(values[row, time]):
                    raise BadRecordError(
                        owner=f"{self.path}, line {line}",
                        field=header[place],
                        value=cell,
                        expected="a finite number, or nothing for a missing value",
                    )
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
        if not (starts.size and len(self._values)):
            count = f"{len(self._values)} series of {length} values"
            raise self._config_error(
                field="window_length",
                value=self.window_length,
                expected=f"windows in {self.path}, which has {count}",
                hint=f"heldout_values is {self.heldout_values}, and stride {self.stride}.",
            )
        return starts

    def _num_rows(self) -> int:
        return len(self._values) * len(self._starts)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        series, place = np.divmod(rows, len(self._starts))
        times = self._starts[place][:, None] + np.arange(self.window_length)
        return _batch(self._values[series[:, None], times], self.frequency)

    def _fingerprint(self) -> dict[str, Any]:
        fields = ("window_length", "stride", "heldout_values", "is_training")
        return {**{name: getattr(self, name) for name in fields}, "values_crc32": self._crc32}

    @functools.cached_property
    def _crc32(self) -> int:
        return zlib.crc32(self._values.tobytes())


class GeneratedSeries(_Series):
    """Windows of series that are generated on demand: two seasons, a trend and noise.

    Each row has periods, phases, amplitudes, slope, offset and scale of its own, drawn by a
    counter-based generator, so that any row can be made separately, and rows of training and
    evaluation never coincide.
    """

    num_examples: int | None = None
    """Rows of an epoch. None: endless. An evaluation of one epoch needs a number."""
    noise: float = 0.1
    """Standard deviation of the noise, relative to the first season."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        is_valid = self.num_examples is not None or self.endless
        require(is_valid, self._label, "num_examples", None, "the number of rows of an epoch")
        self._check_at_least(1, "num_examples")
        is_valid = np.isfinite(self.noise) and self.noise >= 0
        require(is_valid, self._label, "noise", self.noise, "a finite number, at least 0")

    def _num_rows(self) -> int | None:
        return self.num_examples

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        stream = _TRAINING_ROWS if self.is_training else _EVAL_ROWS
        key = np.array([self._seed, stream], np.uint64)
        time = np.arange(self.window_length)
        values = np.empty((len(rows), self.window_length))
        for place, row in enumerate(rows.tolist()):
            counter = np.array([0, row, 0, 0], np.uint64)
            draw = np.random.Generator(np.random.Philox(key=key, counter=counter))
            uniform, noise = draw.random(8), draw.standard_normal(self.window_length)
            seasons = [
                amplitude * np.sin(2 * np.pi * (time / period + phase))
                for amplitude, period, phase in (
                    (1.0, 8 * 8 ** uniform[0], uniform[1]),
                    (uniform[2], 32 * 8 ** uniform[3], uniform[4]),
                )
            ]
            trend = 2 * (uniform[5] - 0.5) * time / self.window_length
            shape = seasons[0] + seasons[1] + trend + self.noise * noise
            values[place] = 10 ** (2 * uniform[6]) * (shape + 10 * (uniform[7] - 0.5))
        return _batch(values, self.frequency)

    def _fingerprint(self) -> dict[str, Any]:
        fields = ("window_length", "noise", "is_training")
        return {**{name: getattr(self, name) for name in fields}, "seed": self._seed}


def _batch(values: np.ndarray, frequency: int) -> NestedMap:
    """Return the batch of windows `[rows, window_length]`, with zeros in the place of NaN."""
    is_missing = np.isnan(values)
    return NestedMap(
        series=np.where(is_missing, 0.0, values).astype(np.float32),
        paddings=is_missing.astype(np.float32),
        frequency=np.full(len(values), frequency, np.int32),
    )
