"""Documents of token ids, laid end to end, and the rows and prompts cut from them by number.

Each document stands as its start id, its tokens and, where the tokenizer has one, its end id. So n
ids hold n - 1 predictions, each of an id from the one before it. Readers differ in where the ids
lie (in memory, in a mapped file); how rows are made of them is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.features import Segment
from layerkit_inputs.packing import num_stream_rows, stream_rows
from layerkit_inputs.tokenizers import Tokenizer


class TokenStream(Protocol):
    """Ids that can be read at any positions."""

    def __getitem__(self, at: np.ndarray) -> np.ndarray:
        """The ids at positions int64 `[...]`, of any integer dtype."""
        ...


class PiecewiseStream:
    """Several arrays as one stream, without copying them."""

    def __init__(self, pieces: Sequence[np.ndarray]):
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = np.cumsum([len(piece) for piece in self._pieces], dtype=np.int64)

    def __getitem__(self, at: np.ndarray) -> np.ndarray:
        """The ids at positions int64 `[...]`, as int32."""
        found = np.empty(at.shape, np.int32)
        which = np.searchsorted(self._ends, at, side="right")
        for number in np.unique(which):
            here = which == number
            begin = self._ends[number - 1] if number else 0
            found[here] = self._pieces[number][at[here] - begin]
        return found


@dataclasses.dataclass(frozen=True)
class Documents:
    """Where each document stands in a stream of ids."""

    ids: TokenStream
    """All documents, one after the other."""
    begins: np.ndarray
    """int64 `[documents]`: where each begins in `ids`."""
    ends: np.ndarray
    """int64 `[documents]`: running sum of their predictions."""
    num_inputs: np.ndarray | None = None
    """int64 `[documents]`: how many tokens of each are inputs, which count for no loss."""

    @classmethod
    def of(
        cls, ids: TokenStream, sizes: np.ndarray, *, num_inputs: np.ndarray | None = None
    ) -> Documents:
        """Documents of `sizes` ids (int64 `[documents]`, each at least 1)."""
        sizes = np.asarray(sizes, np.int64)
        stops = np.cumsum(sizes)
        return cls(ids, stops - sizes, np.cumsum(sizes - 1), num_inputs)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def num_predictions(self) -> np.ndarray:
        """int64 `[documents]`."""
        return np.diff(self.ends, prepend=0)

    def num_stream_rows(self, length: int) -> int:
        """Rows of `length` positions that hold all predictions."""
        return num_stream_rows(self.ends, length)

    def stream_rows(self, rows: np.ndarray, *, length: int, pad_id: int) -> NestedMap:
        """Rows cut from the documents laid end to end, as `features.lm_features` has packed rows.

        Args:
          rows: int64 `[rows]`, each below `num_stream_rows`.
          length: Positions of a row.
          pad_id: Id of padded positions.
        """
        where = stream_rows(rows, self.ends, length)
        at = self.begins[where.document] + where.offset
        valid = where.segment_ids > 0
        counts = valid
        if self.num_inputs is not None:
            counts = valid & (where.offset >= self.num_inputs[where.document])
        batch = NestedMap(
            ids=np.where(valid, self.ids[at], pad_id).astype(np.int32),
            labels=np.where(valid, self.ids[at + 1], pad_id).astype(np.int32),
            weights=counts.astype(np.float32),
            paddings=(~valid).astype(np.float32),
            segment_ids=where.segment_ids,
            segment_pos=where.segment_pos,
        )
        if self.num_inputs is not None:
            is_read = valid & (where.offset <= self.num_inputs[where.document])
            batch.inputs_indicator = is_read.astype(np.int32)
        return batch

    def segment(self, document: int, start: int, length: int) -> Segment:
        """`length` predictions of a document from its prediction `start` on."""
        begin = self.begins[document] + start
        ids = self.ids[np.arange(begin, begin + length + 1)].astype(np.int32)
        num_inputs = 0 if self.num_inputs is None else int(self.num_inputs[document]) - start
        return Segment(ids[1:], num_inputs=num_inputs, first_id=int(ids[0]))

    def prompts(self, rows: np.ndarray, *, length: int, tokenizer: Tokenizer) -> NestedMap:
        """Beginnings of documents, or their inputs; never the end id.

        Args:
          rows: int64 `[rows]`: numbers of documents.
          length: Positions of a row; what is longer is cut on the right.
          tokenizer: Whose ids these are.

        Returns:
          `ids` int32 and `paddings` float32 `[rows, length]`, `prompt_lengths` int32 `[rows]`.
        """
        if self.num_inputs is None:
            sizes = self.num_predictions[rows] + (tokenizer.eos_id is None)
        else:
            sizes = self.num_inputs[rows] + 1
        lengths = np.minimum(sizes, length)
        columns = np.arange(length)
        valid = columns < lengths[:, None]
        at = np.where(valid, self.begins[rows][:, None] + columns, 0)
        return NestedMap(
            ids=np.where(valid, self.ids[at], tokenizer.pad_id).astype(np.int32),
            paddings=(~valid).astype(np.float32),
            prompt_lengths=lengths.astype(np.int32),
        )


def framed(tokens: Sequence[np.ndarray], tokenizer: Tokenizer) -> np.ndarray:
    """A document as it stands in a stream: start id, `tokens` (laid end to end), end id; int32."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    parts = [[tokenizer.start_id], *tokens, end]
    return np.concatenate([np.asarray(part, np.int32) for part in parts])
