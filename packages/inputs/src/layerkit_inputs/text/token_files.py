"""TokenFiles, an input of token ids in the files of Megatron-LM, OLMo, nanoGPT and llm.c.

`token_file_formats` lists the files. They are memory-mapped, so any amount of data starts at once.
The state is one count of rows, from which any number of hosts can resume.

With `packing="stream"` the rows are those of the systems that wrote the files: row r of a file has
the ids from r · `seq_length` on, and the next ids as labels. Documents are joined, as in Megatron,
nanoGPT and llm.c, or are segments of their own, as in OLMo, if `eos_id` or `bos_id` is set. The end
of a file, which these systems leave out, is a row with padding.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import counted
from layerkit_inputs.base.errors import BadRecordError, MissingFileError
from layerkit_inputs.base.find_files import find_text_files
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_inputs.packing.documents import (
    Documents,
    PackedRows,
    PiecewiseStream,
    RowPieces,
    RowPlan,
)
from layerkit_inputs.text.token_file_formats import TokenFile, open_token_file

_SAMPLE = 1 << 16  # ids at each end of a file that identify it
_SCANNED = 1 << 24  # ids that are searched for the ends of documents at once


class TokenFiles(PackedRows):
    """An input of rows of token files.

    Batches hold the arrays of `TokenRecords`. Ids outside of the vocabulary raise an error.
    """

    paths: Sequence[str]
    """Files `.bin` and `.npy`, folders or glob patterns. Files are read in the order of names."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Dtype of files without header and index. None: `uint32` if `vocab_size` is above 65,536, else
    `uint16`, which is compared with the first ids."""
    packing: Literal["stream", "first_fit"] = "stream"
    """`stream`: each file is cut anywhere; `first_fit`: whole documents, several in a row. They are
    those of the index of Megatron, or else all ids are searched for `eos_id` and `bos_id` first."""
    eos_id: int | None = None
    """Id that ends each document. Later documents do not attend to it, nor does it predict them."""
    bos_id: int | None = None
    """Id that begins each document, such as 50256 in the files of llm.c; likewise."""
    vocab_size: int | None = None
    """Vocabulary size of the model."""
    tokenizer: Tokenizer | None = None
    """Tokenizer of the ids, for `ids_to_strings` and the id of padding, else 0."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(1, "vocab_size")
        self._tokenizer = self.tokenizer

    @functools.cached_property
    def _files(self) -> list[TokenFile]:
        names = find_text_files(self.paths)
        paths = [file.path for file in names if file.path.suffix in (".bin", ".npy")]
        if not paths:
            expected = "files .bin or .npy"
            raise MissingFileError(field="paths", value=list(self.paths), expected=expected)
        is_large = self.vocab_size is not None and self.vocab_size > 1 << 16
        dtype = self.dtype or ("uint32" if is_large else "uint16")
        is_stated = self.dtype is not None
        files = (open_token_file(path, dtype, is_stated=is_stated) for path in paths)
        # The sizes of 10^8 documents are 0.8 GB.
        is_joined = self.packing == "stream"
        return [file._replace(sizes=None) if is_joined else file for file in files]

    @functools.cached_property
    def _documents(self) -> Documents:
        limit = self.vocab_size or 1 << 31
        stream = PiecewiseStream([_CheckedIds(file, limit) for file in self._files])
        if self.packing == "stream":
            sizes = np.array([len(file.ids) for file in self._files])
        else:
            sizes = np.concatenate([self._document_sizes(file) for file in self._files])
        return Documents.of(stream, sizes[sizes > 0])

    def _document_sizes(self, file: TokenFile) -> np.ndarray:
        if file.sizes is not None:
            return file.sizes
        is_marked = self.eos_id is not None or self.bos_id is not None
        expected = f"the id that ends a document of {file.path}, or bos_id, for {self.packing!r}"
        require(is_marked, self._label, "eos_id", None, expected)
        bounds = [np.array([0, len(file.ids)])]
        for begin in range(0, len(file.ids), _SCANNED):
            ids = file.ids[begin : begin + _SCANNED]
            for marker, after in ((self.bos_id, 0), (self.eos_id, 1)):
                if marker is not None:
                    bounds.append(np.flatnonzero(ids == marker) + begin + after)
        return np.diff(np.unique(np.concatenate(bounds)))

    @functools.cached_property
    def _plan(self) -> RowPlan:
        if self.packing == "stream":
            return _FileRows(self._documents.ends, self.seq_length)
        return RowPlan(self._documents.ends, self.seq_length, self.packing)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        pad_id = 0 if self.tokenizer is None else self.tokenizer.pad_id
        batch = self._documents.rows_of(self._plan, rows, pad_id=pad_id)
        return batch if self.packing == "first_fit" else self._split_documents(batch)

    def _split_documents(self, batch: NestedMap) -> NestedMap:
        """Make a segment of each document in rows of one segment."""
        is_last = np.zeros(batch.ids.shape, bool)
        if self.eos_id is not None:
            is_last |= batch.ids == self.eos_id
        if self.bos_id is not None:
            is_last |= batch.labels == self.bos_id
        is_first = np.roll(is_last, 1, axis=1)
        is_first[:, 0] = False
        places = np.arange(self.seq_length, dtype=np.int32)
        begins = np.maximum.accumulate(np.where(is_first, places, 0), axis=1)
        valid = batch.segment_ids  # 1, and 0 where padded
        batch.weights *= ~is_last
        batch.segment_pos = valid * (places - begins)
        batch.segment_ids = valid * (1 + np.cumsum(is_first, axis=1, dtype=np.int32))
        return batch

    def _identity_of_files(self) -> str:
        """SHA-256 of the sizes of documents, and of the first and last ids of each file."""
        digest = hashlib.sha256(self._documents.ends.tobytes())
        for file in self._files:
            digest.update(f"{len(file.ids)} {file.ids.dtype}".encode())
            digest.update(file.ids[:_SAMPLE].tobytes() + file.ids[-_SAMPLE:].tobytes())
        return digest.hexdigest()

    def _fingerprint(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("packing", "eos_id", "bos_id")}
        return {"tokens_sha256": self._identity_of_files(), **super()._fingerprint(), **fields}

    def _data_text(self) -> str:
        num_ids = sum(len(file.ids) for file in self._files)
        return f"{counted(len(self._files), 'file')}, {counted(num_ids, 'token')}"


