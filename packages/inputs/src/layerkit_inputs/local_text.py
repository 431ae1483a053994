"""LocalText: byte-level language modelling over text files of this machine.

By default the files are the running interpreter's own standard library, sources and documentation
topics, so a model of real text can be trained anywhere without a download. Vocabulary in
`byte_vocabulary`; files and splits in `text_files`.

A document (a file) of n bytes gives n + 1 predictions: its bytes, the first of them from `BOS_ID`,
and at its end `EOS_ID`. The documents are laid end to end and cut into rows, so an epoch predicts
every byte and every end exactly once. A row that begins inside a document begins with the true byte
before it, and that byte is all its context: nothing is predicted twice to warm up.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit_inputs import byte_vocabulary as vocabulary
from layerkit_inputs.indexed_input import IndexedInput
from layerkit_inputs.packing import num_stream_rows, stream_rows
from layerkit_inputs.text_files import (
    TextFile,
    find_text_files,
    split_files,
    standard_library_files,
)
from layerkit_inputs.trigram import trigram_loss

_SPLITS = ("train", "heldout")
_TABLE_BYTES = 1 << 26
"""Most bytes of training text that the table of `baselines` counts, which takes some seconds."""


class _Corpus(NamedTuple):
    """The documents of a split, as one stream of ids."""

    stream: np.ndarray
    """int16: `BOS_ID`, bytes, `EOS_ID` of each document, one after the other."""
    document_ends: np.ndarray
    """int64 `[documents]`: running sum of each document's predictions (its bytes and its end)."""
    document_begins: np.ndarray
    """int64 `[documents]`: where each document's ids begin in `stream`."""
    checksum: int
    """CRC-32 of names and contents."""


def _read_corpus(files: Sequence[TextFile]) -> _Corpus:
    checksum = 0
    pieces, sizes = [], []
    for file in files:
        data = file.path.read_bytes()
        checksum = zlib.crc32(data, zlib.crc32(file.name.encode("utf-8", "replace"), checksum))
        pieces += [
            np.array([vocabulary.BOS_ID], np.int16),
            vocabulary.encode(data),
            np.array([vocabulary.EOS_ID], np.int16),
        ]
        sizes.append(len(data) + 1)
    # A document has one id more than it has predictions.
    begins = np.cumsum([0, *(size + 1 for size in sizes[:-1])], dtype=np.int64)
    return _Corpus(np.concatenate(pieces), np.cumsum(sizes, dtype=np.int64), begins, checksum)


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

    paths: Sequence[str] | None = None
    """Files, folders or patterns. None: the running interpreter's standard library."""
    split: str = "train"
    """`train` or `heldout`; by file, see `heldout_fraction`."""
    heldout_fraction: float = 0.05
    """Share of the files (by a hash of their names) that is held out."""
    max_bytes: int = 1 << 28
    """Most bytes of a split; its text is kept in memory, two bytes for each of the file's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in _SPLITS:
            raise self._refuse(
                f"split={self.split!r}{near_names(str(self.split), _SPLITS)} Expected one of "
                f"{_SPLITS}."
            )
        if not 0 < self.heldout_fraction < 1:
            raise self._refuse(
                f"heldout_fraction={self.heldout_fraction}; expected a number between 0 and 1."
            )
        if isinstance(self.paths, str) or (self.paths is not None and not self.paths):
            raise self._refuse(f"paths={self.paths!r}; expected a list of at least one path.")
        self._read: _Corpus | None = None

    def _files(self, split: str) -> list[TextFile]:
        found = standard_library_files() if self.paths is None else find_text_files(self.paths)
        return split_files(found, heldout_fraction=self.heldout_fraction)[_SPLITS.index(split)]

    def _corpus(self) -> _Corpus:
        if self._read is None:
            files = self._files(self.split)
            total = sum(file.path.stat().st_size for file in files)
            if total > self.max_bytes:
                raise self._refuse(
                    f"the {self.split} files hold {total} bytes, more than max_bytes="
                    f"{self.max_bytes}; the text is kept in memory. Name fewer files by paths, or "
                    "raise max_bytes."
                )
            self._read = _read_corpus(files)
        return self._read

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Text of ids int `[batch, length]`; special ids vanish, broken UTF-8 is replaced."""
        return [vocabulary.decode(row[:n]) for row, n in zip(ids, lengths, strict=True)]


