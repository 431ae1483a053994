"""HuggingFaceInput: language modelling over a Hugging Face data set, every row by its number.

The split is tokenised once, when first needed, into a file that `datasets` maps into memory; that
file stays in its cache and is found again by what it was made of (data, columns, tokenizer). So
any row can be read at once, the whole state is one count, and any number of hosts goes on from it.
Each machine tokenises for itself: for data too large for that, build token records once and read
them by TokenRecords, or read the data set as it comes by HuggingFaceStream.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit_inputs.documents import Documents, PiecewiseStream, framed
from layerkit_inputs.first_fit import DocumentPieces, PackingPlan, cut_documents, plan_packing
from layerkit_inputs.hugging_face.text import HuggingFaceText
from layerkit_inputs.indexed_input import IndexedInput
from layerkit_inputs.packing import RowPieces

Packing = Literal["stream", "first_fit", "none"]
"""How examples share rows; see HuggingFaceInput."""

_CACHE_VERSION = 1
"""Part of a cached file's name; another one where the file's contents change their meaning."""
_CHECKED_DOCUMENTS = 64
"""How many documents a state checks the data by."""


class TokenisedText(HuggingFaceText, IndexedInput):
    """Base of readers that find the examples of a split, as token ids, by number."""

    def _most_examples(self) -> int | None:
        """How many examples are needed at most; None: all."""
        return None

    @functools.cached_property
    def _documents(self) -> Documents:
        data = self._open_mapped()
        self._check_text_columns(data.column_names)
        most = self._most_examples()
        if most is not None and most < len(data):
            data = data.select(range(most))
        num_skipped_files = self._bad.num_skipped
        tokenised = self._tokenise(data) if len(data) else data
        if not len(tokenised):
            raise self._config_error(f"{self._data_in_words()}: no examples that can be used.")
        self._bad.num_skipped = num_skipped_files + len(data) - len(tokenised)
        chunks = tokenised.data.column("ids").chunks
        pieces, sizes = [], []
        for chunk in chunks:
            offsets = chunk.offsets.to_numpy()
            pieces.append(chunk.values.to_numpy(zero_copy_only=True)[offsets[0] : offsets[-1]])
            sizes.append(np.diff(offsets))
        num_inputs = None
        if self.inputs_field is not None:
            num_inputs = tokenised.data.column("num_inputs").to_numpy().astype(np.int64)
        return Documents.of(PiecewiseStream(pieces), np.concatenate(sizes), num_inputs=num_inputs)

    def _tokenise(self, data: Any) -> Any:
        """A data set of `ids` (start id, tokens, end id) and `num_inputs`, from the cache."""
        datasets = self._library()
        made_of = [_CACHE_VERSION, data._fingerprint, self._text_identity(), self.on_bad_record]
        key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]
        cache = Path(self.cache_dir or datasets.config.HF_DATASETS_CACHE, "layerkit_tokens")
        cache.mkdir(parents=True, exist_ok=True)

        def encode(table: Any, rows: list[int]) -> dict[str, Any]:
            ids, num_inputs = [], []
            for row, example in self._examples(table, range(table.num_rows)):
                if isinstance(example, str):
                    self._report(rows[row], example)
                    continue
                ids.append(framed(example, self._tokenizer))
                num_inputs.append(len(example.inputs))
            return {"ids": ids, "num_inputs": num_inputs}

        integer, ids = datasets.Value("int64"), datasets.List(datasets.Value("int32"))
        return data.with_format("arrow").map(
            encode,
            with_indices=True,
            batched=True,
            remove_columns=data.column_names,
            features=datasets.Features({"ids": ids, "num_inputs": integer}),
            cache_file_name=str(cache / f"{key}.arrow"),
            load_from_cache_file=True,
            new_fingerprint=key,
            desc=f"Tokenising {self.split}",
        )

    @functools.cached_property
    def _checksum(self) -> int:
        """CRC-32 of the examples' sizes and of the tokens of some of them."""
        documents = self._documents
        checked = np.unique(np.linspace(0, len(documents) - 1, _CHECKED_DOCUMENTS, dtype=np.int64))
        checksum = zlib.crc32(documents.ends.astype("<i8").tobytes())
        sizes = documents.num_predictions_of(checked).tolist()
        for document, size in zip(checked.tolist(), sizes, strict=True):
            tokens = documents.segment(document, 0, size).tokens
            checksum = zlib.crc32(tokens.astype("<i4").tobytes(), checksum)
        return checksum

    def _fingerprint(self) -> dict[str, Any]:
        return {**self._text_identity(), "tokens_crc32": self._checksum}

    def _close(self) -> None:
        vars(self).pop("_documents", None)


