"""Reading of Parquet files in a bounded amount of memory.

A few hundred bytes of Parquet can decode to gigabytes, since a value that all rows share is stored
once. Such texts stay in dictionaries when they are read, and then the sizes that a file declares
bound its memory. Rows are read a few thousand at a time, so a file with wrong sizes raises too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from layerkit_inputs.base.errors import BadRecordError, require_extra

MAX_ROW_GROUP_BYTES = 1 << 30
"""Default bound on the bytes of a decoded row group."""

_ROWS = 1 << 13
_OFFSET_BYTES = 4
_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
# Encodings with all bytes of each value, levels and indices. In others, values may share bytes.
_WHOLE = {"PLAIN", "RLE", "BIT_PACKED"}
_DICTIONARY = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}


def open_parquet(path: str | Path, *, columns: Sequence[str] | None = None) -> Any:
    """Open a Parquet file, with texts in dictionaries, and verify page checksums if it has any.

    Args:
      path: Path of the file.
      columns: Names of the columns that will be read. None: all.

    Raises:
      BadRecordError: A column of text has an encoding in which values share bytes.
    """
    parquet = require_extra("pyarrow.parquet", needed_by="Parquet files")
    metadata = parquet.read_metadata(path)
    encodings: dict[str, set[str]] = {}
    for number in range(metadata.num_row_groups):
        for column in _columns(metadata, number, columns):
            if column.physical_type == "BYTE_ARRAY":
                encodings.setdefault(column.path_in_schema, set()).update(column.encodings)
    repeated = [name for name, kinds in encodings.items() if kinds & _DICTIONARY]
    for name, kinds in encodings.items():
        readable = _DICTIONARY if name in repeated else {"DELTA_LENGTH_BYTE_ARRAY"}
        if kinds - _WHOLE - readable:
            raise BadRecordError(
                owner=str(path),
                field=f"encodings of column {name!r}",
                value=sorted(kinds),
                expected="PLAIN, with or without a dictionary, or DELTA_LENGTH_BYTE_ARRAY",
                hint="Write the file again.",
            )
    return parquet.ParquetFile(
        path, metadata=metadata, page_checksum_verification=True, read_dictionary=repeated
    )


def read_row_group(file: Any, number: int, *, columns: Sequence[str] | None, max_bytes: int) -> Any:
    """Return a row group of a file of `open_parquet` as a `pyarrow.Table` of at most `max_bytes`.

    Raises:
      BadRecordError: The row group declares more bytes, or decodes to more.
    """
    arrow = require_extra("pyarrow", needed_by="Parquet files")
    if (size := declared_bytes(file.metadata, number, columns=columns)) > max_bytes:
        raise too_large_error(size, max_bytes)
    batches, size = [], 0
    for batch in file.iter_batches(_ROWS, row_groups=[number], columns=columns):
        batches.append(batch)
        if (size := size + batch.nbytes) > max_bytes:
            raise too_large_error(size, max_bytes)
    return arrow.Table.from_batches(batches)


def declared_bytes(metadata: Any, number: int, *, columns: Sequence[str] | None) -> int:
    """Return the size of the decoded columns of a row group that a file declares."""
    return sum(
        max(
            column.num_values * _VALUE_BYTES.get(column.physical_type, _OFFSET_BYTES),
            column.total_uncompressed_size,
        )
        for column in _columns(metadata, number, columns)
    )


def texts_of(column: Any) -> Iterator[bytes | None]:
    """Yield the values of a column of text as bytes, each decoded when it is needed."""
    arrow = require_extra("pyarrow", needed_by="Parquet files")
    is_encoded = arrow.types.is_dictionary(column.type)
    encoded = column if is_encoded else column.dictionary_encode()
    values = encoded.dictionary.cast(arrow.large_binary())
    for index in encoded.indices.to_pylist():
        yield None if index is None else values[index].as_py()


def _columns(metadata: Any, number: int, names: Sequence[str] | None) -> Iterator[Any]:
    group = metadata.row_group(number)
    for column in map(group.column, range(group.num_columns)):
        if names is None or column.path_in_schema.partition(".")[0] in names:
            yield column


def too_large_error(size: int, max_bytes: int, *, owner: str | None = None) -> BadRecordError:
    """Return the error about a row group of more than `max_bytes`."""
    return BadRecordError(
        f"the row group takes at least {size:,} bytes in memory",
        owner=owner,
        field="max_row_group_bytes",
        value=max_bytes,
        hint="Write the file with smaller row groups, or raise max_row_group_bytes.",
    )
