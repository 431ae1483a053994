"""Reading of documents from text files, JSON lines and Parquet files.

The format follows from the name: `.jsonl`, `.ndjson` and `.json` files hold one JSON object per
line, `.parquet` files hold rows, and any other file is one document. All but Parquet may be
compressed, with the suffix `.gz`. Memory holds one document, or at most a thousand rows of Parquet.
The unpacked size of a compressed document is bounded.
"""

from __future__ import annotations

import contextlib
import difflib
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from layerkit.errors import ConfigError
from layerkit_inputs.base.bad_records import CONVERSATIONS, BadRecordError, UnfitFieldError
from layerkit_inputs.base.errors import require_extra
from layerkit_inputs.base.find_files import TextFile
from layerkit_inputs.parquet.row_group_sizes import open_parquet, row_group_batches

MAX_DOCUMENT_BYTES = 1 << 30
"""Default bound on the bytes of a document of a compressed file."""
_JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
PACKED_SUFFIXES = frozenset({".bz2", ".xz", ".zip", ".zst", ".tar", ".7z"})
"""Suffixes of compressed files that are not supported."""
_PARQUET_ROWS = 1000
_PARQUET_BYTES = 1 << 27
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
            owner=str(file.path),
            field="compression",
            value=kind,
            expected="none or .gz",
            hint="Unpack the file.",
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
        raise DocumentSizeError(
            "the unpacked document is larger than the bound",
            owner=where,
            field="max_document_bytes",
            value=max_bytes,
            hint="Unpack the file to inspect it, or increase max_document_bytes.",
        )


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
        with open_parquet(path) as opened:
            schema = opened.schema_arrow
            texts = [column.name for column in schema if _is_text(arrow, column.type)]
            if field not in schema.names:
                has_conversations = any(is_list_of_structs(arrow, kind) for kind in schema.types)
                raise BadRecordError(
                    "no such column",
                    owner=str(path),
                    field="column",
                    value=field,
                    choices=texts or schema.names,
                    hint=CONVERSATIONS if has_conversations else None,
                    remedies={"text_field": nearest_field(field, texts)} if texts else {},
                )
            kind = schema.field(field).type
            if field not in texts:
                raise BadRecordError(
                    owner=str(path),
                    field=f"type of column {field!r}",
                    value=str(kind),
                    expected="string",
                    hint=CONVERSATIONS if is_list_of_structs(arrow, kind) else None,
                )
            share = path.stat().st_size / max(opened.metadata.num_rows, 1)
            row = 0
            for batch in _parquet_batches(path, opened, field):
                for text in batch.column(0).cast(arrow.large_binary()).to_pylist():
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


def _parquet_batches(path: Path, opened: Any, field: str) -> Iterator[Any]:
    for group in range(opened.num_row_groups):
        yield from row_group_batches(
            path, opened, group, columns=[field], max_bytes=_PARQUET_BYTES, most_rows=_PARQUET_ROWS
        )


def num_declared_documents(file: TextFile) -> int:
    """Return the number of rows that a Parquet file declares, or 1 for any other file.

    A Parquet file that cannot be read counts as 1; reading it raises the error.
    """
    if file.path.suffix.lower() != ".parquet":
        return 1
    arrow = require_extra("pyarrow", needed_by="Parquet files")
    try:
        with open_parquet(file.path) as opened:
            return int(opened.metadata.num_rows)
    except (arrow.ArrowException, OSError):
        return 1


def is_json(file: TextFile) -> bool:
    """Return True if the suffix of a file means JSON lines, which may be compressed."""
    suffixes = file.path.name.lower().removesuffix(".gz")
    return Path(suffixes).suffix in _JSON_SUFFIXES


def is_packed(file: TextFile) -> bool:
    """Return True if the suffix of a file means that it is compressed, or a Parquet file."""
    return file.path.suffix.lower() in {*PACKED_SUFFIXES, ".gz", ".parquet"}


def json_line_fields(path: Path) -> dict[str, Any] | None:
    """Return the fields of the first lines of a file if each is a JSON object, else None."""
    rows: list[dict[str, Any]] = []
    with path.open("rb") as opened:
        while len(rows) < _LINES_LOOKED_AT and (line := opened.readline(_LONGEST_LINE)):
            if not line.strip():
                continue
            try:
                row = json.loads(line) if line.lstrip(b"\xef\xbb\xbf \t")[:1] == b"{" else None
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                return None
            rows.append(row)
    return _merged(rows) if rows else None


