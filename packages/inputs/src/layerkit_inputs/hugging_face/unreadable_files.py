"""Search for the unreadable file of a data set, and for the record in it.

`datasets` rarely reports where an error is. So whole files are checked before they are read, which
is cheap, and searched record by record after an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerkit_inputs.base.errors import require_extra

_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst"})


def faulty_file(file: str, file_format: str) -> str | None:
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
    # Compressed files are not searched.
    here = [f for f in files if Path(f).is_file() and Path(f).suffix not in _COMPRESSED]
    for file in here:
        kind = file_format if file_format in _FINDERS else Path(file).suffix.lstrip(".")
        problem = faulty_file(file, kind)
        if problem is None and kind in _FINDERS:
            problem = _FINDERS[kind](file)
        problem = problem or _column_difference(file, here[0], kind)
        if problem is not None:
            where, _, what = problem.rpartition("|")
            return f"{file}{', ' if where else ''}{where}: {what.rstrip('.')}"
    return None


def _column_difference(file: str, first: str, kind: str) -> str | None:
    """Return how columns of a file differ from those of the first file, or None."""
    if kind not in _COLUMNS:
        return None
    found, expected = _COLUMNS[kind](file), _COLUMNS[kind](first)
    return None if found == expected else f"columns {found}, expected {expected} as in {first}"


def _parquet_columns(file: str) -> dict[str, str]:
    parquet = require_extra("pyarrow.parquet", needed_by="HuggingFaceData")
    return {field.name: str(field.type) for field in parquet.read_schema(file)}


def _json_columns(file: str) -> list[str]:
    names: set[str] = set()
    with open(file, "rb") as opened:
        if opened.read(1) != b"[":
            opened.seek(0)
            names.update(*(json.loads(line) for line in opened if line.strip()))
    return sorted(names)


def _bad_json_line(file: str) -> str | None:
    with open(file, "rb") as opened:
        if opened.read(1) == b"[":  # one array for all examples
            return None
        opened.seek(0)
        for number, line in enumerate(opened):
            try:
                row = json.loads(line) if line.strip() else {}
                json.dumps(row, ensure_ascii=False).encode("utf-8")
            except UnicodeDecodeError as error:
                return f"record {number}|byte {error.start} of the line is not UTF-8"
            except UnicodeEncodeError:
                return f"record {number}|half of a surrogate pair, which is not Unicode text"
            except ValueError as error:
                return f"record {number}|not a line of JSON ({_first_line(error)})"
            if not isinstance(row, dict):
                return f"record {number}|a JSON {type(row).__name__}, expected an object"
    return None


def _bad_row_group(file: str) -> str | None:
    parquet = require_extra("pyarrow.parquet", needed_by="HuggingFaceData")
    with parquet.ParquetFile(file, page_checksum_verification=True) as opened:
        first = 0
        for group in range(opened.num_row_groups):
            count = opened.metadata.row_group(group).num_rows
            try:
                opened.read_row_group(group).validate(full=True)
            except Exception as error:  # any Arrow error or OSError, for damaged pages
                return f"records {first} to {first + count - 1}|{_first_line(error)}"
            first += count
    return None


def _bad_arrow_batch(file: str) -> str | None:
    arrow = require_extra("pyarrow", needed_by="HuggingFaceData")
    with arrow.memory_map(file) as source:
        first = 0
        try:
            for batch in _batches(arrow, source):
                batch.validate(full=True)
                first += batch.num_rows
        except (arrow.ArrowException, OSError, ValueError) as error:
            return f"records {first} and later|{_first_line(error)}"
    return None


def _batches(arrow: Any, source: Any) -> Any:
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if not is_file:
        yield from arrow.ipc.open_stream(source)
        return
    opened = arrow.ipc.open_file(source)
    for number in range(opened.num_record_batches):
        yield opened.get_batch(number)


def _bad_text_line(file: str) -> str | None:
    with open(file, "rb") as opened:
        for number, line in enumerate(opened):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"record {number}|byte {error.start} of the line is not UTF-8"
    return None


_FINDERS = {
    "arrow": _bad_arrow_batch,
    "csv": _bad_text_line,
    "json": _bad_json_line,
    "parquet": _bad_row_group,
    "text": _bad_text_line,
}
_COLUMNS = {"json": _json_columns, "parquet": _parquet_columns}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
