"""Documents as they lie in files: whole text files, lines of JSON, rows of Parquet.

What a file is, its name says: `.jsonl`, `.ndjson` and `.json` hold a JSON object a line, `.parquet`
rows, any other file is one document of text; each of them but Parquet may be compressed, with `.gz`
after its name. One document at a time is in memory; of Parquet, a thousand rows.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from layerkit.near_names import near_names
from layerkit_inputs.bad_records import BadRecordError
from layerkit_inputs.extras import require
from layerkit_inputs.text_files import TextFile

_JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
PACKED_SUFFIXES = frozenset({".bz2", ".xz", ".zip", ".zst", ".tar", ".7z"})
"""Of files that no reader unpacks."""
_PARQUET_ROWS = 1000


class RawDocument(NamedTuple):
    """A document, unread."""

    where: str
    """File, and line or row."""
    data: bytes | None
    """None: there is a row, but no text in it."""
    is_json: bool
    """Whether `data` is a JSON object of which one field is the text."""
    position: float
    """How much of its file, in bytes, comes before its end."""


def read_raw_documents(file: TextFile, *, field: str) -> Iterator[RawDocument]:
    """The documents of a file.

    Raises:
      BadRecordError: the file as a whole cannot be read.
    """
    suffixes = [suffix.lower() for suffix in file.path.suffixes[-2:]] or [""]
    is_gzip = suffixes[-1] == ".gz"
    kind = (suffixes[:-1] or [""])[-1] if is_gzip else suffixes[-1]
    if kind in PACKED_SUFFIXES:
        raise BadRecordError(f"{file.path}: unpack {kind} files first; only .gz is read as it is.")
    if kind == ".parquet" and not is_gzip:
        yield from _parquet_rows(file.path, field)
        return
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(file.path.open("rb"))
        stream: Any = stack.enter_context(gzip.open(opened)) if is_gzip else opened
        try:
            if kind in _JSON_SUFFIXES:
                yield from _json_lines(file.path, stream, opened)
            else:
                data = stream.read()
                yield RawDocument(str(file.path), data, is_json=False, position=opened.tell())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadRecordError(f"{file.path}: truncated or damaged ({error}).") from None


def _json_lines(path: Path, stream: IO[bytes], opened: IO[bytes]) -> Iterator[RawDocument]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield RawDocument(where, line.rstrip(), is_json=True, position=opened.tell())


def _parquet_rows(path: Path, field: str) -> Iterator[RawDocument]:
    parquet = require("pyarrow.parquet", needed_by="build_token_records")
    arrow = require("pyarrow", needed_by="build_token_records")
    try:
        with parquet.ParquetFile(path) as opened:
            names = opened.schema_arrow.names
            if field not in names:
                raise BadRecordError(
                    f"{path}: no column {field!r}{near_names(field, names)} Its columns: "
                    f"{', '.join(names)}."
                )
            kind = opened.schema_arrow.field(field).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise BadRecordError(f"{path}: column {field!r} is {kind}, expected string.")
            share = path.stat().st_size / max(opened.metadata.num_rows, 1)
            row = 0
            for batch in opened.iter_batches(_PARQUET_ROWS, columns=[field]):
                for text in batch.column(0).cast(arrow.large_binary()).to_pylist():
                    row += 1
                    where = f"{path}, row {row - 1}"
                    yield RawDocument(where, text, is_json=False, position=row * share)
    except (arrow.ArrowException, OSError) as error:
        raise BadRecordError(f"{path}: the Parquet file cannot be read ({error}).") from None


def text_of(document: RawDocument, field: str) -> bytes:
    """The text of a document.

    Raises:
      ValueError: it is no JSON object with such a field; the message says what it is. For bytes
        that are not UTF-8, a UnicodeDecodeError.
    """
    if document.data is None:
        raise ValueError("no text (null).")
    if not document.is_json:
        return document.data
    try:
        row = json.loads(document.data)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise ValueError(f"no line of JSON ({error}).") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}, expected an object.")
    if field not in row:
        raise ValueError(f"no field {field!r}{near_names(field, row)} Its fields: {_shown(row)}.")
    if not isinstance(row[field], str):
        raise ValueError(f"field {field!r} is {row[field]!r:.60}, expected a string.")
    try:
        return row[field].encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"field {field!r} is no Unicode text ({error.reason}).") from None


def _shown(names: Sequence[str] | dict[str, Any]) -> str:
    return ", ".join(names) or "none"
