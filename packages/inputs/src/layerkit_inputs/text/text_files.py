"""Documents of text files, JSON lines and Parquet files, and their split for training.

The format follows from the name: `.jsonl`, `.ndjson` and `.json` files hold one JSON object per
line, `.parquet` files hold rows, and any other file is one document. All but Parquet may be
compressed, with the suffix `.gz`. Memory holds one document, or at most a thousand rows of Parquet.
The unpacked size of a compressed document is bounded.

Files are split by their names if a name says that its file is held out, as in `train.jsonl` and
`val.jsonl`. Otherwise documents are split by a hash of their text, whatever the number of files, so
equal documents are in one split, and adding documents does not move others. Neither split is empty.
A few plain files, each of which is one document, are too few for this: the end of each is held out,
from a line break on.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import math
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import CONVERSATIONS, BadRecordError, as_bad_record, require_extra
from layerkit_inputs.base.find_files import TextFile

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
    is_readable = kind not in PACKED_SUFFIXES
    require(is_readable, str(file.path), "compression", kind, "none or .gz", BadRecordError)
    if kind == ".parquet" and not is_gzip:
        yield from _parquet_rows(file.path, field, max_document_bytes)
        return
    most = max_document_bytes if is_gzip else None
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(file.path.open("rb"))
        stream: Any = stack.enter_context(gzip.open(opened)) if is_gzip else opened
        kinds = EOFError, zlib.error, gzip.BadGzipFile
        stack.enter_context(as_bad_record(str(file.path), "truncated or damaged", *kinds))
        if kind in _JSON_SUFFIXES:
            yield from _json_lines(file.path, stream, opened, most)
        else:
            data = stream.read() if most is None else stream.read(most + 1)
            _check_size(data, most, str(file.path))
            yield RawDocument(str(file.path), data, is_json=False, position=opened.tell())


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
    from layerkit_inputs.parquet.row_group_sizes import open_parquet, texts_of

    arrow = require_extra("pyarrow", needed_by="Parquet files")
    kinds = arrow.ArrowException, OSError
    damaged = as_bad_record(str(path), "cannot read the Parquet file", *kinds)
    with damaged, open_parquet(path, columns=[field]) as opened:
        schema = opened.metadata.schema.to_arrow_schema()
        texts = [column.name for column in schema if _is_text(arrow, column.type)]
        if field not in texts:
            raise BadRecordError(
                owner=str(path),
                field="column",
                value=field,
                choices=texts or schema.names,
                hint=chat_hint(arrow, schema.types),
            )
        share = path.stat().st_size / max(opened.metadata.num_rows, 1)
        row = 0
        for batch in opened.iter_batches(_PARQUET_ROWS, columns=[field]):
            for text in texts_of(batch.column(0)):
                row += 1
                where = f"{path}, row {row - 1}"
                _check_size(text or b"", max_document_bytes, where)
                yield RawDocument(where, text, is_json=False, position=row * share)


def _is_text(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_string(kind) or arrow.types.is_large_string(kind))


def chat_hint(arrow: Any, kinds: Iterable[Any]) -> str | None:
    """Return a hint if an Arrow type is a list of structs, as of messages with roles."""
    is_list, is_large_list = arrow.types.is_list, arrow.types.is_large_list
    values = (kind.value_type for kind in kinds if is_list(kind) or is_large_list(kind))
    return CONVERSATIONS if any(map(arrow.types.is_struct, values)) else None


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


# A word ends at any character that is not a letter, as in `train-00000-of-00002` and `val2`.
_SPLIT_WORD = re.compile(
    r"(?<![^\W\d_])(?:"
    r"(?P<train>train|training)"
    r"|(?P<validation>validation|valid|val|dev|development|eval|evaluation|h[eo]ld[-_. ]?out)"
    r"|(?P<test>test|testing)"
    r")(?:set|split)?(?![^\W\d_])",
    re.IGNORECASE,
)
# Maximum ratio of the held-out share of a text to the requested share, if its lines are long.
_MAX_HELD_OUT_RATIO = 3
_HASH_BYTES = 8
_Result = TypeVar("_Result")


class FilePiece(NamedTuple):
    """Consecutive bytes of a file, `[start, stop)`, that are one document."""

    file: TextFile
    start: int
    stop: int

    @classmethod
    def whole(cls, file: TextFile) -> FilePiece:
        """Return all bytes of a file."""
        return cls(file, 0, file.path.stat().st_size)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    def read(self, limit: int | None = None) -> bytes:
        """Return the bytes, up to `limit`."""
        with self.file.path.open("rb") as opened:
            opened.seek(self.start)
            return opened.read(self.size if limit is None else min(self.size, limit))


def named_split(path: str) -> str | None:
    """Return the split that a relative path names: `train`, `validation`, `test` or None.

    The last part of the path that names a split decides. A part that names both training and
    held-out text, such as `train_val`, names none.
    """
    for part in reversed(path.split("/")):
        splits = [match.lastgroup for match in _SPLIT_WORD.finditer(part)]
        if splits:
            is_mixed = "train" in splits and set(splits) != {"train"}
            return None if is_mixed else splits[-1]
    return None


def split_by_names(files: Sequence[TextFile]) -> dict[str, list[TextFile]] | None:
    """Return the files of each split that is named, or None if no file is named as held out.

    Names are relative to the deepest folder that holds all files. Files without a name of a split
    are training files. `heldout` has the files of `validation`, or of `test` if there are none.
    """
    root = os.path.commonpath([os.path.abspath(file.path.parent) for file in files])
    splits: dict[str, list[TextFile]] = {}
    for file in files:
        name = os.path.relpath(os.path.abspath(file.path), root).replace(os.sep, "/")
        splits.setdefault(named_split(name) or "train", []).append(file)
    held_out = splits.get("validation") or splits.get("test")
    return None if held_out is None else {**splits, "heldout": held_out}


def split_pieces(
    files: Sequence[TextFile], *, heldout_fraction: float
) -> tuple[list[FilePiece], list[FilePiece]]:
    """Return (training pieces, held-out pieces) of plain files, each of which is a document.

    Raises:
      ConfigError: A single file cannot be cut, or all files are equal.
    """
    whole = [FilePiece.whole(file) for file in files]
    if len(files) * heldout_fraction < 1:
        cut_of = functools.partial(split_position, heldout_fraction=heldout_fraction)
        cuts = [_of_contents(file, cut_of) for file in files]
        if any(cuts):
            pairs = [*zip(whole, cuts, strict=True)]
            train = [piece._replace(stop=cut or piece.stop) for piece, cut in pairs]
            return train, [piece._replace(start=cut) for piece, cut in pairs if cut]
        if len(files) == 1:
            problem = f"no line begins near the last {heldout_fraction:.0%}, which are held out"
            raise ConfigError(problem, owner=str(files[0].path))
    shares = [_of_contents(file, share_of) for file in files]
    limit = heldout_limit(shares, fraction=heldout_fraction)
    shared = [*zip(whole, shares, strict=True)]
    train = [piece for piece, share in shared if share >= limit]
    return train, [piece for piece, share in shared if share < limit]


def heldout_limit(shares: Iterable[float], *, fraction: float) -> float:
    """Return the limit below which a share is held out, so that neither split is empty.

    It is `fraction`, unless all shares are on one side of it. Then only the lowest share is held
    out, or all but the highest.

    Args:
      shares: `share_of` the text of each document.
      fraction: Requested share of the documents.

    Raises:
      ConfigError: All shares are equal.
    """
    every = sorted(set(shares))
    if len(every) < 2:
        raise ConfigError("all documents have the same text, so none can be held out")
    if every[0] >= fraction:
        return math.nextafter(every[0], 1.0)
    return min(fraction, every[-1])


def split_position(text: bytes | mmap.mmap, *, heldout_fraction: float) -> int | None:
    """Return the position of the held-out end of a text, which is the beginning of a line.

    It is None if no line begins near it.
    """
    ideal = int(len(text) * (1 - heldout_fraction))
    lines = (text.rfind(b"\n", 0, ideal) + 1, text.find(b"\n", ideal) + 1)
    cuts = [begin for begin in lines if 0 < begin < len(text)]
    cut = min(cuts, key=lambda cut: abs(cut - ideal), default=None)
    if cut is None or len(text) - cut > _MAX_HELD_OUT_RATIO * heldout_fraction * len(text):
        return None
    return cut


def share_of(content: bytes | mmap.mmap) -> float:
    """Return a number in [0, 1) from a hash of the content."""
    digest = hashlib.blake2b(content, digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "big") / 2 ** (8 * _HASH_BYTES)


def _of_contents(file: TextFile, function: Callable[[bytes | mmap.mmap], _Result]) -> _Result:
    """Return a function of the contents of a file. Only the parts that it uses are read."""
    if not file.path.stat().st_size:  # An empty file cannot be memory-mapped.
        return function(b"")
    with (
        file.path.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        return function(mapped)
