"""Bounds on what a row group of a Parquet file decodes to.

A few hundred bytes of Parquet can stand for gigabytes: a value that all rows share is stored once.
Sizes that a file declares are checked before it is read, and what it decodes to while it is read, a
few rows at a time. The number of rows follows from the declared bytes, since no value of a column
is larger than those.

Arrow unpacks a whole page at once, of at most 2 GiB, whose size only the page itself declares. So a
file that lies about its sizes can take that much memory before it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from layerkit_inputs.bad_records import BadRecordError
from layerkit_inputs.extras import require

MAX_ROW_GROUP_BYTES = 1 << 30
"""Default bound on the bytes of a decoded row group."""

_MOST_ROWS = 1 << 13
_OFFSET_BYTES = 4
_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}


def open_parquet(path: Any) -> Any:
    """Open a Parquet file whose page checksums, where there are any, are verified on reading."""
    parquet = require("pyarrow.parquet", needed_by="Parquet files")
    return parquet.ParquetFile(path, page_checksum_verification=True)


def row_group_batches(
    file: Any, number: int, *, columns: Sequence[str] | None, max_bytes: int, most_rows: int
) -> Iterator[Any]:
    """Yield a row group as `pyarrow.RecordBatch`es.

    Args:
      file: `pyarrow.parquet.ParquetFile`.
      number: Index of the row group.
      columns: Names of columns to read. None: all.
      max_bytes: Most bytes of text in a batch of more than one row.
      most_rows: Most rows of a batch.
    """
    _, largest_value = declared_bytes(file.metadata, number, columns=columns)
    rows = max(1, min(most_rows, max_bytes // max(largest_value, 1)))
    yield from file.iter_batches(rows, row_groups=[number], columns=columns)


def read_row_group(file: Any, number: int, *, columns: Sequence[str] | None, max_bytes: int) -> Any:
    """Return a row group as a `pyarrow.Table` of at most `max_bytes`.

    Raises:
      BadRecordError: it declares, or decodes to, more.
    """
    arrow = require("pyarrow", needed_by="Parquet files")
    size, largest_value = declared_bytes(file.metadata, number, columns=columns)
    if size > max_bytes:
        raise BadRecordError(_too_large(size, max_bytes))
    if not largest_value:  # numbers, whose size is what is declared
        return file.read_row_group(number, columns=columns)
    batches, size = [], 0
    for batch in row_group_batches(
        file, number, columns=columns, max_bytes=max_bytes, most_rows=_MOST_ROWS
    ):
        size += batch.nbytes
        if size > max_bytes:
            raise BadRecordError(_too_large(size, max_bytes))
        batches.append(batch)
    return arrow.Table.from_batches(batches, None if batches else file.schema_arrow)


def check_row_groups(metadata: Any, *, max_bytes: int) -> None:
    """Raise if a row group of a file declares more than `max_bytes`.

    Args:
      metadata: `pyarrow.parquet.FileMetaData`.
      max_bytes: Bound on the bytes of a decoded row group.

    Raises:
      BadRecordError: one does.
    """
    for number in range(metadata.num_row_groups):
        size, _ = declared_bytes(metadata, number, columns=None)
        if size > max_bytes:
            raise BadRecordError(f"row group {number} {_too_large(size, max_bytes)}")


def declared_bytes(metadata: Any, number: int, *, columns: Sequence[str] | None) -> tuple[int, int]:
    """Return the least size of a decoded row group and the most that one value can have, in bytes.

    Args:
      metadata: `pyarrow.parquet.FileMetaData`.
      number: Index of the row group.
      columns: Names of columns that are read. None: all.
    """
    group = metadata.row_group(number)
    size = largest_value = 0
    for index in range(group.num_columns):
        column = group.column(index)
        if columns is not None and column.path_in_schema.partition(".")[0] not in columns:
            continue
        width = _VALUE_BYTES.get(column.physical_type)
        if width is None:  # byte arrays, of any length
            width = _OFFSET_BYTES
            largest_value = max(largest_value, column.total_uncompressed_size)
        size += max(column.num_values * width, column.total_uncompressed_size)
    return size, largest_value


def _too_large(size: int, max_bytes: int) -> str:
    """Return what is wrong with a row group of `size` bytes."""
    return (
        f"takes {size:,} bytes or more in memory, and max_row_group_bytes={max_bytes:,}. Write the "
        "file with smaller row groups, or raise max_row_group_bytes."
    )
