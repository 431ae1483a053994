"""Concatenated documents of token ids, and the rows and prompts that are cut from them by number.

A document consists of its start id, its tokens and its end id, if the tokenizer has such ids. So n
ids give n - 1 predictions, each of an id from the one before it. The ids may be in memory or in a
memory-mapped file.

`RowPlan` gives the documents of any row. Rows of concatenated documents need no index, and only the
last has padding.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.base.tokenizer_interface import Tokenizer, first_ids, last_ids
from layerkit_inputs.packing.model_features import (
    prompt_features,
    segment_features,
    stretch_features,
)

Packing = Literal["stream", "first_fit", "none"]
"""`stream`: documents are concatenated and cut anywhere; `first_fit`: several whole documents in a
row, of which longer ones are cut first; `none`: one document in a row, maybe cut."""


class RowPieces(NamedTuple):
    """Pieces of documents in some rows, in order. Every array is int64 `[pieces]`."""

    row: np.ndarray
    """Index of the row, from 0."""
    document: np.ndarray
    """Number of the document."""
    start: np.ndarray
    """Position of the piece inside the document."""
    length: np.ndarray
    """Number of positions, at least 1."""


def stream_pieces(rows: np.ndarray, document_ends: np.ndarray, length: int) -> RowPieces:
    """Return the pieces of documents in rows that are cut from concatenated documents.

    Only the needed part of `document_ends` is read, since it may be larger than the memory.

    Args:
      rows: Row numbers, int `[rows]`.
      document_ends: Cumulative sum of the documents' lengths, int64 `[documents]`.
      length: Positions of a row. A document may span several rows.
    """
    begins = np.asarray(rows, np.int64) * length
    ends = np.minimum(begins + length, document_ends[-1])
    first = document_ends.searchsorted(begins, side="right")
    counts = document_ends.searchsorted(ends, side="left") - first + 1
    document = ranges(first, counts)
    row = np.arange(len(counts)).repeat(counts)
    document_begins = document_ends[document - 1]
    document_begins[document == 0] = 0
    starts = np.maximum(begins[row], document_begins)
    lengths = np.minimum(document_ends[document], ends[row]) - starts
    pieces = RowPieces(row, document, starts - document_begins, lengths)
    # A document without positions, such as an empty file, has no piece.
    is_real = lengths > 0
    return pieces if is_real.all() else RowPieces(*(array[is_real] for array in pieces))


class RowPlan:
    """The documents of each row.

    Attributes:
      length: Positions of a row.
      num_rows: Number of rows.
    """

    def __init__(
        self,
        document_ends: np.ndarray,
        length: int,
        packing: Packing = "stream",
        *,
        images: tuple[np.ndarray, int] | None = None,
    ):
        """Plan the rows, which is work only with `first_fit`.

        Args:
          document_ends: Cumulative sum of the documents' lengths, int64 `[documents]`.
          length: Positions of a row.
          packing: How documents share rows.
          images: Number of images of each document, int64 `[documents]`, and the maximum number of
            a row, with `first_fit` of documents that fit a row. None: there are none.
        """
        self.length = length
        self._ends = document_ends
        self._packing = packing
        if packing == "first_fit":
            from layerkit_inputs.packing.first_fit import cut_documents, plan_packing  # late

            self._pieces = cut_documents(np.diff(document_ends, prepend=0), length)
            sizes, limits = [self._pieces.length], [length]
            if images is not None:
                sizes, limits = [*sizes, images[0][self._pieces.document]], [*limits, images[1]]
            self._plan = plan_packing(np.stack(sizes, axis=1), limits)
            self.num_rows = self._plan.num_rows
        elif packing == "none":
            self.num_rows = len(document_ends)
        else:
            total = int(document_ends[-1]) if len(document_ends) else 0
            self.num_rows = -(-total // length)

    def pieces(self, rows: np.ndarray) -> RowPieces:
        """Return the pieces of documents in rows by number, int64 `[rows]`."""
        if self._packing == "stream":
            return stream_pieces(rows, self._ends, self.length)
        if self._packing == "first_fit":
            chosen, places = self._plan.documents_of_rows(rows)
            return RowPieces(places, *(array[chosen] for array in self._pieces))
        sizes = np.minimum(sizes_of(self._ends, rows), self.length)
        return RowPieces(np.arange(len(rows)), rows, np.zeros_like(rows), sizes)


def sizes_of(document_ends: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Return the lengths of some documents by number, int64 `[documents]`."""
    begins = document_ends[documents - 1]
    begins[documents == 0] = 0
    return document_ends[documents] - begins


def ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenate ranges of `sizes` integers that start at `begins`, int64.

    >>> ranges(np.array([7, 2]), np.array([3, 2])).tolist()
    [7, 8, 9, 2, 3]
    """
    numbers = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
    numbers += np.arange(len(numbers))
    return numbers


class PiecewiseStream:
    """A stream of several arrays, which are not copied."""

    def __init__(self, pieces: Sequence[Any]):
        """Store the arrays, int `[tokens]` each, or what has their length and slices."""
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = np.cumsum([len(piece) for piece in self._pieces], dtype=np.int64)
        self._stops = self._ends.tolist()

    def __getitem__(self, at: slice) -> np.ndarray:
        """Return the ids in a slice, as int32."""
        start, stop = at.start, at.stop
        first = bisect.bisect_right(self._stops, start)
        parts = []
        for number in range(first, bisect.bisect_left(self._stops, stop) + 1):
            begin = self._stops[number - 1] if number else 0
            parts.append(self._pieces[number][max(start - begin, 0) : stop - begin])
        return np.concatenate(parts, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents in a stream of ids."""

    ids: np.ndarray | PiecewiseStream
    """Ids of all documents, concatenated."""
    begins: np.ndarray
    """Position of each document in `ids`, int64 `[documents]`."""
    ends: np.ndarray
    """Cumulative sum of the documents' predictions, int64 `[documents]`."""
    num_inputs: np.ndarray | None = None
    """Number of predictions of inputs of each document, without loss, int64 `[documents]`."""
    has_loss: np.ndarray | None = None
    """Whether the prediction of each id of `ids` has a loss, bool `[tokens]`. None: all have."""

    @classmethod
    def of(
        cls,
        ids: np.ndarray | PiecewiseStream,
        sizes: np.ndarray,
        *,
        num_inputs: np.ndarray | None = None,
        has_loss: np.ndarray | None = None,
    ) -> Documents:
        """Return the documents of a stream, of `sizes` ids each, int64 `[documents]`."""
        sizes = np.asarray(sizes, np.int64)
        stops = np.cumsum(sizes)
        return cls(ids, stops - sizes, np.cumsum(sizes - 1), num_inputs, has_loss)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.ends)

    @property
    def num_predictions(self) -> np.ndarray:
        """Number of predictions of each document, int64 `[documents]`."""
        return np.diff(self.ends, prepend=0)

    def rows_of(self, plan: RowPlan, rows: np.ndarray, *, pad_id: int) -> NestedMap:
        """Return rows of documents, packed as in `features.lm_features`.

        Args:
          plan: Documents of each row.
          rows: Row numbers, int64 `[rows]`.
          pad_id: Id of padded positions.
        """
        pieces = plan.pieces(rows)
        begins = self.begins[pieces.document] + pieces.start
        tokens = self.read(begins, pieces.length + 1)
        ids, labels = ids_and_labels(tokens, pieces.length)
        num_inputs = None
        if self.num_inputs is not None:
            num_inputs = self.num_inputs[pieces.document] - pieces.start
        batch = stretch_features(
            ids,
            labels,
            rows=pieces.row,
            sizes=pieces.length,
            num_rows=len(rows),
            length=plan.length,
            pad_id=pad_id,
            num_inputs=num_inputs,
            weights_on_targets_only=True,
        )
        if self.has_loss is not None:
            has_loss = self.has_loss[ranges(begins + 1, pieces.length)]
            batch.weights[batch.paddings == 0] *= has_loss
        return batch

    def read(self, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return concatenated stretches of ids. Adjacent stretches are read together.

        Args:
          begins: Position of each stretch in `ids`, int64 `[stretches]`.
          sizes: Number of ids of each stretch, int64 `[stretches]`.
        """
        if not sizes.all():
            begins, sizes = begins[sizes > 0], sizes[sizes > 0]
        if not len(sizes):
            return np.zeros(0, np.int32)
        ends = begins + sizes
        gaps = np.flatnonzero(begins[1:] != ends[:-1])
        starts = [int(begins[0]), *begins[gaps + 1].tolist()]
        stops = [*ends[gaps].tolist(), int(ends[-1])]
        bounds = zip(starts, stops, strict=True)
        return np.concatenate([self.ids[start:stop] for start, stop in bounds])

    def prompts(self, rows: np.ndarray, *, length: int, tokenizer: Tokenizer) -> NestedMap:
        """Return the beginnings of documents, or their inputs, without the end id.

        A prompt has at least one id, so that of an empty document is the start id.

        Args:
          rows: Numbers of documents, int64 `[rows]`.
          length: Positions of a row. Longer prompts are cut on the right.
          tokenizer: Tokenizer of the ids.

        Returns:
          `ids` int32 and `paddings` float32 `[rows, length]`, `prompt_lengths` int32 `[rows]`.
        """
        if self.num_inputs is None:
            sizes = sizes_of(self.ends, rows) + (tokenizer.eos_id is None)
        else:
            sizes = self.num_inputs[rows] + 1
        begins = self.begins[rows]
        bounds = zip(begins.tolist(), (begins + np.clip(sizes, 1, length)).tolist(), strict=True)
        prompts = [self.ids[start:stop] for start, stop in bounds]
        if tokenizer.start_id is not None:  # else the end id continues an empty document
            for place in np.flatnonzero(sizes < 1).tolist():
                prompts[place] = np.array([tokenizer.start_id])
        return prompt_features(prompts, length=length, pad_id=tokenizer.pad_id)


def ids_and_labels(tokens: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split stretches of ids into model inputs and labels.

    Args:
      tokens: Concatenated stretches, int `[tokens + stretches]`.
      sizes: Predictions of each stretch, one less than its ids, int `[stretches]`.

    Returns:
      (ids, labels), both `[tokens]` with the dtype of `tokens`.
    """
    is_followed = np.ones(len(tokens), bool)
    is_followed[np.cumsum(sizes + 1) - 1] = False
    return tokens[is_followed], tokens[1:][is_followed[:-1]]


class DocumentBuilder:
    """A buffer to which documents are appended, and which grows in place.

    The start id and the end id are added to each document; see `special_tokens`. An id takes two
    bytes, or four with a vocabulary of more than 65,536.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Start an empty buffer for the ids of a tokenizer."""
        self._dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
        self._tokenizer = tokenizer
        # A bytearray grows by realloc, which moves pages instead of copying.
        self._data = bytearray()
        self._sizes = array.array("q")

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._sizes)

    def add(self, parts: Iterable[np.ndarray]) -> None:
        """Append a document. If iterating over `parts` raises, nothing is appended.

        Args:
          parts: Consecutive tokens of the document, int `[tokens]` each.
        """
        begin = len(self._data)
        try:
            last = None
            for part in parts:
                if len(part):
                    self._append(first_ids(part, self._tokenizer) if last is None else [])
                    self._append(part)
                    last = part
            if last is None:
                self._append(first_ids([], self._tokenizer))
            self._append(last_ids([] if last is None else last, self._tokenizer))
        except BaseException:
            del self._data[begin:]
            raise
        if size := (len(self._data) - begin) // self._dtype.itemsize:
            self._sizes.append(size)

    def _append(self, ids: Sequence[int] | np.ndarray) -> None:
        self._data += np.asarray(ids).astype(self._dtype, copy=False).data

    def build(self) -> Documents:
        """Return the documents. No more can be added afterwards."""
        ids = np.frombuffer(self._data, self._dtype)
        return Documents.of(ids, np.frombuffer(self._sizes, np.int64))


