"""Grain data sets of the rows of a Parquet row group; see `parquet_rows`.

Columns are decoded at the first read and kept as NumPy arrays (text stays in Arrow), so that
reading a row only indexes each column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from layerkit_inputs.base.bad_records import BadRecordError
from layerkit_inputs.base.errors import require_extra
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
    require_extra("grain", needed_by="ParquetRows")
    from layerkit_inputs.grain.grain_iterators import RowGroupDataset

    return RowGroupDataset(_Rows(group, columns, max_bytes))


class _Column(NamedTuple):
    """A decoded column."""

    value_of: Callable[[int], Any]
    """Function from a row to its value."""
    has_null: np.ndarray
    """True for rows with a null, bool `[rows]`."""


class _Decoded(NamedTuple):
    """A decoded row group."""

    value_of: dict[str, Callable[[int], Any]]
    """Function from a row to its value, by column."""
    nulls: dict[int, str]
    """Name of the first column with a null, for each row that has one."""


class _Rows:
    """A Grain source of the rows of a row group."""

    def __init__(self, group: RowGroup, columns: Sequence[str] | None, max_bytes: int):
        self._group = group
        self._max_bytes = max_bytes
        self._columns = columns
        self._decoded: _Decoded | BadRecordError | None = None

    def __len__(self) -> int:
        return self._group.num_rows

    def __getitem__(self, row: int) -> dict[str, Any] | BadRecordError | None:
        if self._decoded is None:
            self._decoded = self._decode()
        if isinstance(self._decoded, BadRecordError):
            return self._decoded if row == 0 else None
        value_of, nulls = self._decoded
        if row in nulls:
            return BadRecordError(
                f"null in column {nulls[row]!r}", owner=f"{self._group}, row {row}"
            )
        return {name: value(row) for name, value in value_of.items()}

    def _decode(self) -> _Decoded | BadRecordError:
        arrow = require_extra("pyarrow", needed_by="ParquetRows")
        columns = None if self._columns is None else list(self._columns)
        try:
            with open_parquet(self._group.path) as file:
                fault = _unreadable_column(file.schema_arrow, columns)
                if fault is None:
                    table = read_row_group(
                        self._group.path,
                        file,
                        self._group.number,
                        columns=columns,
                        max_bytes=self._max_bytes,
                    )
        except BadRecordError as error:
            error.owner = str(self._group)
            return error
        except (arrow.ArrowException, OSError) as error:
            problem = f"cannot be decoded ({str(error).rstrip('.')})"
            return BadRecordError(problem, owner=str(self._group))
        if fault is not None:
            fault.owner = self._group.path
            raise fault
        if len(table) != self._group.num_rows:
            return BadRecordError(
                owner=str(self._group),
                field="rows",
                value=len(table),
                expected=f"{self._group.num_rows}, as declared",
            )
        decoded = {
            name: _decode_column(table.column(name).combine_chunks()) for name in table.column_names
        }
        nulls: dict[int, str] = {}
        for name, column in decoded.items():
            for row in np.flatnonzero(column.has_null).tolist():
                nulls.setdefault(row, name)
        return _Decoded({name: column.value_of for name, column in decoded.items()}, nulls)


def _unreadable_column(schema: Any, columns: Sequence[str] | None) -> BadRecordError | None:
    """Return an error about the first column with an unsupported type, or None.

    The check comes before decoding, because decoded columns of unsupported types, such as lists of
    text, may have any size.
    """
    for field in schema:
        if (columns is None or field.name in columns) and not (
            _is_number(field.type) or _is_list_of_numbers(field.type) or _is_text(field.type)
        ):
            return BadRecordError(
                field=f"type of column {field.name!r}",
                value=str(field.type),
                expected="numbers, booleans, text, bytes or lists of numbers",
                hint="Set columns to the names of the other columns.",
            )
    return None


def _decode_column(array: Any) -> _Column:
    arrow = require_extra("pyarrow", needed_by="ParquetRows")
    if isinstance(array, arrow.ChunkedArray):  # a column without rows
        array = arrow.concat_arrays(array.chunks)
    has_null = array.is_null().to_numpy(zero_copy_only=False)
    if _is_number(array.type):
        values = _numbers(array)
        return _Column(lambda row: values[row], has_null)
    if _is_list_of_numbers(array.type):
        flat = array.flatten()
        lengths = _numbers(array.value_lengths()).astype(np.int64)
        ends = np.cumsum(np.where(has_null, 0, lengths))
        begins = ends - np.where(has_null, 0, lengths)
        nulls = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))
        has_null[np.searchsorted(ends, nulls, side="right")] = True
        values = _numbers(flat)
        return _Column(lambda row: values[begins[row] : ends[row]], has_null)
    return _Column(lambda row: array[row].as_py(), has_null)


def _numbers(array: Any) -> np.ndarray:
    """Return an Arrow array as NumPy, with 0 for nulls so that the dtype stays the same."""
    compute = require_extra("pyarrow.compute", needed_by="ParquetRows")
    if array.null_count:
        arrow = require_extra("pyarrow", needed_by="ParquetRows")
        array = compute.fill_null(array, arrow.scalar(0).cast(array.type))
    return array.to_numpy(zero_copy_only=False)


def _is_number(kind: Any) -> bool:
    types = require_extra("pyarrow", needed_by="ParquetRows").types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _is_list_of_numbers(kind: Any) -> bool:
    types = require_extra("pyarrow", needed_by="ParquetRows").types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and _is_number(kind.value_type)


def _is_text(kind: Any) -> bool:
    types = require_extra("pyarrow", needed_by="ParquetRows").types
    is_string = types.is_string(kind) or types.is_large_string(kind)
    return is_string or types.is_binary(kind) or types.is_large_binary(kind)
