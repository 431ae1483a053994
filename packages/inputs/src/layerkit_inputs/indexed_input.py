"""IndexedInput: a reader of rows by number, whose whole state is one global count.

The global stream is a sequence of row numbers; batch after batch takes the next of them, and each
host reads its own block. So any number of hosts makes the same global batches, and a run may go on
with another number of them. Order within an epoch follows from seed and epoch alone, so nothing has
to be remembered to find it again: a permutation drawn from Philox with the key [seed, epoch], or,
for more rows than should be held in memory, and for windows, one computed place by place
(`index_shuffle`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import pad_rows, split_rows
from layerkit_inputs.index_shuffle import shuffled_rows, window_shuffled_rows
from layerkit_inputs.state import Scope, why_data_differ

MOST_ROWS_DRAWN = 1 << 22
"""Rows up to which the order of an epoch is drawn whole, 8 bytes a row."""


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
    shuffle_window: int | None = None
    """Where rows are shuffled, how many that are stored next to each other are visited together,
    for the sake of disks. None: any row may come at any place."""

    state_scope: ClassVar[Scope] = "global"

    rows_in_memory: ClassVar[bool] = False
    """Whether `_read_rows` takes no storage and refuses no row, so that a `Mixture` may read the
    rows of a few batches at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        window = self.shuffle_window
        if window is not None and (window < 1 or self.shuffle is False):
            raise self._config_error(
                f"shuffle_window={window} with shuffle={self.shuffle}; expected at least 1 row, or "
                "None where nothing is shuffled."
            )
        if self.shuffle is None:
            self.shuffle = self.is_training
        self._seed = self.input_random_seed or 0
        if not 0 <= self._seed < 2**64:
            raise self._config_error(
                f"input_random_seed={self._seed}; expected 0 or more, below 2**64."
            )
        self._rows_done = 0
        self._orders: dict[int, np.ndarray] = {}

    # What a reader writes.

    def _num_rows(self) -> int | None:
        """Rows of an epoch; None for a stream that never ends."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _num_rows().")

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        """The rows with these numbers (int64 `[rows]`, never empty), as arrays `[rows, ...]`.

        The arrays become the caller's: new ones, or views, which are copied; none that is kept.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define _read_rows().")

    def _fingerprint(self) -> dict[str, Any]:
        """What decides which rows there are, as JSON values; a state fits where it is equal."""
        return {}

    # What BaseInput asks for.

    def _next(self) -> NestedMap:
        num_rows = self._num_rows()
        if num_rows == 0:
            raise self._config_error("there are no rows to read.")
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
        return self._finished(batch, rows)

    def _finished(self, batch: NestedMap, rows: np.ndarray) -> NestedMap:
        """`batch` as it is handed out: outside of training numbered, and always full."""
        if not self.is_training:
            if len(rows) and rows.max() >= 2**31:
                raise self._config_error(
                    f"row {rows.max()} has no provenance; int32 ends at 2**31 - 1."
                )
            batch.provenance = rows.astype(np.int32)
            batch.eval_sample_weights = np.ones(len(rows), np.float32)
        return pad_rows(batch, self.local_batch_size - len(rows), copy=False)

    def _rows_at(self, positions: np.ndarray, num_rows: int | None) -> np.ndarray:
        """Row numbers at these positions of the stream, which runs through epoch after epoch."""
        if num_rows is None:
            return positions
        epochs, within = np.divmod(positions, num_rows)
        if not self.shuffle:
            return within
        if not len(positions):
            return within
        first, last = int(epochs.min()), int(epochs.max())
        # Orders of epochs that are over are let go.
        self._orders = {n: order for n, order in self._orders.items() if first <= n <= last}
        if first == last:
            return self._shuffled(within, num_rows, first)
        rows = np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            rows[here] = self._shuffled(within[here], num_rows, epoch)
        return rows

    def _shuffled(self, places: np.ndarray, num_rows: int, epoch: int) -> np.ndarray:
        if self.shuffle_window is not None:
            return window_shuffled_rows(
                places, num_rows, window=self.shuffle_window, seed=self._seed, epoch=epoch
            )
        if num_rows > MOST_ROWS_DRAWN:
            return shuffled_rows(places, num_rows, seed=self._seed, epoch=epoch)
        if epoch not in self._orders:
            self._orders[epoch] = epoch_order(num_rows, seed=self._seed, epoch=epoch)
        return self._orders[epoch][places]

    def _reset(self) -> None:
        self._rows_done = 0

    def _identity(self) -> dict[str, Any]:
        order: dict[str, Any] = {"seed": self._seed} if self.shuffle else {}
        if self.shuffle and self.shuffle_window is not None:
            order["shuffle_window"] = self.shuffle_window
        return {"num_rows": self._num_rows(), **order, **self._fingerprint()}

    def _reader_state(self) -> dict[str, Any]:
        return {"rows_done": self._rows_done, "data": self._identity()}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        if problem := why_data_differ(position["data"], self._identity()):
            raise self._config_error(problem)
        self._rows_done = position["rows_done"]
