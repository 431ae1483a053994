"""LocalText: language modelling over text files of this machine, by bytes or any tokenizer.

By default the files are the running interpreter's own standard library, sources and documentation
topics, so a model of real text can be trained anywhere without a download. Bytes and special ids in
`byte_vocabulary`, other vocabularies in `tokenizers`; files and splits in `text_files`.

A document (a file, or with `text_field` a line of JSON) of n tokens gives n + 1 predictions: its
tokens, the first of them from the id of a beginning, and the id of its end. The documents are laid
end to end and cut into rows, so an epoch predicts every token and every end exactly once. A row
that begins inside a document begins with the true token before it, and that token is all its
context: nothing is predicted twice to warm up.

The files are tokenised when first needed and kept in memory. For more text than that allows, build
token records once (`layerkit_inputs.tools.build_token_records`) and read them by TokenRecords.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, get_args

import numpy as np

from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit_inputs.bad_records import BadRecordError, BadRecords, OnBadRecord
from layerkit_inputs.documents import Documents, framed
from layerkit_inputs.features import stretch_features
from layerkit_inputs.indexed_input import IndexedInput
from layerkit_inputs.text_files import (
    TextFile,
    find_text_files,
    held_out,
    split_files,
    split_text,
    standard_library_files,
)
from layerkit_inputs.tokenizers import ByteTokenizer, Tokenizer
from layerkit_inputs.tools.raw_documents import PACKED_SUFFIXES, read_raw_documents, text_of
from layerkit_inputs.trigram import trigram_loss

_SPLITS = ("train", "heldout", "all")
_TABLE_BYTES = 1 << 26
"""Most bytes of training text that the table of `baselines` counts, which takes some seconds."""


def _first_bytes(files: Sequence[TextFile], limit: int) -> Iterator[bytes]:
    """Contents of the files, one at a time, up to `limit` bytes in all."""
    for file in files:
        if limit <= 0:
            return
        with file.path.open("rb") as opened:
            data = opened.read(limit)
        limit -= len(data)
        yield data


class _TextFilesInput(IndexedInput):
    """Fields and files that readers of local text share; the files are read when first needed."""

    token_unit: ClassVar[str] = "byte"
    rows_in_memory: ClassVar[bool] = True

    paths: Sequence[str] | None = None
    """Files, folders or patterns. None: the running interpreter's standard library."""
    split: str = "train"
    """`train` or `heldout`, see `heldout_fraction`. `all` takes everything."""
    heldout_fraction: float = 0.05
    """Share of the files (by a hash of their names) that is held out. Of a single file, with
    `text_field` the share of its documents (by a hash of what they say), without it of its end."""
    max_bytes: int = 1 << 28
    """Most bytes of a split; it is kept in memory, two bytes a token, four in a vocabulary of more
    than 65,536."""
    tokenizer: Tokenizer | None = None
    """What turns text into ids. None: bytes."""
    text_field: str | None = None
    """Files are JSON lines (or Parquet), each a document, with the text in this field. None: each
    file is a document."""
    on_bad_record: OnBadRecord = "refuse"
    """`refuse` documents that cannot be read, such as broken UTF-8 where the tokenizer needs text,
    or `skip` and count them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, known in (("split", _SPLITS), ("on_bad_record", get_args(OnBadRecord))):
            value = getattr(self, field)
            if value not in known:
                raise self._refuse(
                    f"{field}={value!r}{near_names(str(value), known)} Expected one of {known}."
                )
        if not 0 < self.heldout_fraction < 1:
            raise self._refuse(
                f"heldout_fraction={self.heldout_fraction}; expected a number between 0 and 1."
            )
        if isinstance(self.paths, str) or (self.paths is not None and not self.paths):
            raise self._refuse(f"paths={self.paths!r}; expected a list of at least one path.")
        self._tokenizer = ByteTokenizer() if self.tokenizer is None else self.tokenizer
        self._of_bytes = isinstance(self._tokenizer, ByteTokenizer)
        if not self._of_bytes:
            self.token_unit = "token"  # type: ignore[misc]  # this reader's own
        self._bad = BadRecords(self.on_bad_record)
        self._all_files: list[TextFile] | None = None
        self._documents: Documents | None = None
        self._checksum = 0

    @property
    def num_skipped(self) -> int:
        """Documents and files that were left out."""
        return self._bad.num_skipped

    def _found(self) -> list[TextFile]:
        """All files, of every split; looked for once."""
        if self._all_files is None:
            found = standard_library_files() if self.paths is None else find_text_files(self.paths)
            self._all_files = found
        return self._all_files

    def _files(self, split: str) -> list[TextFile]:
        """Those that a split reads; one that is alone has something of each."""
        found = self._found()
        if split == "all" or len(found) == 1:
            return found
        return split_files(found, heldout_fraction=self.heldout_fraction)[_SPLITS.index(split)]

    def _corpus(self) -> Documents:
        if self._documents is None:
            files = self._files(self.split)
            total = sum(file.path.stat().st_size for file in files)
            if total > self.max_bytes:
                raise self._refuse(
                    f"the {self.split} files hold {total} bytes, more than max_bytes="
                    f"{self.max_bytes}; the text is kept in memory. Name fewer files by paths, or "
                    "raise max_bytes."
                )
            self._documents = self._read_corpus(files)
        return self._documents

    def _read_corpus(self, files: Sequence[TextFile]) -> Documents:
        """Reads and tokenises, a document at a time, the documents of a single file together."""
        self._bad, self._checksum = BadRecords(self.on_bad_record), 0
        dtype = np.uint16 if self._tokenizer.vocab_size <= 1 << 16 else np.int32
        pieces = []
        is_alone = len(self._found()) == 1
        for file in files:
            self._update_checksum(file.name.encode("utf-8", "replace"))
            texts = self._part_of(file, self.split) if is_alone else self._texts(file)
            for where, data in texts:
                try:
                    tokens = self._tokenizer.encode(data)
                except UnicodeDecodeError as error:
                    byte = error.object[error.start]
                    problem = f"byte {error.start} is 0x{byte:02x}, which is not UTF-8."
                    self._bad.report(file=where, record=None, problem=problem)
                    continue
                self._update_checksum(data)
                pieces.append(framed([tokens], self._tokenizer).astype(dtype))
        if not pieces:
            raise self._refuse(
                f"no document of the {self.split} files can be read; {self.num_skipped} were left "
                f"out{': ' + self._bad.first[0] if self._bad.first else '.'}"
            )
        sizes = np.array([len(piece) for piece in pieces])
        return Documents.of(np.concatenate(pieces), sizes)

    def _update_checksum(self, data: bytes) -> None:
        self._checksum = zlib.crc32(data, self._checksum)

    def _part_of(self, file: TextFile, split: str) -> Iterator[tuple[str, bytes]]:
        """What a split has of the only file."""
        if split == "all":
            yield from self._texts(file)
        elif self.text_field is None:
            before, after = self._split_text(file)
            where = str(file.path)
            yield (where, before) if split == "train" else (f"{where} after {len(before)}", after)
        elif texts := list(self._texts(file)):
            distinct = list(dict.fromkeys(text for _, text in texts))
            if len(distinct) < 2:
                raise self._refuse(
                    f"{file.path} is the only file, and all its documents ({len(texts)}) say the"
                    " same: none can be held out."
                )
            chosen = held_out(distinct, fraction=self.heldout_fraction)
            wanted = {
                text for i, text in enumerate(distinct) if (i in chosen) == (split != "train")
            }
            yield from (text for text in texts if text[1] in wanted)

    def _split_text(self, file: TextFile) -> tuple[bytes, bytes]:
        """What is trained on and what is held out of the only file, which is one document."""
        if file.path.suffix.lower() in {*PACKED_SUFFIXES, ".gz", ".parquet"}:
            raise self._refuse(
                f"{file.path} is the only file, and no text that can be split; unpack it, or name"
                " the field of its documents by text_field."
            )
        try:
            return split_text(file.path.read_bytes(), heldout_fraction=self.heldout_fraction)
        except ValueError as error:
            raise self._refuse(f"{file.path} is the only file, and {error}") from None

    def _texts(self, file: TextFile) -> Iterator[tuple[str, bytes]]:
        """The documents of a file, and where they stand."""
        if self.text_field is None:
            yield str(file.path), file.path.read_bytes()
            return
        try:
            for document in read_raw_documents(file, field=self.text_field):
                try:
                    yield document.where, text_of(document, self.text_field)
                except ValueError as error:
                    self._bad.report(file=document.where, record=None, problem=str(error))
        except BadRecordError as error:
            if self.on_bad_record == "refuse":
                raise
            problem = str(error).removeprefix(f"{file.path}: ")
            self._bad.report(file=str(file.path), record=None, problem=problem)

    def _fingerprint(self) -> dict[str, Any]:
        tokenizer = {} if self._of_bytes else {"tokenizer": self._tokenizer.fingerprint()}
        self._corpus()
        return {"split": self.split, "text_crc32": self._checksum, **tokenizer}

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Text of ids int `[batch, length]`; special ids vanish, broken UTF-8 is replaced."""
        return [self._tokenizer.decode(row[:n]) for row, n in zip(ids, lengths, strict=True)]


