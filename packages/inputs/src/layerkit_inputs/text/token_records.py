"""TokenRecords, an input of tokenized documents for language modeling.

`python -m layerkit_inputs.tools.build_token_records` makes the files; see `token_store` for their
format. Rows have random access, so the state is one count, from which any number of hosts can
resume. Each host reads only the blocks of its own rows, and the index is memory-mapped.

The field `packing` determines the contents of rows:

- `stream`: documents are concatenated and cut every `seq_length` predictions. Only the last row has
  padding. A document may span several rows.
- `first_fit`: documents are kept whole, several in a row. Documents longer than a row are cut
  first. Every host plans all rows on first use, which takes two seconds and some 200 MB for each
  million documents. For more than some ten million documents use `stream`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import counted
from layerkit_inputs.base.errors import OnBadRecord
from layerkit_inputs.base.evaluation import blank_rows
from layerkit_inputs.base.tokenizer_interface import SpecialIds, Tokenizer
from layerkit_inputs.packing.documents import PackedRows, RowPlan, ids_and_labels
from layerkit_inputs.packing.model_features import stretch_features
from layerkit_inputs.text.token_store import TokenStore
from layerkit_inputs.text.tokenizers import ByteTokenizer

Packing = Literal["stream", "first_fit"]
"""`stream`: documents are cut anywhere, without padding; `first_fit`: documents are kept whole."""


class TokenRecords(PackedRows):
    """An input of packed rows of tokenized documents.

    Batches hold arrays `[batch, length]`: `ids` and `labels` (int32; a label is the document's next
    id), `weights` (float32, 1 where a label counts), `paddings` (float32, 1 where padded),
    `segment_ids` (int32, from 1 in each row, 0 where padded) and `segment_pos` (int32). Outside of
    training batches also have `provenance` and `eval_sample_weights`, each `[batch]`.

    A row with a damaged block raises an error. With `on_bad_record="skip"` it is all padding, with
    weights of 0 and a `provenance` of -1.
    """

    path: str
    """Folder of token records."""
    split: str = "train"
    """Name of a split of the folder."""
    packing: Packing = "stream"
    """`stream` (cut anywhere, no padding) or `first_fit` (whole documents)."""
    tokenizer: Tokenizer | None = None
    """Tokenizer for `ids_to_strings`. It must be the tokenizer of the documents."""
    vocab_size: int | None = None
    """Vocabulary size of the model. A larger vocabulary of the documents raises. None: no check."""
    on_bad_record: OnBadRecord = "refuse"
    """`refuse` raises for damaged blocks; `skip` skips their rows and counts the blocks."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(1, "vocab_size")
        self._tokenizer = self.tokenizer

    @functools.cached_property
    def _store(self) -> TokenStore:
        store = TokenStore(self.path, self.split)
        stored = store.about.tokenizer
        if self.tokenizer is not None:
            fingerprint = self.tokenizer.fingerprint()
            expected = f"{stored['fingerprint']!r}, with which {self.path} was made"
            is_same = fingerprint == stored["fingerprint"]
            require(is_same, self._label, "fingerprint of tokenizer", fingerprint, expected)
        # The loss of larger ids would be NaN.
        expected = f"at least {stored['vocab_size']}, the vocabulary size of {self.path}"
        is_enough = self.vocab_size is None or self.vocab_size >= stored["vocab_size"]
        require(is_enough, self._label, "vocab_size", self.vocab_size, expected)
        return store

    @functools.cached_property
    def _plan(self) -> RowPlan:
        return RowPlan(self._store.document_ends, self.seq_length, self.packing)

    @property
    def tokenizer_fingerprint(self) -> str:
        """Fingerprint of the tokenizer of the documents."""
        fingerprint: str = self._store.about.tokenizer["fingerprint"]
        return fingerprint

    @property
    def token_unit(self) -> str:  # type: ignore[override]
        """Unit `byte` if the documents were made with the ByteTokenizer, else `token`."""
        is_bytes = self.tokenizer_fingerprint == ByteTokenizer().fingerprint()
        return "byte" if is_bytes else "token"

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        pieces = self._plan.pieces(rows)
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
        self._is_unreadable = np.bincount(pieces.row[~is_read], minlength=len(rows)) > 0
        return blank_rows(batch, self._is_unreadable) if self._is_unreadable.any() else batch

    def _begins(self, documents: np.ndarray) -> np.ndarray:
        """Return the positions of documents in the stream, whose first ids are not predicted."""
        ends = self._store.document_ends
        return np.where(documents > 0, ends[np.maximum(documents - 1, 0)], 0) + documents

    def _fingerprint(self) -> dict[str, Any]:
        fields = {**super()._fingerprint(), "packing": self.packing}
        return {"tokens_sha256": self._store.identity, **fields}

    def _data_text(self) -> str:
        split = self._store.split
        return (
            f"split {self.split!r} of {self.path}: {counted(len(split.shards), 'file')},"
            f" {counted(split.num_documents, 'document')},"
            f" {counted(split.num_predictions, 'token')},"
            f" {counted(sum(shard.num_bytes for shard in split.shards), 'byte')}"
        )

    def _close(self) -> None:
        if "_store" in vars(self):
            self._store.close()

    def special_ids(self) -> SpecialIds:
        """Return the ids of the documents, which `about.json` records."""
        stored = self._store.about.tokenizer
        return SpecialIds(stored["start_id"], stored["eos_id"], stored["pad_id"])

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Decode ids int `[batch, length]` with `tokenizer`."""
        require(self.tokenizer is not None, self._label, "tokenizer", None, "that of the documents")
        return super().ids_to_strings(ids, lengths, key)