class LocalText(_TextFilesInput):
    """Packed rows of bytes for language modelling.

    Batches hold, each `[batch, length]`: `ids` and `labels` (int32; `labels` is the document's next
    byte, or its end), `weights` (float32, 1 where a label counts), `paddings` (float32, 1 where
    padded), `segment_ids` and `segment_pos` (int32, as in `packing`). Outside of training also
    `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    seq_length: int = 256
    """Positions of a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_length < 1:
            raise self._refuse(f"seq_length={self.seq_length}; expected at least 1.")

    def _num_rows(self) -> int:
        return num_stream_rows(self._corpus().document_ends, self.seq_length)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        corpus = self._corpus()
        where = stream_rows(rows, corpus.document_ends, self.seq_length)
        at = corpus.document_begins[where.document] + where.offset
        valid = where.segment_ids > 0
        return NestedMap(
            ids=np.where(valid, corpus.stream[at], vocabulary.PAD_ID).astype(np.int32),
            labels=np.where(valid, corpus.stream[at + 1], vocabulary.PAD_ID).astype(np.int32),
            weights=valid.astype(np.float32),
            paddings=(~valid).astype(np.float32),
            segment_ids=where.segment_ids,
            segment_pos=where.segment_pos,
        )

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "seq_length": self.seq_length,
            "text_crc32": self._corpus().checksum,
        }

    def baselines(self) -> dict[str, float]:
        """For held-out text: the loss of a trigram table of the training text, in nats per byte.

        The table counts the first 64 MiB of training text, in the order of the files' names. Files
        are read one at a time, so any amount of text will do.
        """
        if self.split != "heldout":
            return {}
        train = _first_bytes(self._files("train"), _TABLE_BYTES)
        heldout = (file.path.read_bytes() for file in self._files("heldout"))
        return {"trigram table": trigram_loss(train, heldout)}


class LocalTextPrompts(_TextFilesInput):
    """Beginnings of documents, for a model to go on from.

    Batches hold `ids` (int32 `[batch, length]`: `BOS_ID` and the document's first bytes, from the
    left, zeros after them), `paddings` (float32 `[batch, length]`, 1 where padded) and
    `prompt_lengths` (int32 `[batch]`, `BOS_ID` included); `provenance` and `eval_sample_weights` as
    in LocalText.
    """

    split: str = "heldout"
    """`train` or `heldout`."""
    prompt_length: int = 64
    """Most ids of a prompt, `BOS_ID` included."""
    num_prompts: int | None = None
    """How many; one a document, from the first on. None: one for every document."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("prompt_length", "num_prompts"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise self._refuse(f"{field}={value}; expected at least 1.")

    def _num_rows(self) -> int:
        documents = len(self._corpus().document_ends)
        return documents if self.num_prompts is None else min(self.num_prompts, documents)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        corpus = self._corpus()
        # BOS_ID and the bytes: as many as there are predictions of the bytes and the end.
        sizes = np.diff(corpus.document_ends, prepend=0)
        lengths = np.minimum(sizes[rows], self.prompt_length)
        columns = np.arange(self.prompt_length)
        valid = columns < lengths[:, None]
        at = np.where(valid, corpus.document_begins[rows][:, None] + columns, 0)
        return NestedMap(
            ids=np.where(valid, corpus.stream[at], vocabulary.PAD_ID).astype(np.int32),
            paddings=(~valid).astype(np.float32),
            prompt_lengths=lengths.astype(np.int32),
        )

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "prompt_length": self.prompt_length,
            "text_crc32": self._corpus().checksum,
        }