def framed(tokens: Sequence[np.ndarray], tokenizer: Tokenizer) -> np.ndarray:
    """Return a document with start id, concatenated `tokens` and end id, int32."""
    ids = np.concatenate([np.asarray(part, np.int32) for part in tokens])
    parts = first_ids(ids, tokenizer), ids, last_ids(ids, tokenizer)
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


class PackedRows(IndexedInput):
    """Base class of inputs of rows of `seq_length` positions, which hold pieces of documents."""

    seq_length: int = 1024
    """Positions of a row."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(1, "seq_length")

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of empty rows, whose arrays do not depend on the documents."""
        return segment_features([()] * rows, length=config.seq_length)

    @functools.cached_property
    def _plan(self) -> RowPlan:
        raise NotImplementedError

    def _num_rows(self) -> int:
        return self._plan.num_rows

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "seq_length": self.seq_length}


class DocumentInput(IndexedInput):
    """Base class of inputs of documents that a tokenizer encodes."""

    @functools.cached_property
    def _documents(self) -> Documents:
        raise NotImplementedError


class DocumentPrompts(DocumentInput):
    """Base class of inputs of prompts: beginnings of documents, or their inputs if they have any.

    Batches hold `ids` (int32 `[batch, length]`: the start id and the first tokens of the document,
    padded on the right), `paddings` (float32 `[batch, length]`, 1 where padded) and
    `prompt_lengths` (int32 `[batch]`, including the start id). Evaluation batches also have
    `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    prompt_length: int = 64
    """Maximum number of ids of a prompt, including the start id. Longer ones are cut on the
    right."""
    num_prompts: int | None = None
    """Number of prompts, one for each of the first documents. None: all documents."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(1, "prompt_length", "num_prompts")

    def _num_rows(self) -> int:
        documents = len(self._documents)
        return documents if self.num_prompts is None else min(self.num_prompts, documents)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        tokenizer = self.text_tokenizer()
        return self._documents.prompts(rows, length=self.prompt_length, tokenizer=tokenizer)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "prompt_length": self.prompt_length}
