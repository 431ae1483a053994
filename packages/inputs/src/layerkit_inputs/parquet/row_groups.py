"""Grain data sets of the rows of a Parquet row group; see `parquet_rows`.

Columns are decoded at the first read and kept as NumPy arrays (text stays in Arrow), so that
reading a row only indexes each column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError, as_bad_record, require_extra
from layerkit_inputs.parquet.row_group_sizes import open_parquet, read_row_group


class RowGroup(NamedTuple):
    """A row group, the part of a Parquet file that is read at once."""

    path: str
    number: int
    """Zero-based index in the file."""
    num_rows: int

    def __str__(self) -> str:
        """Return path and index, for errors."""
        return f"{self.path}, row group {self.number}"


def open_row_group(group: RowGroup, *, columns: Sequence[str] | None, max_bytes: int) -> Any:
    """Return a `grain.IterDataset` of rows, dictionaries of the columns.

    A row with a null is replaced by a BadRecordError. A row group that cannot be decoded yields one
    BadRecordError and no rows.

    Args:
      group: Row group to read.
      columns: Columns to read. None: all.
      max_bytes: Bound on the bytes of the decoded columns.
    """
    from layerkit_inputs.grain.grain_iterators import RowGroupDataset  # imports Grain

    return RowGroupDataset(_Rows(group, columns, max_bytes))


class _Column(NamedTuple):
    """A decoded column."""

    value_of: Callable[[int], Any]
    """Function from a row to its value."""
    has_null: np.ndarray
    """True for rows with a null, bool `[rows]`."""


class _Rows:
    """A Grain source of the rows of a row group."""

    def __init__(self, group: RowGroup, columns: Sequence[str] | None, max_bytes: int):
        self._group = group
        self._columns = None if columns is None else list(columns)
        self._max_bytes = max_bytes
        self._decoded: dict[str, _Column] | BadRecordError | None = None
        self._null_in: dict[int, str] = {}  # first column with a null, by row

    def __len__(self) -> int:
        return self._group.num_rows

    def __getitem__(self, row: int) -> dict[str, Any] | BadRecordError | None:
        if self._decoded is None:
            self._decode()
        if isinstance(self._decoded, BadRecordError):
            return self._decoded if row == 0 else None
        assert self._decoded is not None
        if row in self._null_in:
            problem = f"null in column {self._null_in[row]!r}"
            return BadRecordError(problem, owner=f"{self._group}, row {row}")
        return {name: column.value_of(row) for name, column in self._decoded.items()}

    def _decode(self) -> None:
        arrow = require_extra("pyarrow", needed_by="ParquetRows")
        kinds = arrow.ArrowException, OSError
        damaged = as_bad_record(str(self._group), "cannot be decoded", *kinds)
        try:
            with damaged, open_parquet(self._group.path, columns=self._columns) as file:
                for field in file.metadata.schema.to_arrow_schema():
                    is_read = self._columns is None or field.name in self._columns
                    if is_read and _kind_of(field.type) is None:  # values may have any size
                        raise ConfigError(
                            owner=self._group.path,
                            field=f"type of column {field.name!r}",
                            value=str(field.type),
                            expected="numbers, booleans, text, bytes or lists of numbers",
                            hint="Set columns to the names of the other columns.",
                        )
                table = read_row_group(
                    file, self._group.number, columns=self._columns, max_bytes=self._max_bytes
                )
            if len(table) != len(self):
                problem = f"{len(table)} rows instead of {len(self)}"
                raise BadRecordError(problem, owner=str(self._group))
        except BadRecordError as error:
            error.owner = str(self._group)
            self._decoded = error
        else:
            self._decoded = {
                name: _decode_column(table.column(name).combine_chunks())
                for name in table.column_names
            }
            for name, column in self._decoded.items():
                for row in np.flatnonzero(column.has_null).tolist():
                    self._null_in.setdefault(row, name)


def _kind_of(kind: Any) -> Literal["number", "numbers", "text"] | None:
    """Return what the values of an Arrow type are, or None if it is not supported."""
    types = require_extra("pyarrow", needed_by="ParquetRows").types
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return "number"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "numbers" if _kind_of(kind.value_type) == "number" else None
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    return "text" if types.is_binary(kind) or types.is_large_binary(kind) else None


def _decode_column(array: Any) -> _Column:
    has_null = array.is_null().to_numpy(zero_copy_only=False)
    match _kind_of(array.type):
        case "number":
            values = _numbers(array)
            return _Column(lambda row: values[row], has_null)
        case "numbers":
            flat = array.flatten()
            lengths = np.where(has_null, 0, _numbers(array.value_lengths()).astype(np.int64))
            ends = np.cumsum(lengths)
            nulls = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))
            has_null[np.searchsorted(ends, nulls, side="right")] = True
            begins, values = ends - lengths, _numbers(flat)
            return _Column(lambda row: values[begins[row] : ends[row]], has_null)
    return _Column(lambda row: array[row].as_py(), has_null)


def _numbers(array: Any) -> np.ndarray:
    """Return an Arrow array as NumPy, with 0 for nulls so that the dtype stays the same."""
    arrow = require_extra("pyarrow", needed_by="ParquetRows")
    if array.null_count:
        array = array.fill_null(arrow.scalar(0).cast(array.type))
    return array.to_numpy(zero_copy_only=False)
