"""StreamPacker: rows of language modelling from documents that come one after the other.

A reader that only knows "the next document" feeds it and takes rows from it. Its state, JSON of a
few kilobytes, holds the tokens that were fed and not yet taken, so that together with the reader's
own position the same rows come out after a restore, to the bit.
"""

from __future__ import annotations

import base64
import collections
import zlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit_inputs.features import Segment, Tokens, as_tokens, segment_features
from layerkit_inputs.first_fit import OpenRows, cut_documents

PackingMode = Literal["cut", "first_fit"]
"""`cut`: documents end to end, cut every row; `first_fit`: documents whole where they can be."""


class StreamPacker:
    """Packs documents as they come.

    >>> packer = StreamPacker(4)
    >>> packer.add([5, 6, 7])
    >>> packer.add([8, 9])
    >>> packer.take().labels.tolist(), packer.take()
    ([5, 6, 7, 8], None)

    In both modes a piece that begins inside a document is predicted from the true token before it,
    and `segment_pos` begins at 0. A document longer than a row is cut in mode `first_fit` too.
    """

    def __init__(
        self,
        length: int,
        *,
        mode: PackingMode = "cut",
        open_rows: int = 8,
        bos_id: int = 0,
        pad_id: int = 0,
        has_inputs: bool = False,
        weights_on_targets_only: bool = False,
    ):
        """Makes a packer that holds nothing.

        Args:
          length: Positions of a row.
          mode: `cut` or `first_fit`.
          open_rows: In mode `first_fit`, how many rows may wait for documents that fit; the state
            holds their tokens.
          bos_id: What a document's first token is predicted from.
          pad_id: Id of padded positions.
          has_inputs: Documents have inputs, and rows `inputs_indicator`.
          weights_on_targets_only: Inputs count for no loss.

        Raises:
          ValueError: a mode that is none, or a number below 1.
        """
        modes = get_args(PackingMode)
        if mode not in modes:
            raise ValueError(
                f"mode={mode!r}{near_names(str(mode), modes)} Expected one of {modes}."
            )
        self._length = length
        self._mode = mode
        self._most_open = open_rows if mode == "first_fit" else 1
        self._bos_id = bos_id
        self._row_fields: dict[str, Any] = {
            "length": length,
            "pad_id": pad_id,
            "has_inputs": has_inputs,
            "weights_on_targets_only": weights_on_targets_only,
        }
        self._has_inputs = has_inputs
        self.clear()

    def clear(self) -> None:
        """Forgets all documents."""
        # In mode `cut` one row is open at most, of number 0, with `_num_open` tokens in it.
        self._fit = OpenRows([self._length], self._most_open)
        self._open: dict[int, list[Segment]] = {}
        self._num_open = 0
        self._ready: collections.deque[list[Segment]] = collections.deque()

    def add(self, targets: Tokens, inputs: Tokens | None = None) -> None:
        """Feeds the next document; an empty one is left out.

        Args:
          targets: Ids to predict, the end-of-sequence id included where there is to be one.
          inputs: Ids to predict from, with `has_inputs`.

        Raises:
          ValueError: not token ids, or inputs where none, or no inputs where some are expected.
        """
        if (inputs is not None) != self._has_inputs:
            raise ValueError(
                f"StreamPacker(has_inputs={self._has_inputs}) was fed a document "
                f"{'with' if inputs is not None else 'without'} inputs."
            )
        tokens = as_tokens(targets, where="the next document, targets")
        num_inputs = 0
        if inputs is not None:
            before = as_tokens(inputs, where="the next document, inputs")
            num_inputs, tokens = len(before), np.concatenate([before, tokens])
        for start, stop in self._cuts(len(tokens)):
            first_id = int(tokens[start - 1]) if start else self._bos_id
            # A copy, or one short piece would keep its whole document alive.
            self._place(Segment(tokens[start:stop].copy(), num_inputs - start, first_id))

    def take(self) -> NestedMap | None:
        """The next row, as `lm_features` has it but arrays `[length]`; None: feed more first."""
        row = self.take_segments()
        return None if row is None else self.features([row]).transform(lambda array: array[0])

    def take_segments(self) -> list[Segment] | None:
        """What the next row holds, for `features`; None: feed more first."""
        return self._ready.popleft() if self._ready else None

    def features(self, rows: Sequence[Sequence[Segment]]) -> NestedMap:
        """Rows of `take_segments` as a batch, which costs less than taking each by itself."""
        return segment_features(rows, **self._row_fields)

    def finish(self) -> None:
        """Makes the rows that are still open ready too, at the end of the documents."""
        self._ready.extend(self._open.values())
        self._open.clear()
        self._num_open = 0
        self._fit = OpenRows([self._length], self._most_open)

    @property
    def num_ready(self) -> int:
        """How many rows can be taken."""
        return len(self._ready)

    def state(self) -> dict[str, Any]:
        """What was fed and not yet taken, as JSON values."""
        return {
            "mode": self._mode,
            "length": self._length,
            "ready": _encode_rows(list(self._ready)),
            "open": _encode_rows(list(self._open.values())),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was called.

        Raises:
          ValueError: it was another mode or row length.
        """
        if (state["mode"], state["length"]) != (self._mode, self._length):
            raise ValueError(
                f"the state is of rows of {state['length']} in mode {state['mode']!r} and does not "
                f"fit rows of {self._length} in mode {self._mode!r}; restore with the fields it "
                "was written with, or start a new run from the weights alone."
            )
        self.clear()
        self._ready.extend(_decode_rows(state["ready"]))
        for segments in _decode_rows(state["open"]):
            self._num_open = sum(len(segment.tokens) for segment in segments)
            row = self._fit.begin_row([self._num_open])
            self._open[row] = segments

    def _cuts(self, size: int) -> list[tuple[int, int]]:
        """Where the pieces of a document of `size` tokens begin and end."""
        if self._mode == "first_fit":
            pieces = cut_documents([size], self._length)
            return [(int(s), int(s + n)) for s, n in zip(pieces.start, pieces.length, strict=True)]
        starts = [0, *range(self._length - self._num_open, size, self._length)]
        return [*zip(starts, [*starts[1:], size], strict=True)] if size else []

    def _place(self, segment: Segment) -> None:
        size = len(segment.tokens)
        if self._mode == "cut":
            self._open.setdefault(0, []).append(segment)
            self._num_open = (self._num_open + size) % self._length
            if not self._num_open:
                self._ready.append(self._open.pop(0))
            return
        row, closed = self._fit.place([size])
        self._open.setdefault(row, []).append(segment)
        self._ready.extend(self._open.pop(number) for number in closed)


def _encode_rows(rows: list[list[Segment]]) -> dict[str, Any]:
    segments = [segment for row in rows for segment in row]
    tokens = np.concatenate([np.zeros(0, np.int32), *(segment.tokens for segment in segments)])
    packed = zlib.compress(tokens.astype("<i4").tobytes())
    return {
        "segments_per_row": [len(row) for row in rows],
        "lengths": [len(segment.tokens) for segment in segments],
        "num_inputs": [segment.num_inputs for segment in segments],
        "first_ids": [segment.first_id for segment in segments],
        "tokens": base64.b64encode(packed).decode("ascii"),
    }


def _decode_rows(encoded: dict[str, Any]) -> list[list[Segment]]:
    tokens = np.frombuffer(zlib.decompress(base64.b64decode(encoded["tokens"])), "<i4")
    pieces = np.split(tokens.astype(np.int32), np.cumsum(encoded["lengths"])[:-1])
    segments = iter(
        [
            Segment(*fields)
            for fields in zip(pieces, encoded["num_inputs"], encoded["first_ids"], strict=False)
        ]
    )
    return [[next(segments) for _ in range(count)] for count in encoded["segments_per_row"]]
