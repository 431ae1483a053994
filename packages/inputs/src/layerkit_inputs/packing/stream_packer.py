"""StreamPacker, which packs a stream of documents into rows for language modeling.

A reader with sequential access adds documents and takes rows. The state of the packer, JSON of a
few kilobytes, holds the tokens that were added and not yet taken. With the position of the reader,
it reproduces the same rows after a restore, bit for bit.
"""

from __future__ import annotations

import base64
import collections
import zlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from layerkit.config.checks import check_choice, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.errors import check_same_data
from layerkit_inputs.packing.first_fit import OpenRows, cut_documents
from layerkit_inputs.packing.model_features import Segment, Tokens, as_tokens, segment_features

PackingMode = Literal["cut", "first_fit"]
"""`cut`: concatenate documents and cut rows; `first_fit`: keep documents whole if possible."""


class StreamPacker:
    """A packer of documents that are added one at a time.

    >>> packer = StreamPacker(4)
    >>> packer.add([5, 6, 7])
    >>> packer.add([8, 9])
    >>> packer.take().labels.tolist(), packer.take()
    ([5, 6, 7, 8], None)

    In both modes, the first token of a piece that begins inside a document is predicted from the
    token before it, and `segment_pos` begins at 0. The mode `first_fit` also cuts documents that
    are longer than a row.
    """

    def __init__(
        self,
        length: int,
        *,
        mode: PackingMode = "cut",
        open_rows: int = 8,
        bos_id: int | None = 0,
        pad_id: int = 0,
        has_inputs: bool = False,
        weights_on_targets_only: bool = False,
    ):
        """Start without documents.

        Args:
          length: Positions of a row.
          mode: `cut` or `first_fit`.
          open_rows: Maximum number of rows that wait for documents in the mode `first_fit`. The
            state holds their tokens.
          bos_id: Id that a document's first token is predicted from. None: the first token is only
            read, and the second one is predicted from it.
          pad_id: Id of padded positions.
          has_inputs: Whether documents have inputs and rows have `inputs_indicator`.
          weights_on_targets_only: Whether inputs have weight 0.

        Raises:
          ConfigError: The mode is unknown, or a number is not positive.
        """
        check_choice("StreamPacker", get_args(PackingMode), mode=mode)
        self._length = length
        self._mode = mode
        self._max_open = open_rows if mode == "first_fit" else 1
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
        """Discard all documents."""
        # In the mode `cut` at most one row is open, with the number 0 and `_num_open` tokens.
        self._fit = OpenRows([self._length], self._max_open)
        self._open: dict[int, list[Segment]] = {}
        self._num_open = 0
        self._ready: collections.deque[list[Segment]] = collections.deque()

    def add(self, targets: Tokens, inputs: Tokens | None = None) -> None:
        """Add the next document. An empty document is skipped.

        Args:
          targets: Ids to predict, including an end-of-sequence id if there is one.
          inputs: Input ids of the document; required with `has_inputs`, and otherwise None.

        Raises:
          ConfigError: Inputs are missing or not expected, or ids are not token ids.
        """
        expected = f"{'' if self._has_inputs else 'no '}inputs, as declared by has_inputs"
        is_declared = (inputs is not None) == self._has_inputs
        require(is_declared, "StreamPacker", "inputs of a document", inputs, expected)
        after = as_tokens(targets, where="the next document, targets")
        before = as_tokens(() if inputs is None else inputs, where="the next document, inputs")
        tokens, num_inputs, bos_id = Segment.of(before, after, self._bos_id)
        for start, stop in self._cuts(len(tokens)):
            first_id = int(tokens[start - 1]) if start else bos_id
            # Without a copy, a short piece would keep its whole document in memory.
            self._place(Segment(tokens[start:stop].copy(), num_inputs - start, first_id))

    def take(self) -> NestedMap | None:
        """Return the next row, the arrays of `lm_features` with shape `[length]`, or None."""
        row = self.take_segments()
        return None if row is None else self.features([row]).transform(lambda array: array[0])

    def take_segments(self) -> list[Segment] | None:
        """Return the segments of the next row, for `features`, or None if no row is complete."""
        return self._ready.popleft() if self._ready else None

    def features(self, rows: Sequence[Sequence[Segment]]) -> NestedMap:
        """Return a batch of rows of `take_segments`. It is faster than `take` for each row."""
        return segment_features(rows, **self._row_fields)

    def finish(self) -> None:
        """Complete all open rows, at the end of the documents."""
        self._ready.extend(self._open.values())
        self._open.clear()
        self._num_open = 0
        self._fit = OpenRows([self._length], self._max_open)

    def state(self) -> dict[str, Any]:
        """Return the tokens that were added and not yet taken, as JSON values."""
        return {
            "mode": self._mode,
            "length": self._length,
            "ready": _encode_rows(list(self._ready)),
            "open": _encode_rows(list(self._open.values())),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned.

        Raises:
          ConfigError: The state has another mode or row length, or more open rows.
        """
        num_open = len(state["open"]["segments_per_row"])
        then = {"mode": state["mode"], "length": state["length"], "open rows": num_open}
        now: dict[str, Any] = {"mode": self._mode, "length": self._length}
        now["open rows"] = min(num_open, self._max_open)
        check_same_data("StreamPacker", then, now)
        self.clear()
        self._ready.extend(_decode_rows(state["ready"]))
        for segments in _decode_rows(state["open"]):
            self._num_open = sum(len(segment.tokens) for segment in segments)
            row = self._fit.begin_row([self._num_open])
            self._open[row] = segments

    def _cuts(self, size: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the pieces of a document of `size` tokens."""
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