class LocalText(_TextFilesInput):
    """Packed rows of text for language modelling.

    Batches hold, each `[batch, length]`: `ids` and `labels` (int32; `labels` is the document's next
    token, or its end), `weights` (float32, 1 where a label counts), `paddings` (float32, 1 where
    padded), `segment_ids` and `segment_pos` (int32, as in `packing`). Outside of training also
    `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    seq_length: int = 256
    """Positions of a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_at_least(1, "seq_length")

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Whatever the text is, rows have the same arrays."""
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
        """For held-out files of bytes: the loss of a trigram table of the training files.

        In nats per byte. The table counts the first 64 MiB of training text, in the order of the
        files' names. Files are read one at a time, so any number of them will do.
        """
        if self.split != "heldout" or not self._of_bytes or self.text_field is not None:
            return {}
        found = self._found()
        if len(found) == 1:
            before, after = self._split_text(found[0])
            return {"trigram table": trigram_loss([before[:_TABLE_BYTES]], [after])}
        train = _first_bytes(self._files("train"), _TABLE_BYTES)
        heldout = (file.path.read_bytes() for file in self._files("heldout"))
        return {"trigram table": trigram_loss(train, heldout)}


class LocalTextPrompts(_TextFilesInput):
    """Beginnings of documents, for a model to go on from.

    Batches hold `ids` (int32 `[batch, length]`: the id of a beginning and the document's first
    tokens, from the left, padding after them), `paddings` (float32 `[batch, length]`, 1 where
    padded) and `prompt_lengths` (int32 `[batch]`, the id of a beginning included); `provenance` and
    `eval_sample_weights` as in LocalText.
    """

    split: str = "heldout"
    """`train`, `heldout` or `all`."""
    prompt_length: int = 64
    """Most ids of a prompt, that of a beginning included."""
    num_prompts: int | None = None
    """How many; one a document, from the first on. None: one for every document."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_at_least(1, "prompt_length", "num_prompts")

    def _num_rows(self) -> int:
        documents = len(self._corpus())
        return documents if self.num_prompts is None else min(self.num_prompts, documents)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return self._corpus().prompts(rows, length=self.prompt_length, tokenizer=self._tokenizer)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "prompt_length": self.prompt_length}
