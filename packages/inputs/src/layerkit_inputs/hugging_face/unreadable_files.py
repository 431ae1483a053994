"""Search for the unreadable file of a data set, and for the record in it.

`datasets` rarely reports where an error is. So whole files are checked before they are read, which
is cheap, and searched after an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from layerkit_inputs.base.errors import first_line, is_storage_failure, require_extra

FORMATS = ("arrow", "csv", "json", "parquet", "text")
"""Names by which `datasets` knows the formats of files."""
_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst"})


def find_fault(file: str, file_format: str) -> str | None:
    """Return the fault of an empty file or a truncated Parquet file, or None.

    Raises:
      OSError: The storage failed.
    """
    if Path(file).stat().st_size == 0:
        return "the file is empty."
    if file_format != "parquet":
        return None
    parquet = require_extra("pyarrow.parquet", needed_by="HuggingFaceData")
    arrow = require_extra("pyarrow", needed_by="HuggingFaceData")
    try:
        rows = parquet.read_metadata(file).num_rows
    except (arrow.ArrowException, OSError) as error:
        if is_storage_failure(error):
            raise
        return f"not a whole Parquet file ({first_line(error).rstrip('.')})."
    return None if rows else "the file has no rows."


def first_unreadable(files: Sequence[str], file_format: str) -> str | None:
    """Return the first unreadable file with the record and the fault, or None if there is none.

    Raises:
      OSError: The storage failed.
    """
    for file in files:
        if not Path(file).is_file() or Path(file).suffix in _COMPRESSED:
            continue  # compressed files are not searched
        kind = file_format if file_format in FORMATS else Path(file).suffix.lstrip(".")
        if fault := find_fault(file, kind):
            return f"{file}: {fault.rstrip('.')}"
        record = 0
        try:
            for record in _read_records(file, kind):  # noqa: B007 - for the error
                pass
        except Exception as error:  # of any reader of any format
            if is_storage_failure(error):
                raise
            return f"{file}, from record {record} on: {first_line(error).rstrip('.')}"
    return None


def _read_records(file: str, kind: str) -> Iterator[int]:
    """Read a file, and yield the number of the first record of each part before it is read."""
    arrow = require_extra("pyarrow", needed_by="HuggingFaceData")
    if kind == "parquet":
        parquet = require_extra("pyarrow.parquet", needed_by="HuggingFaceData")
        number = 0
        with parquet.ParquetFile(file, page_checksum_verification=True) as opened:
            for group in range(opened.num_row_groups):
                yield number
                number += len(opened.read_row_group(group))
    elif kind == "arrow":
        with arrow.memory_map(file) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
            reader.read_all().validate(full=True)
    elif kind in ("csv", "json", "jsonl", "text"):
        with open(file, "rb") as opened:
            for number, line in enumerate(opened):
                yield number
                text = line.decode("utf-8")
                if kind in ("csv", "text") or not text.strip():
                    continue
                if not number and text.startswith("["):  # one array for all examples
                    return
                row = json.loads(text)
                json.dumps(row, ensure_ascii=False).encode("utf-8")  # no half of a surrogate pair
                if not isinstance(row, dict):
                    raise ValueError(f"a JSON {type(row).__name__}, expected an object")
