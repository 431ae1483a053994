"""LocalText and LocalTextPrompts, inputs of local text files, by bytes or any tokenizer.

The default files are the standard library of the running interpreter, sources and documentation
topics, so a model can be trained on real text without a download.

A document is a file, or with `text_field` a line of JSON. A document of n tokens gives n + 1
predictions: its tokens, the first of them from the start id, and its end id. The documents are
concatenated and cut into rows, so an epoch predicts every token and every end exactly once. A row
that begins inside a document has only the token before it as context.

Files whose names say so are held out, else documents by their text, so that the training split and
the held-out split share no document; see `split_documents`.

The files are tokenized on first use, and their ids are kept in memory: with bytes as tokens two
bytes an id. For larger data, build token records once by
`layerkit_inputs.tools.build_token_records` and read them with TokenRecords.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from layerkit.config.hparams import Conditions
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.find_files import TextFile, standard_library_files
from layerkit_inputs.packing.documents import (
    DocumentBuilder,
    DocumentPrompts,
    Documents,
    PackedRows,
    RowPlan,
)
from layerkit_inputs.text.split_documents import Split, SplitDocuments
from layerkit_inputs.text.text_files import (
    DocumentSizeError,
    FilePiece,
    conversations_hint,
    is_packed,
    json_line_fields,
    read_raw_documents,
    split_pieces,
    text_of,
)

_TABLE_BYTES = 1 << 26
"""Maximum bytes of training text that the table of `baselines` counts, which takes seconds."""
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


class _TextFilesInput(SplitDocuments):
    """Base class of inputs of local text files."""

    used_only_if: ClassVar[Conditions] = {"json_as_text": "not text_field"}
    text_field: str | None = None
    """Field of the text in JSON lines (or Parquet), in which each line is a document. None: each
    file is a document."""
    json_as_text: bool = False
    """Whether JSON lines are read as plain text if `text_field` is None. False: they raise."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._pieces_of: dict[str, list[FilePiece]] = {}

    def _find_files(self, paths: Sequence[str] | None, field: str) -> list[TextFile]:
        return standard_library_files() if paths is None else super()._find_files(paths, field)

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

    def _begin(self) -> None:
        if self.text_field is None:
            num_plain = sum(piece.size for piece in self._pieces(self.split))
        else:
            files = self._files(self.split)
            num_plain = sum(f.path.stat().st_size for f in files if not is_packed(f))
        self._check_size(num_plain)
        self._bytes_left = self.max_bytes - num_plain
        self._builder = DocumentBuilder(self._tokenizer)

    def _build(self) -> Documents:
        return self._builder.build()

    def _read_documents(self, files: Sequence[TextFile], limit: float | None) -> list[float]:
        shares = super()._read_documents(files, limit)
        for piece in self._pieces(self.split) if self.text_field is None else ():
            where = str(piece.file.path) + (f" after {piece.start}" if piece.start else "")
            self._add(where, self._parts(piece))
        return shares

    def _add(self, where: str, parts: Iterable[bytes]) -> None:
        checksum = self._checksum

        def tokens() -> Iterator[np.ndarray]:
            for part in parts:
                yield self._tokenizer.encode(part)
                self._count(part)

        try:
            self._builder.add(tokens())
        except UnicodeDecodeError as error:
            self._checksum = checksum
            byte = error.object[error.start]
            problem = f"byte {error.start} is 0x{byte:02x}, which is not UTF-8."
            self._bad.report(file=where, record=None, problem=problem)

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

    def _texts(self, file: TextFile) -> Iterator[tuple[str, bytes]]:
        """Yield the place and text of each document of a file, by `text_field`."""
        if (field := self.text_field) is None:
            return
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

    def _split_text(self) -> str:
        is_cut = self.split != "all" and self._files_by_split is None and self.text_field is None
        if is_cut and any(piece.start for piece in self._pieces("heldout")):
            return f"the last {100 * self.heldout_fraction:g}% of each file is held out"
        return super()._split_text()


class LocalText(PackedRows, _TextFilesInput):
    """An input of packed rows of text for language modeling.

    Batches hold arrays `[batch, length]`: `ids` and `labels` (int32; a label is the document's next
    token or its end id), `weights` (float32, 1 where a label counts), `paddings` (float32, 1 where
    padded), `segment_ids` and `segment_pos` (int32; see `packing`). Evaluation batches
    also have `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    seq_length: int = 256
    """Positions of a row."""

    @functools.cached_property
    def _plan(self) -> RowPlan:
        return RowPlan(self._documents.ends, self.seq_length)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return self._documents.rows_of(self._plan, rows, pad_id=self._tokenizer.pad_id)

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
