"""Reading of documents from text files, JSON lines and Parquet files.

The format follows from the name: `.jsonl`, `.ndjson` and `.json` files hold one JSON object per
line, `.parquet` files hold rows, and any other file is one document. All but Parquet may be
compressed, with the suffix `.gz`. Memory holds one document, or at most a thousand rows of Parquet.
The unpacked size of a compressed document is bounded.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from layerkit.errors import ConfigError
from layerkit_inputs.base.bad_records import CONVERSATIONS, BadRecordError
from layerkit_inputs.base.errors import require_extra
from layerkit_inputs.base.find_files import TextFile
from layerkit_inputs.parquet.row_group_sizes import open_parquet, texts_of

MAX_DOCUMENT_BYTES = 1 << 30
"""Default bound on the bytes of a document of a compressed file."""
_JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
PACKED_SUFFIXES = frozenset({".bz2", ".xz", ".zip", ".zst", ".tar", ".7z"})
"""Suffixes of compressed files that are not supported."""
_PARQUET_ROWS = 1000
_LINES_LOOKED_AT = 3
_LONGEST_LINE = 1 << 24


class DocumentSizeError(ConfigError):
    """An error about a document of a compressed file that is larger than the bound."""


class RawDocument(NamedTuple):
    """A document before parsing."""

    where: str
    """File, and line or row."""
    data: bytes | None
    """Bytes of the document, or None for a row without text."""
    is_json: bool
    """True if `data` is a JSON object with the text in one field."""
    position: float
    """Number of bytes of the file up to the end of the document."""
    split: str | None = None
    """Split that the names of files give the document, or None."""


def read_raw_documents(
    file: TextFile, *, field: str, max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[RawDocument]:
    """Yield the documents of a file.

    Args:
      file: File to read.
      field: Column of the text in a Parquet file.
      max_document_bytes: Largest size in bytes of a document, or line of JSON, of a compressed
        file.

    Raises:
      BadRecordError: The file cannot be read.
      DocumentSizeError: A document is larger than the bound.
    """
    suffixes = [suffix.lower() for suffix in file.path.suffixes[-2:]] or [""]
    is_gzip = suffixes[-1] == ".gz"
    kind = (suffixes[:-1] or [""])[-1] if is_gzip else suffixes[-1]
    if kind in PACKED_SUFFIXES:
        raise BadRecordError(
            owner=str(file.path), field="compression", value=kind, expected="none or .gz"
        )
    if kind == ".parquet" and not is_gzip:
        yield from _parquet_rows(file.path, field, max_document_bytes)
        return
    most = max_document_bytes if is_gzip else None
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(file.path.open("rb"))
        stream: Any = stack.enter_context(gzip.open(opened)) if is_gzip else opened
        try:
            if kind in _JSON_SUFFIXES:
                yield from _json_lines(file.path, stream, opened, most)
            else:
                data = stream.read() if most is None else stream.read(most + 1)
                _check_size(data, most, str(file.path))
                yield RawDocument(str(file.path), data, is_json=False, position=opened.tell())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            problem = f"truncated or damaged ({error})"
            raise BadRecordError(problem, owner=str(file.path)) from None


def _check_size(data: bytes, max_bytes: int | None, where: str) -> None:
    if max_bytes is not None and len(data) > max_bytes:
        problem = "the unpacked document is larger"
        raise DocumentSizeError(problem, owner=where, field="max_document_bytes", value=max_bytes)


def _json_lines(
    path: Path, stream: IO[bytes], opened: IO[bytes], most: int | None
) -> Iterator[RawDocument]:
    lines = stream if most is None else iter(lambda: stream.readline(most + 1), b"")
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        _check_size(line, most, where)
        if line.strip():
            yield RawDocument(where, line.rstrip(), is_json=True, position=opened.tell())


def _parquet_rows(path: Path, field: str, max_document_bytes: int) -> Iterator[RawDocument]:
    arrow = require_extra("pyarrow", needed_by="Parquet files")
    try:
        with open_parquet(path, columns=[field]) as opened:
            schema = opened.metadata.schema.to_arrow_schema()
            texts = [column.name for column in schema if _is_text(arrow, column.type)]
            if field not in texts:
                is_chat = any(is_list_of_structs(arrow, kind) for kind in schema.types)
                raise BadRecordError(
                    owner=str(path),
                    field="column",
                    value=field,
                    choices=texts or schema.names,
                    hint=CONVERSATIONS if is_chat else None,
                )
            share = path.stat().st_size / max(opened.metadata.num_rows, 1)
            row = 0
            for batch in opened.iter_batches(_PARQUET_ROWS, columns=[field]):
                for text in texts_of(batch.column(0)):
                    row += 1
                    where = f"{path}, row {row - 1}"
                    _check_size(text or b"", max_document_bytes, where)
                    yield RawDocument(where, text, is_json=False, position=row * share)
    except (arrow.ArrowException, OSError) as error:
        raise BadRecordError(f"cannot read the Parquet file ({error})", owner=str(path)) from None


def _is_text(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_string(kind) or arrow.types.is_large_string(kind))


def is_list_of_structs(arrow: Any, kind: Any) -> bool:
    """Return True if an Arrow type is a list of structs, as of messages with roles."""
    is_list = arrow.types.is_list(kind) or arrow.types.is_large_list(kind)
    return is_list and arrow.types.is_struct(kind.value_type)


def is_packed(file: TextFile) -> bool:
    """Return True if the suffix of a file means that it is compressed, or a Parquet file."""
    return file.path.suffix.lower() in {*PACKED_SUFFIXES, ".gz", ".parquet"}


def json_line_fields(path: Path) -> dict[str, Any]:
    """Return the fields of the first lines of a file if each is a JSON object, else {}."""
    fields: dict[str, Any] = {}
    with path.open("rb") as opened:
        lines = iter(lambda: opened.readline(_LONGEST_LINE), b"")
        for line in itertools.islice(filter(bytes.strip, lines), _LINES_LOOKED_AT):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return {}
            if not isinstance(row, dict):
                return {}
            # Of several lines, a value that is not empty.
            fields |= {name: value for name, value in row.items() if fields.get(name) in (None, [])}
    return fields


def conversations_hint(fields: Mapping[str, Any]) -> str | None:
    """Return a hint if a field holds messages with roles, which readers of text do not read."""
    values = (value[0] for value in fields.values() if isinstance(value, list) and value)
    return CONVERSATIONS if any(isinstance(value, dict) for value in values) else None


def text_of(document: RawDocument, field: str) -> bytes:
    """Return the text of a document.

    Raises:
      ConfigError: The document is a JSON object without the field.
      UnicodeError: The document is not UTF-8, or the text is not Unicode.
      ValueError: The document is not a JSON object, or the field is not text.
    """
    if document.data is None:
        raise ValueError("no text (null).")
    if not document.is_json:
        return document.data
    try:
        row = json.loads(document.data)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not a line of JSON ({error}).") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}, expected an object.")
    if field not in row:
        raise ConfigError("no such field", field="field", value=field, choices=row)
    if not isinstance(row[field], str):
        problem = f"field {field!r} is {row[field]!r:.60}, expected a string."
        raise ValueError(" ".join(filter(None, [problem, conversations_hint(row)])))
    return row[field].encode("utf-8")
