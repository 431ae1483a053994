"""LocalText and LocalTextPrompts, inputs of local text files, by bytes or any tokenizer.

The default files are the standard library of the running interpreter, sources and documentation
topics, so a model can be trained on real text without a download.

A document is a file, or with `text_field` a line of JSON. A document of n tokens gives n + 1
predictions: its tokens, the first of them from the start id, and its end id. The documents are
concatenated and cut into rows, so an epoch predicts every token and every end exactly once. A row
that begins inside a document has only the token before it as context.

The files are tokenized on first use, and their ids are kept in memory: with bytes as tokens two
bytes an id. For larger data, build token records once by
`layerkit_inputs.tools.build_token_records` and read them with TokenRecords.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np

from layerkit.checks import check_choice, require
from layerkit.errors import UserError, first_names
from layerkit.nested_map import NestedMap
from layerkit_inputs.bad_records import BadRecordError, BadRecords, OnBadRecord, UnfitFieldError
from layerkit_inputs.documents import DocumentBuilder, Documents
from layerkit_inputs.features import stretch_features
from layerkit_inputs.indexed_input import IndexedInput
from layerkit_inputs.text_files import (
    TextFile,
    find_text_files,
    held_out_shares,
    share_of,
    split_files,
    split_position_of_file,
    standard_library_files,
)
from layerkit_inputs.tokenizers import ByteTokenizer, Tokenizer
from layerkit_inputs.tools.raw_documents import (
    DocumentSizeError,
    MissingFieldError,
    first_fields,
    is_packed,
    json_line_fields,
    nearest_field,
    num_declared_documents,
    read_raw_documents,
    text_of,
)
from layerkit_inputs.trigram import trigram_loss

_SPLITS = ("train", "heldout", "all")
_TABLE_BYTES = 1 << 26
"""Maximum bytes of training text that the table of `baselines` counts, which takes seconds."""
_PART_BYTES = 1 << 20
"""Bytes of a file that are read at once if tokens are bytes."""


def _first_bytes(files: Sequence[TextFile], limit: int) -> Iterator[bytes]:
    """Yield the contents of the files, one at a time, up to `limit` bytes in total."""
    for file in files:
        if limit <= 0:
            return
        with file.path.open("rb") as opened:
            data = opened.read(limit)
        limit -= len(data)
        yield data


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


class _TextFilesInput(IndexedInput):
    """Base class of inputs of local text files. The files are read on first use."""

    token_unit: ClassVar[str] = "byte"
    rows_in_memory: ClassVar[bool] = True

    paths: Sequence[str] | None = None
    """Files, folders or patterns. None: the standard library of the running interpreter."""
    split: str = "train"
    """`train`, `heldout` (see `heldout_fraction`) or `all`."""
    heldout_fraction: float = 0.05
    """Share of the files that is held out, by a hash of their names. For a single file with
    `text_field`, share of its documents, by a hash of their text; without it, share of its end."""
    max_bytes: int = 1 << 28
    """Maximum bytes of the decompressed files of a split. Their tokens are kept in memory, two
    bytes a token, or four with a vocabulary of more than 65,536."""
    tokenizer: Tokenizer | None = None
    """Tokenizer of the text. None: bytes."""
    text_field: str | None = None
    """Field of the text in JSON lines (or Parquet), in which each line is a document. None: each
    file is a document."""
    json_as_text: bool = False
    """Whether JSON lines are read as plain text if `text_field` is None. False: they raise."""
    on_bad_record: OnBadRecord = "refuse"
    """`refuse` raises for unreadable documents, such as invalid UTF-8 if the tokenizer needs text;
    `skip` skips and counts them."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_choice(self._label, _SPLITS, split=self.split)
        check_choice(self._label, get_args(OnBadRecord), on_bad_record=self.on_bad_record)
        fraction = self.heldout_fraction
        expected = "a number in (0, 1)"
        require(0 < fraction < 1, self._label, "heldout_fraction", fraction, expected)
        is_valid = self.paths is None or (len(self.paths) and not isinstance(self.paths, str))
        require(is_valid, self._label, "paths", self.paths, "a list of at least one path")
        self._tokenizer = ByteTokenizer() if self.tokenizer is None else self.tokenizer
        self._of_bytes = isinstance(self._tokenizer, ByteTokenizer)
        if not self._of_bytes:
            self.token_unit = "token"  # type: ignore[misc]
        self._bad = BadRecords(self.on_bad_record)
        self._all_files: list[TextFile] | None = None
        self._documents: Documents | None = None
        self._checksum = 0
        self._bytes_left = self.max_bytes

    @property
    def num_skipped(self) -> int:
        """Number of documents and files that were skipped."""
        return self._bad.num_skipped

    def _found(self) -> list[TextFile]:
        """Return the files of all splits, which are searched once."""
        if self._all_files is None:
            found = standard_library_files() if self.paths is None else find_text_files(self.paths)
            self._all_files = found
        return self._all_files

    def _files(self, split: str) -> list[TextFile]:
        """Return the files of a split. A single file belongs to both splits."""
        found = self._found()
        if split == "all" or len(found) == 1:
            return found
        return split_files(found, heldout_fraction=self.heldout_fraction)[_SPLITS.index(split)]

    def _corpus(self) -> Documents:
        if self._documents is None:
            files = self._files(self.split)
            plain = sum(file.path.stat().st_size for file in files if not is_packed(file))
            packed = sum(num_declared_documents(file) for file in files if is_packed(file))
            if plain + packed > self.max_bytes:
                raise self._too_large(plain + packed)
            self._bytes_left = self.max_bytes - plain
            self._documents = self._read_corpus(files)
        return self._documents

    def _too_large(self, size: int | None) -> UnfitFieldError:
        """Return the error of too much text; `size` is None if it is unknown before reading."""
        given = "decompress to more bytes" if size is None else f"hold {size} bytes"
        return UnfitFieldError(
            f"the {self.split} files {given}",
            owner=self._label,
            field="max_bytes",
            value=self.max_bytes,
            hint="Their tokens are kept in memory. Set paths to fewer files, or raise max_bytes.",
            remedies={} if size is None else {"max_bytes": size},
        )

    def _read_corpus(self, files: Sequence[TextFile]) -> Documents:
        """Read and tokenize the files, one document or part of a document at a time."""
        self._bad, self._checksum = BadRecords(self.on_bad_record), 0
        builder = DocumentBuilder(self._tokenizer)
        is_alone = len(self._found()) == 1
        for file in files:
            self._update_checksum(file.name.encode("utf-8", "replace"))
            if self.text_field is not None:
                texts = self._split_texts(file) if is_alone else self._texts(file)
                documents: Iterable[tuple[str, Iterable[bytes]]]
                documents = ((where, [text]) for where, text in texts)
            else:
                self._check_plain(file)
                documents = [self._whole_file(file, is_alone=is_alone)]
            for where, parts in documents:
                self._add(builder, where, parts)
        if not builder:
            raise self._config_error(
                f"no document of the {self.split} files can be read",
                field="number of skipped documents",
                value=self.num_skipped,
                hint=f"First problem: {self._bad.first[0]}" if self._bad.first else None,
            )
        return builder.build()

    def _add(self, builder: DocumentBuilder, where: str, parts: Iterable[bytes]) -> None:
        checksum = self._checksum

        def tokens() -> Iterator[np.ndarray]:
            for part in parts:
                yield self._tokenizer.encode(part)
                self._update_checksum(part)

        try:
            builder.add(tokens())
        except UnicodeDecodeError as error:
            self._checksum = checksum
            byte = error.object[error.start]
            problem = f"byte {error.start} is 0x{byte:02x}, which is not UTF-8."
            self._bad.report(file=where, record=None, problem=problem)

    def _update_checksum(self, data: bytes) -> None:
        self._checksum = zlib.crc32(data, self._checksum)

    def _whole_file(self, file: TextFile, *, is_alone: bool) -> tuple[str, Iterator[bytes]]:
        """Return the place of a document that is a file, and its bytes in parts.

        In a single file, a split is the part before or after a line near its end.
        """
        where = str(file.path)
        if not is_alone or self.split == "all":
            return where, self._parts(file.path)
        cut = self._split_position(file)
        if self.split == "train":
            return where, self._parts(file.path, stop=cut)
        return f"{where} after {cut}", self._parts(file.path, start=cut)

    def _parts(self, path: Path, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield bytes of a file, in one part if a token may span several."""
        left = (path.stat().st_size if stop is None else stop) - start
        size = _PART_BYTES if self._of_bytes else max(left, 1)
        with path.open("rb") as file:
            file.seek(start)
            while part := file.read(min(size, left)):
                left -= len(part)
                yield part

    def _check_plain(self, file: TextFile) -> None:
        """Raise for a file that is not plain text."""
        if is_packed(file):
            raise self._config_error(
                f"{file.path} is not plain text",
                field="text_field",
                value=self.text_field,
                expected="the field that holds the text",
                hint="Set text_field, or decompress the file.",
            )
        if self.json_as_text or not (fields := json_line_fields(file.path)):
            return
        raise UnfitFieldError(
            f"{file.path} holds a JSON object in each line",
            owner=self._label,
            field="text_field",
            value=None,
            expected="the field that holds the text",
            choices=fields,
            hint="Set text_field, or json_as_text=True to read the lines as plain text.",
            remedies={"text_field": fields[0], "json_as_text": True},
        )

    def _split_position(self, file: TextFile) -> int:
        """Return the position of the held-out part of a single file that is one document."""
        self._check_plain(file)
        try:
            return split_position_of_file(file.path, heldout_fraction=self.heldout_fraction)
        except UserError as error:
            error.owner = f"{self._label}: {file.path}"
            raise

    def _split_texts(self, file: TextFile) -> Iterator[tuple[str, bytes]]:
        """Yield the documents of a split of a single file, which is read twice."""
        if self.split == "all":
            yield from self._texts(file)
            return
        bad, bytes_left = self._bad, self._bytes_left
        self._bad = BadRecords(self.on_bad_record)
        shares: dict[bytes, float] = {}
        count = 0
        for _, text in self._texts(file):
            count += 1
            shares.setdefault(_digest(text), share_of(text))
        self._bad, self._bytes_left = bad, bytes_left
        if count and len(shares) < 2:
            raise self._config_error(
                f"all {count} documents of {file.path}, the only file, have the same text, so none"
                " can be held out",
                hint="Add a second file to paths, or set split='all'.",
            )
        chosen = held_out_shares(list(shares.values()), fraction=self.heldout_fraction)
        wanted = {
            digest
            for index, digest in enumerate(shares)
            if (index in chosen) == (self.split != "train")
        }
        yield from (text for text in self._texts(file) if _digest(text[1]) in wanted)

    def _texts(self, file: TextFile) -> Iterator[tuple[str, bytes]]:
        """Yield the place and text of each document of a file, by `text_field`."""
        assert self.text_field is not None
        size = self._bytes_left if is_packed(file) else self.max_bytes
        documents = read_raw_documents(file, field=self.text_field, max_document_bytes=size)
        try:
            for document in documents:
                if is_packed(file):
                    self._bytes_left -= len(document.data or b"") + 1
                if self._bytes_left < 0:
                    raise self._too_large(None)
                try:
                    yield document.where, text_of(document, self.text_field)
                except ValueError as error:
                    if isinstance(error, MissingFieldError):
                        self._check_text_field(file, max_document_bytes=size)
                    self._bad.report(file=document.where, record=None, problem=str(error))
        except DocumentSizeError:
            raise self._too_large(None) from None
        except BadRecordError as error:
            if self.on_bad_record == "refuse":
                raise
            problem = str(error).removeprefix(f"{file.path}: ")
            self._bad.report(file=str(file.path), record=None, problem=problem)

    def _check_text_field(self, file: TextFile, *, max_document_bytes: int) -> None:
        """Raise if none of the first documents of a file has `text_field`.

        Such a field is a mistake, since `on_bad_record="skip"` would skip the whole file.
        """
        assert self.text_field is not None
        fields = first_fields(file, max_document_bytes=max_document_bytes)
        if self.on_bad_record == "skip" or self.text_field in fields or not fields:
            return
        raise UnfitFieldError(
            f"the first lines of {file.path} do not have this field",
            owner=self._label,
            field="text_field",
            value=self.text_field,
            expected=f"the field that holds the text, one of {first_names(map(repr, fields))}",
            choices=fields,
            remedies={"text_field": nearest_field(self.text_field, fields)},
        )

    def _fingerprint(self) -> dict[str, Any]:
        tokenizer = {} if self._of_bytes else {"tokenizer": self._tokenizer.fingerprint()}
        self._corpus()
        return {"split": self.split, "text_crc32": self._checksum, **tokenizer}

    def text_tokenizer(self, key: str | None = None) -> Tokenizer:
        """Return the tokenizer that made the ids."""
        return self._tokenizer


class LocalText(_TextFilesInput):
    """An input of packed rows of text for language modeling.

    Batches hold arrays `[batch, length]`: `ids` and `labels` (int32; a label is the document's next
    token or its end id), `weights` (float32, 1 where a label counts), `paddings` (float32, 1 where
    padded), `segment_ids` and `segment_pos` (int32; see `packing`). Evaluation batches
    also have `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    seq_length: int = 256
    """Positions of a row."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(1, "seq_length")

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of empty rows, whose arrays do not depend on the text."""
        nothing = np.zeros(0, np.int64)
        return stretch_features(
            nothing, nothing, rows=nothing, sizes=nothing, num_rows=rows, length=config.seq_length
        )

    def _num_rows(self) -> int:
        return self._corpus().num_stream_rows(self.seq_length)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        pad_id = self._tokenizer.pad_id
        return self._corpus().stream_rows(rows, length=self.seq_length, pad_id=pad_id)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "seq_length": self.seq_length}

    def baselines(self) -> dict[str, float]:
        """Return the loss of a trigram table of the training files, in nats per byte.

        It is available for held-out files of bytes. The table counts the first 64 MiB of training
        text, in the order of the files' names. Files are read one at a time.
        """
        if self.split != "heldout" or not self._of_bytes or self.text_field is not None:
            return {}
        found = self._found()
        if len(found) == 1:
            path, cut = found[0].path, self._split_position(found[0])
            with path.open("rb") as file:
                before = file.read(min(cut, _TABLE_BYTES))
                file.seek(cut)
                return {"trigram table": trigram_loss([before], [file.read()])}
        train = _first_bytes(self._files("train"), _TABLE_BYTES)
        heldout = (file.path.read_bytes() for file in self._files("heldout"))
        return {"trigram table": trigram_loss(train, heldout)}


class LocalTextPrompts(_TextFilesInput):
    """An input of beginnings of documents, for a model to continue.

    Batches hold `ids` (int32 `[batch, length]`: the start id and the first tokens of the document,
    padded on the right), `paddings` (float32 `[batch, length]`, 1 where padded) and
    `prompt_lengths` (int32 `[batch]`, including the start id), and `provenance` and
    `eval_sample_weights` as in LocalText.
    """

    split: str = "heldout"
    """`train`, `heldout` or `all`."""
    prompt_length: int = 64
    """Maximum number of ids of a prompt, including the start id."""
    num_prompts: int | None = None
    """Number of prompts, one for each of the first documents. None: all documents."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(1, "prompt_length", "num_prompts")

    def _num_rows(self) -> int:
        documents = len(self._corpus())
        return documents if self.num_prompts is None else min(self.num_prompts, documents)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return self._corpus().prompts(rows, length=self.prompt_length, tokenizer=self._tokenizer)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "prompt_length": self.prompt_length}