class _FileRows(RowPlan):
    """Rows of files that are cut one by one, of which only the last row has padding."""

    def __init__(self, file_ends: np.ndarray, length: int):
        super().__init__(file_ends, length)
        self._sizes = np.diff(file_ends, prepend=0)
        self._row_ends = np.cumsum(-(-self._sizes // length))
        self.num_rows = int(self._row_ends.max(initial=0))

    def pieces(self, rows: np.ndarray) -> RowPieces:
        files = self._row_ends.searchsorted(rows, side="right")
        starts = (rows - np.append(0, self._row_ends)[files]) * self.length
        lengths = np.minimum(self.length, self._sizes[files] - starts)
        return RowPieces(np.arange(len(rows)), files, starts, lengths)


class _CheckedIds:
    """Ids of a file, of which those that are read are compared with the vocabulary."""

    def __init__(self, file: TokenFile, limit: int):
        self._file, self._limit = file, limit

    def __len__(self) -> int:
        return len(self._file.ids)

    def __getitem__(self, at: slice) -> np.ndarray:
        ids = self._file.ids[at]
        is_wrong = (ids < 0) | (ids >= self._limit)
        if is_wrong.any():
            place = int(is_wrong.argmax())
            problem = f"id {at.start + place} is outside of the vocabulary"
            expected = f"at least 0, below vocab_size={self._limit}; else set dtype"
            path, value = str(self._file.path), int(ids[place])
            raise BadRecordError(problem, owner=path, field="id", value=value, expected=expected)
        return ids