def first_fields(file: TextFile, *, max_document_bytes: int) -> dict[str, Any]:
    """Return the fields of the JSON objects among the first documents of a file."""
    documents = read_raw_documents(file, field="", max_document_bytes=max_document_bytes)
    rows = []
    for document in itertools.islice(documents, _LINES_LOOKED_AT):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(document.data or b"")
            rows += [row] if isinstance(row, dict) else []
    return _merged(rows)


def _merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all fields of some objects: the first text of each, else a value that is not empty."""
    fields: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            is_empty = fields.get(name) in (None, [])
            if is_empty or (type(value) is str and type(fields[name]) is not str):
                fields[name] = value
    return fields


def check_text_field(
    file: TextFile, field: str, *, owner: str | None, option: str, max_document_bytes: int
) -> None:
    """Raise if a file does not begin with JSON objects that have text in a field.

    This is a mistake about the whole file, not a bad record.

    Args:
      file: File of JSON lines.
      field: Field of the text.
      owner: Label of the reader in the message.
      option: Name of the option that names the field.
      max_document_bytes: Bound as in `read_raw_documents`.

    Raises:
      UnfitFieldError: The field has no text.
    """
    fields = first_fields(file, max_document_bytes=max_document_bytes)
    if not fields:
        raise UnfitFieldError(
            f"the first lines of {file.path} are no JSON objects",
            owner=owner,
            field=option,
            value=field,
            expected="one object in each line",
            hint="Write an array, or objects of several lines, as JSON lines.",
        )
    if type(fields.get(field)) is not str:
        raise unfit_text_field(file.path, fields, field, owner=owner, option=option)


def unfit_text_field(
    path: Path, fields: Mapping[str, Any], field: str | None, *, owner: str | None, option: str
) -> UnfitFieldError:
    """Return the error about a field that has no text in a file of JSON lines, or is not set.

    Args:
      path: File.
      fields: Fields of its first objects, each with a value.
      field: Field of the text, or None.
      owner: Label of the reader in the message.
      option: Name of the option that names the field.
    """
    texts = [name for name, value in fields.items() if type(value) is str]
    turns = (
        name
        for name, value in fields.items()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    )
    if (name := next(turns, None)) is not None:
        return UnfitFieldError(
            f"{path} holds conversations in the field {name!r}, which readers of text do not read",
            owner=owner,
            field=option,
            value=field,
            choices=[text for text in texts if text != field],
            hint=CONVERSATIONS,
        )
    if field is None:
        problem = f"{path} holds a JSON object in each line"
    elif field in fields:
        problem = f"the first lines of {path} hold no text in this field"
    else:
        problem = f"the first lines of {path} do not have this field"
    return UnfitFieldError(
        problem,
        owner=owner,
        field=option,
        value=field,
        expected="the field that holds the text",
        choices=texts or [name for name in fields if name != field],
        remedies={option: nearest_field(field or "text", texts)} if texts else {},
    )


def nearest_field(name: str, fields: Sequence[str]) -> str:
    """Return the field most similar to `name`; if none is similar, `text` or the first field."""
    near = difflib.get_close_matches(name, fields, n=1)
    return [*near, *(field for field in fields if field == "text"), *fields][0]


def text_of(document: RawDocument, field: str) -> bytes:
    """Return the text of a document.

    Raises:
      ConfigError: The document is a JSON object without the field.
      UnicodeDecodeError: The document is not UTF-8.
      ValueError: The document is not a JSON object, or the field is not text.
    """
    if document.data is None:
        raise ValueError("no text (null).")
    if not document.is_json:
        return document.data
    try:
        row = json.loads(document.data)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON ({error}).") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}, expected an object.")
    if field not in row:
        raise ConfigError("no such field", field="field", value=field, choices=row)
    if not isinstance(row[field], str):
        raise ValueError(f"field {field!r} is {row[field]!r:.60}, expected a string.")
    try:
        return row[field].encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"field {field!r} is not Unicode text ({error.reason}).") from None
