"""LocalText and LocalTextPrompts, inputs of local text files, by bytes or any tokenizer.

The default files are the standard library of the running interpreter, sources and documentation
topics, so a model can be trained on real text without a download.

A document is a file, or with `text_field` a line of JSON. A document of n tokens gives n + 1
predictions: its tokens, the first of them from the start id, and its end id. The documents are
concatenated and cut into rows, so an epoch predicts every token and every end exactly once. A row
that begins inside a document has only the token before it as context.

Files whose names say so are held out, else documents by their text, so that the training split and
the held-out split share no document; see `text_files`.

The files are tokenized on first use, and their ids are kept in memory: with bytes as tokens two
bytes an id. For larger data, build token records once by
`layerkit_inputs.tools.build_token_records` and read them with TokenRecords.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from layerkit.config.checks import require
from layerkit.config.hparams import Conditions
from layerkit.config.nested_map import NestedMap
from layerkit.errors import first_names
from layerkit_inputs.base.base_input import FIRST_TEXT_BYTES, NUM_FIRST_TEXTS, counted
from layerkit_inputs.base.errors import BadRecordError, BadRecords, OnBadRecord
from layerkit_inputs.base.find_files import TextFile, find_text_files, standard_library_files
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_inputs.packing.documents import (
    DocumentBuilder,
    DocumentInput,
    DocumentPrompts,
    Documents,
    RowPlan,
)
from layerkit_inputs.packing.model_features import segment_features
from layerkit_inputs.text.text_files import (
    DocumentSizeError,
    FilePiece,
    conversations_hint,
    heldout_limit,
    is_packed,
    json_line_fields,
    read_raw_documents,
    share_of,
    split_by_names,
    split_pieces,
    text_of,
)
from layerkit_inputs.text.tokenizers import ByteTokenizer

Split = Literal["train", "heldout", "test", "all"]
_TABLE_BYTES = 1 << 26
"""Maximum bytes of training text that the table of `baselines` counts, which takes seconds."""
_MAX_FILES_SHOWN = 4
_PART_BYTES = 1 << 20
"""Bytes of a file that are read at once if tokens are bytes."""


def _first_bytes(pieces: Iterable[FilePiece], limit: int) -> Iterator[bytes]:
    """Yield the contents of documents, one at a time, up to `limit` bytes in total."""
    for piece in pieces:
        if limit <= 0:
            return
        data = piece.read(limit)
        limit -= len(data)
        yield data


class _TextFilesInput(DocumentInput):
    """Base class of inputs of local text files. The files are read on first use."""

    token_unit: ClassVar[str] = "byte"
    used_only_if: ClassVar[Conditions] = {
        "json_as_text": "not text_field",
        "heldout_fraction": "not heldout_paths",
    }
    paths: Sequence[str] | None = None
    """Files, folders or patterns. None: the standard library of the running interpreter."""
    heldout_paths: Sequence[str] | None = None
    """Files, folders or patterns of the held-out split, which the training split omits. None: files
    of `paths` that are named as held out, or else a share of the documents."""
    split: Split = "train"
    """`train`, `heldout`, `test` or `all`. `heldout` reads files that are named as validation, or
    as test if there are none; `test` only reads the latter."""
    heldout_fraction: float = 0.05
    """Share of the documents that is held out if no file is named as held out, by a hash of their
    text. If each file is a document and the files are too few, share of the end of each."""
    max_bytes: int = 1 << 28
    """Maximum bytes of the documents of a split if each file is a document, else of the
    decompressed files that it is read from. Tokens are kept in memory, two bytes each, or four with
    a vocabulary of more than 65,536."""
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
        fraction = self.heldout_fraction
        expected = "a number in (0, 1)"
        require(0 < fraction < 1, self._label, "heldout_fraction", fraction, expected)
        self._tokenizer = ByteTokenizer() if self.tokenizer is None else self.tokenizer
        self._of_bytes = isinstance(self._tokenizer, ByteTokenizer)
        if not self._of_bytes:
            self.token_unit = "token"  # type: ignore[misc]
        self._pieces_of: dict[str, list[FilePiece]] = {}

    @functools.cached_property
    def _all_files(self) -> list[TextFile]:
        return standard_library_files() if self.paths is None else find_text_files(self.paths)

    @functools.cached_property
    def _files_by_split(self) -> dict[str, list[TextFile]] | None:
        """Files of each split, or None if no file is declared or named as held out."""
        if self.heldout_paths is not None:
            heldout = find_text_files(self.heldout_paths, field="heldout_paths")
            paths = {file.path.resolve() for file in heldout}
            train = [file for file in self._all_files if file.path.resolve() not in paths]
            return {"train": train, "heldout": heldout}
        return None if self.paths is None else split_by_names(self._all_files)

    def _is_whole(self, split: str) -> bool:
        """Return whether a split holds all documents of its files."""
        return split == "all" or self._files_by_split is not None

    def _files(self, split: str) -> list[TextFile]:
        """Return the files that a split is read from."""
        if split == "all" or (self._files_by_split is None and split != "test"):
            return self._all_files
        files = (self._files_by_split or {}).get(split, [])
        names = [file.name for file in self._all_files[:_MAX_FILES_SHOWN]]
        expected = f"a file of the split {split!r} by its name, or by heldout_paths"
        require(files, self._label, "paths", names, expected)
        return files

    def _pieces(self, split: str) -> list[FilePiece]:
        """Return the documents of a split if each file, or a part of it, is a document."""
        if split not in self._pieces_of:
            files = self._files(split)
            for file in files:
                self._check_plain(file)
            if self._is_whole(split):
                self._pieces_of[split] = [FilePiece.whole(file) for file in files]
            else:
                pieces = split_pieces(files, heldout_fraction=self.heldout_fraction)
                self._pieces_of.update(zip(("train", "heldout"), pieces, strict=True))
        return self._pieces_of[split]

    @functools.cached_property
    def _documents(self) -> Documents:
        """Read and tokenize the files, one document or part of a document at a time."""
        files, fraction = self._files(self.split), self.heldout_fraction
        if self.text_field is None:
            self._num_plain = sum(piece.size for piece in self._pieces(self.split))
        else:
            self._num_plain = sum(f.path.stat().st_size for f in files if not is_packed(f))
        self._check_size(self._num_plain)
        limit = None if self._is_whole(self.split) else fraction
        builder, shares = self._read_documents(files, limit)
        if shares and (limit := heldout_limit(shares, fraction=fraction)) != fraction:
            builder, _ = self._read_documents(files, limit)
        if not builder or not (self._num_bytes or self._bad.first or self.split == "all"):
            problem = f"no text in {first_names(str(file.path) for file in files)}"
            first = f"First problem: {self._bad.first[0]}" if self._bad.first else None
            raise self._config_error(
                problem, field="number of skipped documents", value=self.num_skipped, hint=first
            )
        return builder.build()

    def _check_size(self, num_bytes: int) -> None:
        """Raise `ConfigError` if the split has more than `max_bytes` of text."""
        expected = f"at least the {num_bytes} bytes of the {self.split} files, kept in memory"
        is_enough = num_bytes <= self.max_bytes
        require(is_enough, self._label, "max_bytes", self.max_bytes, expected)

    def _read_documents(
        self, files: Sequence[TextFile], limit: float | None
    ) -> tuple[DocumentBuilder, list[float]]:
        """Read the documents of the split.

        Args:
          files: Files of the split.
          limit: Documents whose `share_of` is below it are held out. None: all are of the split.

        Returns:
          (documents, lowest and highest share of all documents, empty if there is no limit)
        """
        self._bad, self._checksum = BadRecords(self.on_bad_record), 0
        self._num_bytes, self._bytes_left = 0, self.max_bytes - self._num_plain
        self._texts_to_check: list[bytes] = []
        builder = DocumentBuilder(self._tokenizer)
        shares: list[float] = []
        for file in files:
            self._update_checksum(file.name.encode("utf-8", "replace"))
            for where, text in self._texts(file, self.text_field) if self.text_field else ():
                if limit is not None:
                    share = share_of(text)
                    shares = [min(share, *shares), max(share, *shares)] if shares else [share] * 2
                    if (share < limit) != (self.split != "train"):
                        continue
                self._add(builder, where, [text])
        for piece in self._pieces(self.split) if self.text_field is None else ():
            where = str(piece.file.path) + (f" after {piece.start}" if piece.start else "")
            self._add(builder, where, self._parts(piece))
        return builder, shares

    def _add(self, builder: DocumentBuilder, where: str, parts: Iterable[bytes]) -> None:
        checksum = self._checksum

        def tokens() -> Iterator[np.ndarray]:
            for part in parts:
                yield self._tokenizer.encode(part)
                self._update_checksum(part)
                self._num_bytes += len(part)
                if len(self._texts_to_check) < NUM_FIRST_TEXTS:
                    self._texts_to_check.append(part[:FIRST_TEXT_BYTES])

        try:
            builder.add(tokens())
        except UnicodeDecodeError as error:
            self._checksum = checksum
            byte = error.object[error.start]
            problem = f"byte {error.start} is 0x{byte:02x}, which is not UTF-8."
            self._bad.report(file=where, record=None, problem=problem)

    def _update_checksum(self, data: bytes) -> None:
        self._checksum = zlib.crc32(data, self._checksum)

    def _parts(self, piece: FilePiece) -> Iterator[bytes]:
        """Yield bytes of a file, in one part if a token may span several."""
        left = piece.size
        size = _PART_BYTES if self._of_bytes else max(left, 1)
        with piece.file.path.open("rb") as file:
            file.seek(piece.start)
            while part := file.read(min(size, left)):
                left -= len(part)
                yield part

    def _check_plain(self, file: TextFile) -> None:
        """Raise for a file that is not plain text."""
        fields = {} if self.json_as_text else json_line_fields(file.path)
        if is_packed(file) or fields:
            raise self._config_error(
                f"{file.path} is {'JSON lines' if fields else 'not plain text'}",
                field="text_field",
                value=None,
                choices=[name for name, value in fields.items() if type(value) is str],
                hint=conversations_hint(fields)
                or "Set text_field, or json_as_text=True to read JSON lines as plain text.",
            )

    def _texts(self, file: TextFile, field: str) -> Iterator[tuple[str, bytes]]:
        """Yield the place and text of each document of a file, by `text_field`."""
        size = self._bytes_left if is_packed(file) else self.max_bytes
        documents = read_raw_documents(file, field=field, max_document_bytes=size)
        try:
            for document in documents:
                if is_packed(file):
                    self._bytes_left -= len(document.data or b"") + 1
                    self._check_size(self.max_bytes - self._bytes_left)
                try:
                    yield document.where, text_of(document, field)
                except ValueError as error:
                    self._bad.report(file=document.where, record=None, problem=str(error))
        except DocumentSizeError:
            self._check_size(self.max_bytes + 1)
        except BadRecordError as error:
            if self.on_bad_record == "refuse":
                raise
            problem = str(error).removeprefix(f"{file.path}: ")
            self._bad.report(file=str(file.path), record=None, problem=problem)

    def _fingerprint(self) -> dict[str, Any]:
        tokenizer = {} if self._of_bytes else {"tokenizer": self._tokenizer.fingerprint()}
        return {"split": self.split, "documents_crc32": self._documents_crc32, **tokenizer}

    @functools.cached_property
    def _documents_crc32(self) -> int:
        # The same text in other documents is other data.
        return zlib.crc32(self._documents.ends.astype("<i8").tobytes(), self._checksum)

    def _data_text(self) -> str:
        counts = (counted(len(self._documents), "document"), counted(self._num_bytes, "byte"))
        files = self._files(self.split)
        is_declared = self.heldout_paths is not None and self.split == "heldout"
        paths = self.heldout_paths if is_declared else self.paths
        what = "Python's standard library" if paths is None else first_names(paths)
        return f"{what}: {counted(len(files), 'file')}, {', '.join(counts)}; {self._split_text()}"

    def _split_text(self) -> str:
        """Return how files or documents were assigned to the split."""
        by_split = self._files_by_split
        if self.split == "all":
            return "all documents"
        if by_split is None:
            share = f"{100 * self.heldout_fraction:g}%"
            if self.text_field is None and any(p.start for p in self._pieces("heldout")):
                return f"the last {share} of each file is held out"
            return f"{share} of the documents are held out, by a hash of their text"
        names = first_names((file.name for file in by_split[self.split]), limit=_MAX_FILES_SHOWN)
        if self.heldout_paths is not None:
            return f"split by heldout_paths: {names}"
        others = {name: files for name, files in by_split.items() if files != by_split["heldout"]}
        if "test" in others and self.split != "test":
            names += f" (not read: {first_names(file.name for file in others['test'])})"
        return f"split by the names of files: {names}"

    def _first_texts(self) -> list[bytes]:
        return self._texts_to_check if len(self._documents) else []


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
        return segment_features([()] * rows, length=config.seq_length)

    def _num_rows(self) -> int:
        return self._plan.num_rows

    @functools.cached_property
    def _plan(self) -> RowPlan:
        return RowPlan(self._documents.ends, self.seq_length)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return self._documents.rows_of(self._plan, rows, pad_id=self._tokenizer.pad_id)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "seq_length": self.seq_length}

    def baselines(self) -> dict[str, float]:
        """Return the loss of a trigram table of the training files, in nats per byte.

        It is available for held-out files of bytes. The table counts the first 64 MiB of training
        text, in the order of the files' names. Files are read one at a time.
        """
        if self.split != "heldout" or not self._of_bytes or self.text_field is not None:
            return {}
        from layerkit_inputs.text.trigram_baseline import trigram_loss  # late, for a fast start

        train = _first_bytes(self._pieces("train"), _TABLE_BYTES)
        heldout = (piece.read() for piece in self._pieces("heldout"))
        return {"trigram table": trigram_loss(train, heldout)}


class LocalTextPrompts(DocumentPrompts, _TextFilesInput):
    """An input of beginnings of documents, for a model to continue."""

    split: Split = "heldout"
    """`train`, `heldout`, `test` or `all`."""
