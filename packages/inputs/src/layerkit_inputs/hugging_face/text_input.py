"""HuggingFaceInput: language modeling over a Hugging Face data set with rows by number.

The split is tokenized when it is first needed, into a memory-mapped file in the cache of
`datasets`, which is keyed by data, columns and tokenizer. So any row can be read directly, the
state is one count, and any number of hosts can resume from it. Each machine tokenizes the whole
split. For larger data, build token records once and read them with TokenRecords, or use
HuggingFaceStream, which tokenizes as it reads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import FIRST_TEXT_BYTES, NUM_FIRST_TEXTS
from layerkit_inputs.hugging_face.text_base import HuggingFaceRows, HuggingFaceText
from layerkit_inputs.packing.documents import (
    DocumentInput,
    DocumentPrompts,
    Documents,
    PiecewiseStream,
    RowPlan,
    sizes_of,
)
from layerkit_inputs.packing.model_features import Segment

_CACHE_VERSION = 2
"""Version of the cached files, which is part of their names."""
_CHECKED_DOCUMENTS = 64
"""Number of documents that identify the data in a state."""


class TokenisedText(HuggingFaceText, DocumentInput):
    """Base of inputs that read the tokenized examples of a split by number."""

    _is_pair: ClassVar[bool] = False

    def _most_examples(self) -> int | None:
        """Return the largest number of examples that are needed, or None for all."""
        return None

    @functools.cached_property
    def _documents(self) -> Documents:
        data = self._open_mapped()
        most = self._most_examples()
        if most is not None and most < len(data):
            data = data.select(range(most))
        num_skipped_files = self._bad.num_skipped
        tokenized = self._tokenize(data) if len(data) else data
        if not len(tokenized):
            raise self._config_error(f"no usable examples in {self._describe_files()}")
        self._bad.num_skipped = num_skipped_files + len(data) - len(tokenized)
        first = data[:NUM_FIRST_TEXTS][self.text_field]
        self._texts_to_check = [
            text.encode()[:FIRST_TEXT_BYTES] for text in first if type(text) is str
        ]
        chunks = tokenized.data.column("ids").chunks
        pieces, sizes = [], []
        for chunk in chunks:
            offsets = chunk.offsets.to_numpy()
            pieces.append(chunk.values.to_numpy(zero_copy_only=True)[offsets[0] : offsets[-1]])
            sizes.append(np.diff(offsets))
        num_inputs = None
        if self.inputs_field is not None:
            num_inputs = tokenized.data.column("num_inputs").to_numpy().astype(np.int64)
        return Documents.of(PiecewiseStream(pieces), np.concatenate(sizes), num_inputs=num_inputs)

    def _tokenize(self, data: Any) -> Any:
        """Return a cached data set of `ids` (start id, tokens, end id) and `num_inputs`."""
        datasets = self._library()
        identity = {**self._text_identity(), "is_pair": self._is_pair}
        made_of = [_CACHE_VERSION, data._fingerprint, identity, self.on_bad_record]
        key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]
        cache = Path(self.cache_dir or datasets.config.HF_DATASETS_CACHE, "layerkit_tokens")
        cache.mkdir(parents=True, exist_ok=True)

        def encode(table: Any, rows: list[int]) -> dict[str, Any]:
            ids, num_inputs = [], []
            for row, example in self._examples(table, range(table.num_rows)):
                if isinstance(example, str):
                    self._report(rows[row], example)
                    continue
                document = self._framed(example)
                ids.append(np.concatenate(document))
                num_inputs.append(Segment.of(*document, first_id=None).num_inputs)
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
            desc=f"Tokenizing {self.split}",
        )

    def _checksum(self) -> int:
        """CRC-32 of the sizes of all examples and of the tokens of a sample."""
        documents = self._documents
        checked = np.unique(np.linspace(0, len(documents) - 1, _CHECKED_DOCUMENTS, dtype=np.int64))
        checksum = zlib.crc32(documents.ends.astype("<i8").tobytes())
        sizes = sizes_of(documents.ends, checked)
        tokens = documents.read(documents.begins[checked] + 1, sizes)
        return zlib.crc32(tokens.astype("<i4").tobytes(), checksum)

    def _fingerprint(self) -> dict[str, Any]:
        return {**self._text_identity(), "tokens_crc32": self._checksum()}

    def _num_documents(self) -> int:
        return len(self._documents)

    def _close(self) -> None:
        for name in ("_documents", "_plan"):  # the plan holds the ends of documents
            vars(self).pop(name, None)


class HuggingFaceInput(HuggingFaceRows, TokenisedText):
    """An input of rows of text for language modeling, from a data set on disk.

    Batches hold these fields, each `[batch, length]`: `ids` and `labels` (int32; `labels` is the
    next token of the example, or its end), `weights` (float32, 1 for labels that count, 0 for
    padding and inputs), `paddings` (float32, 1 for padding), `segment_ids` and `segment_pos`
    (int32). Evaluation batches also have `provenance` and `eval_sample_weights`, each `[batch]`.

    `packing` decides the contents of a row:

    - `stream`: Examples are concatenated and cut every `seq_length` predictions. No token is lost
      and only the last row has padding. An example may continue in the next row.
    - `first_fit`: A row holds several whole examples; examples longer than a row are cut first. All
      rows are planned when first needed, which takes two seconds per million examples.
    - `none`: A row holds one example. A longer one raises ConfigError, or is cut if `trim` is set.
    """

    @functools.cached_property
    def _plan(self) -> RowPlan:
        return RowPlan(self._documents.ends, self.seq_length, self.packing)

    def _num_rows(self) -> int:
        return self._plan.num_rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        documents = self._documents
        if self.packing == "none" and not self.trim:
            sizes = sizes_of(documents.ends, rows)
            for place in np.flatnonzero(sizes > self.seq_length)[:1].tolist():
                raise self._too_long(int(rows[place]), int(sizes[place]))
        return documents.rows_of(self._plan, rows, pad_id=self._tokenizer.pad_id)

    def _fingerprint(self) -> dict[str, Any]:
        row_fields = {"seq_length": self.seq_length, "packing": self.packing, "trim": self.trim}
        return {**super()._fingerprint(), **row_fields}


class HuggingFacePrompts(DocumentPrompts, TokenisedText):
    """An input of prompts: beginnings of examples, or their inputs if `inputs_field` is set."""

    def _most_examples(self) -> int | None:
        return self.num_prompts
