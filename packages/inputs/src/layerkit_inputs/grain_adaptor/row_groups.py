"""A row group of a Parquet file as rows by number, for Grain; see `parquet_rows`.

Columns are decoded when the first row is asked for, and kept as numpy arrays (or, for text, as they
lie in Arrow), so a row costs no more than an index into each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from layerkit_inputs.bad_records import BadRecordError
from layerkit_inputs.extras import require
from layerkit_inputs.parquet_bounds import open_parquet, read_row_group


class RowGroup(NamedTuple):
    """A part of a Parquet file that is read at once."""

    path: str
    number: int
    """From 0 in its file."""
    num_rows: int

    def __str__(self) -> str:
        return f"{self.path}, row group {self.number}"


def open_row_group(group: RowGroup, *, columns: Sequence[str] | None, max_bytes: int) -> Any:
    """A `grain.IterDataset` of the rows, dictionaries of the columns.

    A row with a null is a BadRecordError in its place; of a row group that cannot be decoded the
    first row is one, and there are no others.

    Args:
      group: Row group to read.
      columns: Columns to read. None: all.
      max_bytes: Bound on the bytes of the decoded columns.
    """
    require("grain", needed_by="ParquetRows")
    from layerkit_inputs.grain_adaptor.row_group_dataset import RowGroupDataset

    return RowGroupDataset(_Rows(group, columns, max_bytes))


class _Column(NamedTuple):
    """A column, decoded."""

    value_of: Callable[[int], Any]
    """The value in a row."""
    has_null: np.ndarray
    """bool `[rows]`."""


class _Decoded(NamedTuple):
    """A row group, decoded."""

    value_of: dict[str, Callable[[int], Any]]
    """Column -> the value in a row."""
    nulls: dict[int, str]
    """Row with a null -> the first column that has one there."""


class _Rows:
    """Rows of a row group: what Grain calls a source."""

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
            return BadRecordError(f"{self._group}, row {row}: a null in column {nulls[row]!r}.")
        return {name: value(row) for name, value in value_of.items()}

    def _decode(self) -> _Decoded | BadRecordError:
        arrow = require("pyarrow", needed_by="ParquetRows")
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
            return BadRecordError(f"{self._group}: {error}")
        except (arrow.ArrowException, OSError) as error:
            return BadRecordError(f"{self._group}: cannot be decoded ({str(error).rstrip('.')}).")
        if fault is not None:
            raise BadRecordError(f"{self._group.path}: {fault}")
        if len(table) != self._group.num_rows:
            return BadRecordError(
                f"{self._group}: has {len(table)} rows, and declares {self._group.num_rows}."
            )
        decoded = {
            name: _decode_column(table.column(name).combine_chunks()) for name in table.column_names
        }
        nulls: dict[int, str] = {}
        for name, column in decoded.items():
            for row in np.flatnonzero(column.has_null).tolist():
                nulls.setdefault(row, name)
        return _Decoded({name: column.value_of for name, column in decoded.items()}, nulls)


def _unreadable_column(schema: Any, columns: Sequence[str] | None) -> str | None:
    """Return what is wrong with the first column of a kind that cannot be read, or None.

    It is asked before anything is decoded: a list of text has no size that could be bounded.
    """
    for field in schema:
        if (columns is None or field.name in columns) and not (
            _is_number(field.type) or _is_list_of_numbers(field.type) or _is_text(field.type)
        ):
            return (
                f"column {field.name!r} is {field.type}; columns of numbers, booleans, text, bytes "
                "and lists of numbers can be read. Name the others by columns."
            )
    return None


def _decode_column(array: Any) -> _Column:
    arrow = require("pyarrow", needed_by="ParquetRows")
    if isinstance(array, arrow.ChunkedArray):  # of no rows
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
    """Numbers of an Arrow array; 0 where there is a null, so that no dtype changes."""
    compute = require("pyarrow.compute", needed_by="ParquetRows")
    if array.null_count:
        arrow = require("pyarrow", needed_by="ParquetRows")
        array = compute.fill_null(array, arrow.scalar(0).cast(array.type))
    return array.to_numpy(zero_copy_only=False)


def _is_number(kind: Any) -> bool:
    types = require("pyarrow", needed_by="ParquetRows").types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _is_list_of_numbers(kind: Any) -> bool:
    types = require("pyarrow", needed_by="ParquetRows").types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and _is_number(kind.value_type)


def _is_text(kind: Any) -> bool:
    types = require("pyarrow", needed_by="ParquetRows").types
    is_string = types.is_string(kind) or types.is_large_string(kind)
    return is_string or types.is_binary(kind) or types.is_large_binary(kind)
