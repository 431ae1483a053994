"""IndexedInput: a reader of rows by number, whose whole state is one global count.

The global stream is a sequence of row numbers; batch after batch takes the next of them, and each
host reads its own block. So any number of hosts makes the same global batches, and a run may go on
with another number of them. Order within an epoch is a permutation drawn from Philox with the key
[seed, epoch]: nothing has to be remembered to draw it again.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import pad_rows, split_rows
from layerkit_inputs.state import Scope


def epoch_order(num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits its rows: int64 `[num_rows]`, a permutation."""
    key = np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_rows)


class IndexedInput(BaseInput):
    """Base of readers that can read any row by its number.

    A subclass defines `_num_rows` and `_read_rows`, and `_fingerprint` where its rows depend on
    fields or files. While training, batches run on from one epoch into the next, so every epoch
    visits each row exactly once and no batch is short. An evaluation of one epoch fills its last
    batches with padding, as many on every host. `provenance` (int32 `[batch]`, the row's number, -1
    for padding) and `eval_sample_weights` (float32 `[batch]`) say which rows
    count.
    """

    shuffle: bool | None = None
    """Visit the rows of each epoch in a new random order. None: while training."""

    state_scope: ClassVar[Scope] = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle is None:
            self.shuffle = self.is_training
        self._seed = self.input_random_seed or 0
        if not 0 <= self._seed < 2**64:
            raise self._refuse(f"input_random_seed={self._seed}; expected 0 or more, below 2**64.")
        self._rows_done = 0
        self._orders: dict[int, np.ndarray] = {}

    # What a reader writes.

    def _num_rows(self) -> int | None:
        """Rows of an epoch; None for a stream that never ends."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _num_rows().")

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        """The rows with these numbers (int64 `[rows]`, never empty), as arrays `[rows, ...]`."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _read_rows().")

    def _fingerprint(self) -> dict[str, Any]:
        """What decides which rows there are, as JSON values; a state fits where it is equal."""
        return {}

    # What BaseInput asks for.

    def _next(self) -> NestedMap:
        num_rows = self._num_rows()
        if num_rows == 0:
            raise self._refuse("there are no rows to read.")
        limit = None if self.endless else num_rows
        if limit is not None and self._rows_done >= limit:
            raise StopIteration
        positions = split_rows(
            self._rows_done,
            limit,
            batch_size=self.local_batch_size,
            host_index=self.infeed_host_index,
        )
        batch = self._read_positions(positions, num_rows)
        self._rows_done += self.global_batch_size
        return batch

    def _read_positions(self, positions: np.ndarray, num_rows: int | None) -> NestedMap:
        rows = self._rows_at(positions, num_rows)
        if len(rows):
            batch = self._read_rows(rows)
        else:  # this host's share is used up: some row gives the shapes
            batch = self._read_rows(np.zeros(1, np.int64)).transform(lambda array: array[:0])
        if not self.is_training:
            batch.provenance = rows.astype(np.int32)
            batch.eval_sample_weights = np.ones(len(rows), np.float32)
        return pad_rows(batch, self.local_batch_size - len(rows))

    def _rows_at(self, positions: np.ndarray, num_rows: int | None) -> np.ndarray:
        """Row numbers at these positions of the stream, which runs through epoch after epoch."""
        if num_rows is None:
            return positions
        epochs, within = np.divmod(positions, num_rows)
        if not self.shuffle:
            return within
        needed = [int(epoch) for epoch in np.unique(epochs)]
        self._orders = {epoch: self._order(num_rows, epoch) for epoch in needed or self._orders}
        rows = np.empty_like(within)
        for epoch in needed:
            here = epochs == epoch
            rows[here] = self._orders[epoch][within[here]]
        return rows

    def _order(self, num_rows: int, epoch: int) -> np.ndarray:
        if epoch in self._orders:
            return self._orders[epoch]
        return epoch_order(num_rows, seed=self._seed, epoch=epoch)

    def _reset(self) -> None:
        self._rows_done = 0

    def _identity(self) -> dict[str, Any]:
        order = {"seed": self._seed} if self.shuffle else {}
        return {"num_rows": self._num_rows(), **order, **self._fingerprint()}

    def _reader_state(self) -> dict[str, Any]:
        return {"rows_done": self._rows_done, "data": self._identity()}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        then, now = position["data"], self._identity()
        differing = [
            f"{name} was {then.get(name)!r} and is {now.get(name)!r}"
            for name in sorted({*then, *now})
            if then.get(name) != now.get(name)
        ]
        if differing:
            raise self._refuse(
                f"the state does not fit this data: {'; '.join(differing)}. Restore with the data "
                "and fields it was written with, or start a new run from the weights alone."
            )
        self._rows_done = position["rows_done"]
