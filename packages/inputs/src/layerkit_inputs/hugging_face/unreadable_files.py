"""Search for the unreadable file of a data set, and for the record in it.

`datasets` rarely reports where an error is. So whole files are checked before they are read, which
is cheap, and searched record by record after an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from layerkit_inputs.base.errors import require_extra

_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst"})


def find_fault(file: str, file_format: str) -> str | None:
    """Return the fault of an empty file or a truncated Parquet file, or None."""
    if Path(file).stat().st_size == 0:
        return "the file is empty."
    if file_format != "parquet":
        return None
    parquet = require_extra("pyarrow.parquet", needed_by="HuggingFaceData")
    arrow = require_extra("pyarrow", needed_by="HuggingFaceData")
    try:
        rows = parquet.read_metadata(file).num_rows
    except (arrow.ArrowException, OSError) as error:
        return f"not a whole Parquet file ({_first_line(error)})."
    return None if rows else "the file has no rows."


def first_unreadable(files: Sequence[str], file_format: str) -> str | None:
    """Return the first unreadable file with the record and the fault, or None if there is none."""
    for file in files:
        if not Path(file).is_file() or Path(file).suffix in _COMPRESSED:
            continue  # compressed files are not searched
        kind = file_format if file_format in _SEARCHES else Path(file).suffix.lstrip(".")
        fault = find_fault(file, kind)
        if fault is not None:
            return f"{file}: {fault.rstrip('.')}"
        if kind in _SEARCHES and (fault := _SEARCHES[kind](file)):
            return f"{file}, {fault}"
    return None


def _search_json(file: str) -> str | None:
    with open(file, "rb") as opened:
        if opened.read(1) == b"[":  # one array for all examples
            return None
        opened.seek(0)
        for number, line in enumerate(opened):
            try:
                row = json.loads(line) if line.strip() else {}
                json.dumps(row, ensure_ascii=False).encode("utf-8")
            except UnicodeDecodeError as error:
                return f"record {number}: byte {error.start} of the line is not UTF-8"
            except UnicodeEncodeError:
                return f"record {number}: half of a surrogate pair, which is not Unicode text"
            except ValueError as error:
                return f"record {number}: not a line of JSON ({_first_line(error)})"
            if not isinstance(row, dict):
                return f"record {number}: a JSON {type(row).__name__}, expected an object"
    return None


def _search_text(file: str) -> str | None:
    with open(file, "rb") as opened:
        for number, line in enumerate(opened):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"record {number}: byte {error.start} of the line is not UTF-8"
    return None


def _search_parquet(file: str) -> str | None:
    parquet = require_extra("pyarrow.parquet", needed_by="HuggingFaceData")
    with parquet.ParquetFile(file, page_checksum_verification=True) as opened:
        first = 0
        for group in range(opened.num_row_groups):
            count = opened.metadata.row_group(group).num_rows
            try:
                opened.read_row_group(group).validate(full=True)
            except Exception as error:  # any Arrow error or OSError, for damaged pages
                return f"records {first} to {first + count - 1}: {_first_line(error)}"
            first += count
    return None


def _search_arrow(file: str) -> str | None:
    arrow = require_extra("pyarrow", needed_by="HuggingFaceData")
    with open(file, "rb") as opened:
        is_stream = opened.read(6) != b"ARROW1"
    try:
        with arrow.memory_map(file) as source:
            reader = arrow.ipc.open_stream(source) if is_stream else arrow.ipc.open_file(source)
            reader.read_all().validate(full=True)
    except (arrow.ArrowException, OSError, ValueError) as error:
        return f"a damaged record: {_first_line(error)}"
    return None


_SEARCHES = {
    "arrow": _search_arrow,
    "csv": _search_text,
    "json": _search_json,
    "jsonl": _search_json,
    "parquet": _search_parquet,
    "text": _search_text,
}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
