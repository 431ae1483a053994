"""Bounds on the decoded size of row groups of Parquet files.

A few hundred bytes of Parquet can decode to gigabytes, since a value that all rows share is stored
once. The declared sizes of a file are checked before it is read. The decoded size is checked while
the file is read, a few rows at a time. The sizes of the dictionaries determine the number of rows:
a value that is stored once and read many times is in a dictionary, and other values take the
declared bytes.

Arrow decompresses a whole page at once, of at most 2 GiB. Only the page itself declares its size.
So a file with wrong sizes can take that much memory before the check fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from layerkit_inputs.base.bad_records import BadRecordError
from layerkit_inputs.base.errors import require_extra

MAX_ROW_GROUP_BYTES = 1 << 30
"""Default bound on the bytes of a decoded row group."""

_MAX_ROWS = 1 << 13
_OFFSET_BYTES = 4
_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_DICTIONARY_ENCODINGS = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY"})
# Encodings that store each value with all of its bytes, or levels and indices. In others, such as
# DELTA_BYTE_ARRAY, values share bytes.
_WHOLE_VALUE_ENCODINGS = frozenset(
    {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "BYTE_STREAM_SPLIT"}
)
# Number of bytes that are read of a page header: two fields of at most 1 + 5 bytes.
_HEADER_BYTES = 12


def open_parquet(path: Any) -> Any:
    """Open a Parquet file, and verify its page checksums on reading if it has any."""
    parquet = require_extra("pyarrow.parquet", needed_by="Parquet files")
    return parquet.ParquetFile(path, page_checksum_verification=True)


def row_group_batches(
    path: str | Path,
    file: Any,
    number: int,
    *,
    columns: Sequence[str] | None,
    max_bytes: int,
    most_rows: int,
) -> Iterator[Any]:
    """Yield a row group as `pyarrow.RecordBatch`es.

    Args:
      path: Path of the file.
      file: The file, opened by `open_parquet`.
      number: Index of the row group.
      columns: Names of columns to read. None: all.
      max_bytes: Maximum bytes of values from dictionaries in a batch of more than one row, in
        addition to the declared bytes of the row group.
      most_rows: Maximum number of rows of a batch.
    """
    largest_value = max(
        (
            _largest_value(path, file.metadata, number, index, max_bytes=max_bytes)
            for index in _text_columns(file.metadata, number, columns)
        ),
        default=0,
    )
    rows = max(1, min(most_rows, max_bytes // max(largest_value, 1)))
    yield from file.iter_batches(rows, row_groups=[number], columns=columns)


def read_row_group(
    path: str | Path, file: Any, number: int, *, columns: Sequence[str] | None, max_bytes: int
) -> Any:
    """Return a row group as a `pyarrow.Table` of at most `max_bytes`.

    Args:
      path: Path of the file.
      file: The file, opened by `open_parquet`.
      number: Index of the row group.
      columns: Names of columns to read. None: all.
      max_bytes: Bound on the bytes of the table.

    Raises:
      BadRecordError: The row group declares more bytes, or decodes to more.
    """
    arrow = require_extra("pyarrow", needed_by="Parquet files")
    size = declared_bytes(file.metadata, number, columns=columns)
    if size > max_bytes:
        raise _too_large("the row group", size, max_bytes)
    if not _text_columns(file.metadata, number, columns):  # Sizes of numbers are exact.
        return file.read_row_group(number, columns=columns)
    batches, size = [], 0
    for batch in row_group_batches(
        path, file, number, columns=columns, max_bytes=max_bytes, most_rows=_MAX_ROWS
    ):
        size += batch.nbytes
        if size > max_bytes:
            raise _too_large("the row group", size, max_bytes)
        batches.append(batch)
    return arrow.Table.from_batches(batches, None if batches else file.schema_arrow)


def check_row_groups(metadata: Any, *, max_bytes: int) -> None:
    """Raise if a row group of a file declares more than `max_bytes`.

    Args:
      metadata: `pyarrow.parquet.FileMetaData`.
      max_bytes: Bound on the bytes of a decoded row group.

    Raises:
      BadRecordError: A row group declares more.
    """
    for number in range(metadata.num_row_groups):
        size = declared_bytes(metadata, number, columns=None)
        if size > max_bytes:
            raise _too_large(f"row group {number}", size, max_bytes)


def declared_bytes(metadata: Any, number: int, *, columns: Sequence[str] | None) -> int:
    """Return a lower bound of the size of a decoded row group in bytes.

    Args:
      metadata: `pyarrow.parquet.FileMetaData`.
      number: Index of the row group.
      columns: Names of columns that are read. None: all.
    """
    group = metadata.row_group(number)
    size = 0
    for index in _read_columns(group, columns):
        column = group.column(index)
        width = _VALUE_BYTES.get(column.physical_type, _OFFSET_BYTES)
        size += max(column.num_values * width, column.total_uncompressed_size)
    return size


def _read_columns(group: Any, columns: Sequence[str] | None) -> list[int]:
    """Return the indices of the columns of a row group that are read."""
    return [
        index
        for index in range(group.num_columns)
        if columns is None or group.column(index).path_in_schema.partition(".")[0] in columns
    ]


def _text_columns(metadata: Any, number: int, columns: Sequence[str] | None) -> list[int]:
    """Return the indices of the columns that are read and hold byte arrays of any length."""
    group = metadata.row_group(number)
    read = _read_columns(group, columns)
    return [index for index in read if group.column(index).physical_type not in _VALUE_BYTES]


def _largest_value(
    path: str | Path, metadata: Any, number: int, index: int, *, max_bytes: int
) -> int:
    """Return the maximum size in bytes of a value that is stored once and read many times.

    This is the size of the column's dictionary. It is the declared size of the column if values may
    share bytes in other ways, if a row may hold several values, or if the declared size is too
    large for one batch.
    """
    column = metadata.row_group(number).column(index)
    encodings = set(column.encodings)
    is_repeated = metadata.schema.column(index).max_repetition_level > 0
    is_large = column.total_uncompressed_size > max(max_bytes, MAX_ROW_GROUP_BYTES)
    if is_repeated or is_large or encodings - _DICTIONARY_ENCODINGS - _WHOLE_VALUE_ENCODINGS:
        return int(column.total_uncompressed_size)
    dictionary = _dictionary_bytes(path, column)
    if dictionary is None:
        return int(column.total_uncompressed_size) if encodings & _DICTIONARY_ENCODINGS else 0
    return dictionary


def _dictionary_bytes(path: str | Path, column: Any) -> int | None:
    """Return the decompressed size of a column's dictionary, or None if it has no dictionary."""
    begin = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < begin:
        begin = column.dictionary_page_offset
    with open(path, "rb") as file:
        file.seek(begin)
        header = file.read(_HEADER_BYTES)
    # In Thrift's compact protocol, 0x15 is a 32-bit integer in the next field, zigzag-encoded. The
    # first field is the kind of page, 2 (encoded as 4) for a dictionary. The second is its size.
    if header[:3] != b"\x15\x04\x15":
        return None
    size = 0
    for shift, byte in enumerate(header[3:8]):
        size |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            break
    return size >> 1


def _too_large(name: str, size: int, max_bytes: int) -> BadRecordError:
    return BadRecordError(
        f"{name} takes at least {size:,} bytes in memory",
        field="max_row_group_bytes",
        value=max_bytes,
        hint="Write the file with smaller row groups, or raise max_row_group_bytes.",
    )
