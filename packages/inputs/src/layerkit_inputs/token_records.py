"""TokenRecords: language modelling over tokenised documents of any amount.

The files are those of `token_store`, made by `python -m layerkit_inputs.tools.build_token_records`.
Any row is found by its number, so the state of a run is one count, which any number of hosts goes
on from; each host reads the blocks that its own rows need, and the index is memory-mapped.

What a row holds is settled by `packing`:

- `stream`: the documents are laid end to end and cut every `seq_length` predictions. Nothing is
  lost, and only the last row has padding; a document may go on in the next row.
- `first_fit`: documents are kept whole, several to a row, those longer than a row being cut first.
  Every host plans all rows when it first reads, which takes two seconds and some 200 MB for each
  million documents; beyond some ten millions prefer `stream`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit_inputs.bad_records import BadRecords, OnBadRecord
from layerkit_inputs.documents import ids_and_labels
from layerkit_inputs.features import stretch_features
from layerkit_inputs.first_fit import DocumentPieces, PackingPlan, cut_documents, plan_packing
from layerkit_inputs.grain_adaptor.row_batches import blank_rows
from layerkit_inputs.indexed_input import IndexedInput
from layerkit_inputs.packing import RowPieces, num_stream_rows, stream_pieces
from layerkit_inputs.token_store import TokenStore
from layerkit_inputs.tokenizers import ByteTokenizer, Tokenizer

Packing = Literal["stream", "first_fit"]
_PACKINGS = ("stream", "first_fit")


class TokenRecords(IndexedInput):
    """Packed rows of tokenised documents.

    Batches hold, each `[batch, length]`: `ids` and `labels` (int32; `labels` is the document's next
    id), `weights` (float32, 1 where a label counts), `paddings` (float32, 1 where padded),
    `segment_ids` (int32, from 1 in each row, 0 where padded) and `segment_pos` (int32). Outside of
    training also `provenance` and `eval_sample_weights`, each `[batch]`.

    A row of which a block is damaged is refused or, with `on_bad_record="skip"`, all padding: it
    weighs nothing, and its `provenance` is -1.
    """

    path: str | None = None
    """The folder. Required."""
    split: str = "train"
    """Which of the folder's splits."""
    seq_length: int = 1024
    """Positions of a row."""
    packing: Packing = "stream"
    """`stream` (cut anywhere, no padding) or `first_fit` (whole documents)."""
    tokenizer: Tokenizer | None = None
    """What the documents were made with, for `ids_to_strings`; another one is refused."""
    vocab_size: int | None = None
    """How many ids the model knows; documents made with more are refused. None: whatever is there.
    """
    on_bad_record: OnBadRecord = "refuse"
    """`refuse` damaged blocks, or `skip` the rows that need them, and count the blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None:
            raise self._config_error("path is not set; give the folder of token records.")
        for field, known in (("packing", _PACKINGS), ("on_bad_record", ("refuse", "skip"))):
            value = getattr(self, field)
            if value not in known:
                near = near_names(str(value), known)
                raise self._config_error(f"{field}={value!r}{near} Expected one of {known}.")
        self._check_at_least(1, "seq_length", "vocab_size")
        self._bad = BadRecords(self.on_bad_record)
        self._unreadable = np.zeros(0, bool)

    @functools.cached_property
    def _store(self) -> TokenStore:
        assert self.path is not None
        store = TokenStore(self.path, self.split)
        made_with = store.about.tokenizer["fingerprint"]
        if self.tokenizer is not None and self.tokenizer.fingerprint() != made_with:
            raise self._config_error(
                f"tokenizer has the fingerprint {self.tokenizer.fingerprint()!r}, but {self.path} "
                f"was made with {made_with!r}. Set the tokenizer it was made with, or build it "
                "again with this one."
            )
        if self.vocab_size is not None and store.about.tokenizer["vocab_size"] > self.vocab_size:
            raise self._config_error(
                f"vocab_size={self.vocab_size}, but {self.path} was made with a tokenizer of "
                f"{store.about.tokenizer['vocab_size']} ids: the loss of the others would be NaN."
            )
        return store

    @functools.cached_property
    def _plan(self) -> tuple[DocumentPieces, PackingPlan]:
        """For `first_fit`: pieces of all documents, and which of them make up which row."""
        pieces = cut_documents(np.diff(self._store.document_ends, prepend=0), self.seq_length)
        return pieces, plan_packing(pieces.length, self.seq_length)

    @property
    def num_skipped(self) -> int:
        """Damaged blocks that were met so far; one that is read again counts again."""
        return self._bad.num_skipped

    @property
    def tokenizer_fingerprint(self) -> str:
        """That of the tokenizer the documents were made with."""
        fingerprint: str = self._store.about.tokenizer["fingerprint"]
        return fingerprint

    @property
    def token_unit(self) -> str:  # type: ignore[override]
        """`byte` where the documents were made with the ByteTokenizer."""
        is_bytes = self.tokenizer_fingerprint == ByteTokenizer().fingerprint()
        return "byte" if is_bytes else "token"

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Whatever the documents are, rows have the same arrays."""
        nothing = np.zeros(0, np.int64)
        return stretch_features(
            nothing, nothing, rows=nothing, sizes=nothing, num_rows=rows, length=config.seq_length
        )

    def _num_rows(self) -> int:
        if self.packing == "stream":
            return num_stream_rows(self._store.document_ends, self.seq_length)
        return self._plan[1].num_rows

    def _pieces_of(self, rows: np.ndarray) -> RowPieces:
        """The pieces of documents that make these rows."""
        if self.packing == "stream":
            return stream_pieces(rows, self._store.document_ends, self.seq_length)
        pieces, plan = self._plan
        chosen, places = plan.documents_of_rows(rows)
        return RowPieces(places, *(array[chosen] for array in pieces))

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        pieces = self._pieces_of(rows)
        begins = self._begins(pieces.document) + pieces.start
        tokens, is_read = self._store.read(begins, pieces.length + 1, self._bad)
        ids, labels = ids_and_labels(tokens, pieces.length)
        batch = stretch_features(
            ids,
            labels,
            rows=pieces.row,
            sizes=pieces.length,
            num_rows=len(rows),
            length=self.seq_length,
            pad_id=self._store.about.tokenizer["pad_id"],
        )
        self._unreadable = np.bincount(pieces.row[~is_read], minlength=len(rows)) > 0
        return blank_rows(batch, self._unreadable) if self._unreadable.any() else batch

    def _read_positions(self, positions: np.ndarray, num_rows: int | None) -> NestedMap:
        batch = super()._read_positions(positions, num_rows)
        if not len(positions) or not self._unreadable.any():
            return batch
        is_blank = np.zeros(self.local_batch_size, bool)
        is_blank[: len(positions)] = self._unreadable
        return blank_rows(batch, is_blank)

    def _begins(self, documents: np.ndarray) -> np.ndarray:
        """Where the ids of documents begin in the stream, which has a start id for each."""
        ends = self._store.document_ends
        return np.where(documents > 0, ends[np.maximum(documents - 1, 0)], 0) + documents

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "tokens_sha256": self._store.identity,
            "seq_length": self.seq_length,
            "packing": self.packing,
        }

    def _close(self) -> None:
        if "_store" in vars(self):
            self._store.close()

    def text_tokenizer(self, key: str | None = None) -> Tokenizer | None:
        """Return the tokenizer that made the ids, where it is set."""
        return self.tokenizer

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Text of ids int `[batch, length]`, by `tokenizer`."""
        if self.tokenizer is None:
            raise self._config_error(
                "tokenizer is not set; set the one that made the data to turn ids into text."
            )
        return [self.tokenizer.decode(row[:n]) for row, n in zip(ids, lengths, strict=True)]