class HuggingFaceInput(TokenisedText):
    """Rows of text for language modelling, from a data set on disk.

    Batches hold, each `[batch, length]`: `ids` and `labels` (int32; `labels` is the example's next
    token, or its end), `weights` (float32, 1 where a label counts: not in padding, nor in inputs),
    `paddings` (float32, 1 where padded), `segment_ids` and `segment_pos` (int32). Outside of
    training also `provenance` and `eval_sample_weights`, each `[batch]`.

    `packing` settles what a row holds:

    - `stream`: the examples are laid end to end and cut every `seq_length` predictions. Nothing is
      lost, and only the last row has padding; an example may go on in the next row.
    - `first_fit`: examples are kept whole, several to a row, those longer than a row being cut
      first. All rows are planned when first needed, two seconds for each million examples.
    - `none`: an example a row; a longer one is refused, or cut where `trim` says so.
    """

    seq_length: int = 1024
    """Positions of a row."""
    packing: Packing = "stream"
    """`stream`, `first_fit` or `none`."""
    trim: bool = False
    """With `packing="none"`: of examples longer than a row, only the first `seq_length` predictions
    are read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_row_fields(self, packing=self.packing, trim=self.trim)

    @functools.cached_property
    def _plan(self) -> tuple[DocumentPieces, PackingPlan]:
        """For `first_fit`: pieces of all documents, and which of them make up which row."""
        pieces = cut_documents(self._documents.num_predictions, self.seq_length)
        return pieces, plan_packing(pieces.length, self.seq_length)

    def _num_rows(self) -> int:
        if self.packing == "stream":
            return self._documents.num_stream_rows(self.seq_length)
        if self.packing == "first_fit":
            return self._plan[1].num_rows
        return len(self._documents)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        documents, length, pad_id = self._documents, self.seq_length, self._tokenizer.pad_id
        if self.packing == "stream":
            return documents.stream_rows(rows, length=length, pad_id=pad_id)
        pieces = self._packed(rows) if self.packing == "first_fit" else self._alone(rows)
        return documents.rows_of(pieces, num_rows=len(rows), length=length, pad_id=pad_id)

    def _packed(self, rows: np.ndarray) -> RowPieces:
        pieces, plan = self._plan
        chosen, places = plan.documents_of_rows(rows)
        return RowPieces(places, *(array[chosen] for array in pieces))

    def _alone(self, rows: np.ndarray) -> RowPieces:
        sizes = self._documents.num_predictions_of(rows)
        too_long_rows = np.flatnonzero(sizes > self.seq_length)
        if len(too_long_rows) and not self.trim:
            first = too_long_rows[0]
            raise self._config_error(too_long(int(rows[first]), int(sizes[first]), self.seq_length))
        lengths = np.minimum(sizes, self.seq_length)
        return RowPieces(np.arange(len(rows)), rows, np.zeros_like(rows), lengths)

    def _fingerprint(self) -> dict[str, Any]:
        row_fields = {"seq_length": self.seq_length, "packing": self.packing, "trim": self.trim}
        return {**super()._fingerprint(), **row_fields}


class HuggingFacePrompts(TokenisedText):
    """Beginnings of examples, or with `inputs_field` their inputs, for a model to go on from.

    Batches hold `ids` (int32 `[batch, length]`: start id and tokens, from the left, padding after
    them), `paddings` (float32 `[batch, length]`, 1 where padded) and `prompt_lengths` (int32
    `[batch]`, start id included); `provenance` and `eval_sample_weights` as in HuggingFaceInput.
    """

    prompt_length: int = 64
    """Most ids of a prompt, the start id included; what is longer is cut on the right."""
    num_prompts: int | None = None
    """How many of the first examples. None: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_at_least(1, "prompt_length", "num_prompts")

    def _most_examples(self) -> int | None:
        return self.num_prompts

    def _num_rows(self) -> int:
        return len(self._documents)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return self._documents.prompts(rows, length=self.prompt_length, tokenizer=self._tokenizer)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "prompt_length": self.prompt_length}


def check_row_fields(reader: HuggingFaceText, *, packing: str, trim: bool) -> None:
    """Refuses fields of rows that cannot work."""
    known = get_args(Packing)
    if packing not in known:
        raise reader._config_error(
            f"packing={packing!r}{near_names(str(packing), known)} Expected one of {known}."
        )
    reader._check_at_least(1, "seq_length")
    if trim and packing != "none":
        raise reader._config_error(
            f"trim=True with packing={packing!r}, which loses nothing; leave it unset, or set "
            "packing='none'."
        )


def too_long(number: int, size: int, seq_length: int) -> str:
    """The words that refuse an example longer than a row."""
    return (
        f"example {number} has {size} predictions, a row holds seq_length={seq_length}; use longer "
        "rows, or trim=True to read only its beginning, or a packing that cuts without loss."
    )
