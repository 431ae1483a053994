"""IndexedInput, the base class of readers of rows by number. Its state is one global count.

The global stream is a sequence of row numbers. Each global batch consists of the next ones, and
each host reads its own block of it. So any number of hosts makes the same global batches, and a run
can resume on another number of hosts. The order of an epoch depends only on seed and epoch. It is a
permutation by Philox with the key [seed, epoch].

For windows, and for more rows than fit into memory, the elements of the permutation are computed
separately. A Feistel network computes the row at a place: each round changes one half of the bits
by a hash of the other half and a key. Each round is invertible, so no two places give the same row.
The network permutes the next power of two. Results outside of the n rows are put through the
network again until they are inside (cycle walking), less than twice on average. The construction is
that of Black and Rogaway (2002), "Ciphers with Arbitrary Finite Domains". It is used for shuffling
only, not for encryption.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput, Scope, counted
from layerkit_inputs.base.errors import check_same_data
from layerkit_inputs.base.evaluation import blank_rows, pad_rows, split_rows

# Minimum number of rounds, and of bits for small sizes, with which chi-square tests of places,
# neighbors and whole orders cannot distinguish the orders of many epochs from random ones.
_NUM_ROUNDS = 8
_MIN_BITS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def shuffled_rows(places: np.ndarray, num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the rows at some places of an epoch's order.

    Args:
      places: int `[places]`, each in `[0, num_rows)`.
      num_rows: Rows of the epoch, at most 2**62.
      seed: Integer in `[0, 2**64)`.
      epoch: Integer in `[0, 2**64)`. Orders differ between seeds and between epochs.

    Returns:
      int64 `[places]`. All places together give each row exactly once.
    """
    places = np.asarray(places, np.int64)
    return _permuted(places, num_rows, _random_keys(seed, epoch)[:_NUM_ROUNDS, None])


def window_shuffled_rows(
    places: np.ndarray, num_rows: int, *, window: int, seed: int, epoch: int
) -> np.ndarray:
    """Return the rows at some places of an epoch's order in which each window is contiguous.

    The first row of the first window differs between epochs, so their windows differ. The remaining
    rows, fewer than a window, are last. `window` is the number of consecutive rows of a window, in
    which the last row is followed by the first. The rest is as in `shuffled_rows`.
    """
    places = np.asarray(places, np.int64)
    keys = _random_keys(seed, epoch)
    row_keys, window_keys = keys[:_NUM_ROUNDS], keys[_NUM_ROUNDS : 2 * _NUM_ROUNDS]
    first_row = int(keys[-1]) % max(num_rows, 1)
    num_windows, num_left = divmod(num_rows, window)
    turn, within = np.divmod(places, window)
    rows = np.empty_like(places)
    is_whole = turn < num_windows
    for here, size in ((is_whole, window), (~is_whole, num_left)):
        if not here.any():
            continue
        number = turn[here]
        if here is is_whole:
            number = _permuted(number, num_windows, window_keys[:, None])
        # Keys differ between windows.
        own_keys = _mixed(row_keys[:, None] + (number.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        rows[here] = number * window + _permuted(within[here], size, own_keys)
    return (rows + first_row) % num_rows


def _random_keys(seed: int, epoch: int) -> np.ndarray:
    """Return keys for the rounds over rows and over windows, and one more, uint64 `[keys]`."""
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return generator.random_raw(2 * _NUM_ROUNDS + 1)


def _permuted(places: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Permute `places` within `[0, size)` with keys uint64 `[rounds, places or 1]`."""
    bits = max((size - 1).bit_length(), _MIN_BITS)
    keys = np.broadcast_to(keys, (len(keys), len(places)))
    values = _network(places.astype(np.uint64), bits, keys)
    while (outside := values >= size).any():
        values[outside] = _network(values[outside], bits, keys[:, outside])
    return values.astype(np.int64)


def _network(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Permute values within `[0, 2**bits)`: each round changes one half by a hash of the other."""
    high_bits = bits // 2
    low_bits = np.uint64(bits - high_bits)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = np.uint64((1 << high_bits) - 1)
    high, low = values >> low_bits, values & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            high = high ^ (_mixed(low + key) & high_mask)
        else:
            low = low ^ (_mixed(high + key) & low_mask)
    return high << low_bits | low


def _mixed(x: np.ndarray) -> np.ndarray:
    """Return a hash: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


MOST_ROWS_DRAWN = 1 << 22
"""Maximum number of rows of which the order of an epoch is kept in memory, 8 bytes a row."""


def epoch_order(num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the rows of an epoch, int64 `[num_rows]`, a permutation."""
    key = np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_rows)


class IndexedInput(BaseInput):
    """Base class of readers that can read any row by its number.

    A subclass defines `_num_rows` and `_read_rows`, and `_fingerprint` if its rows depend on fields
    or files. While training, a batch may contain the end of one epoch and the beginning of the
    next, so every epoch visits each row exactly once and all batches are full. An evaluation of one
    epoch fills its last batches with padding, the same number of batches on every host.
    `provenance` (int32 `[batch]`, the number of the row, -1 for padding) and `eval_sample_weights`
    (float32 `[batch]`, 0 for padding) mark the rows.
    """

    shuffle: bool | None = None
    """Whether each epoch visits its rows in a new random order. None: only while training."""
    shuffle_window: int | None = None
    """Number of consecutive stored rows that are shuffled among each other and visited together,
    for sequential reads of a disk. None: rows are shuffled over the whole epoch."""

    state_scope: ClassVar[Scope] = "global"

    def __post_init__(self) -> None:
        """Check the fields and derive `shuffle`."""
        super().__post_init__()
        self._check_at_least(1, "shuffle_window")
        can_shuffle = self.shuffle_window is None or self.shuffle is not False
        expected = "None with shuffle=False"
        require(can_shuffle, self._label, "shuffle_window", self.shuffle_window, expected)
        if self.shuffle is None:
            self.shuffle = self.is_training
        self._seed = self.input_random_seed or 0
        require(self._seed < 2**64, self._label, "input_random_seed", self._seed, "at most 64 bits")
        self._rows_done = 0
        self._orders: dict[int, np.ndarray] = {}
        # Set by `_read_rows`: True for each row that could not be read; empty if all could.
        self._is_unreadable = np.zeros(0, bool)

    # Methods that a reader defines.

    def _num_rows(self) -> int | None:
        """Return the number of rows of an epoch, or None for an endless stream."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _num_rows().")

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        """Return the rows with these numbers (int64 `[rows]`, never empty), arrays `[rows, ...]`.

        The caller may modify the arrays. They must be new arrays, or views, which are copied.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define _read_rows().")

    # Methods of BaseInput.

    def _data_text(self) -> str:
        num_rows = self._num_rows()
        return "an endless stream" if num_rows is None else counted(num_rows, "row")

    def _next(self) -> NestedMap:
        num_rows = self._num_rows()
        if num_rows == 0:
            raise self._config_error("the data have no rows", hint="Check that they are not empty.")
        limit = None if self.endless else num_rows
        if limit is not None and self._rows_done >= limit:
            raise StopIteration
        positions = split_rows(
            self._rows_done,
            limit,
            batch_size=self.local_batch_size,
            host_index=self.infeed_host_index,
        )
        if len(positions):
            batch, rows = self._read_at(positions, num_rows)
        else:  # This host has no rows left. Any row gives the shapes.
            batch, rows = self._read_at(np.zeros(1, np.int64), num_rows)
            batch, rows = batch.transform(lambda array: array[:0]), rows[:0]
            self._is_unreadable = self._is_unreadable[:0]
        batch = self._finished(batch, rows)
        self._rows_done += self.global_batch_size
        return batch

    def _read_at(self, positions: np.ndarray, num_rows: int | None) -> tuple[NestedMap, np.ndarray]:
        """Return the rows at positions of the stream of all epochs, and their numbers."""
        rows = self._rows_at(positions, num_rows)
        return self._read_rows(rows), rows

    def _finished(self, batch: NestedMap, rows: np.ndarray) -> NestedMap:
        """Return a full batch with padding and, outside of training, with `provenance`.

        Outside of training, rows that could not be read become padding.
        """
        if not self.is_training:
            most = int(rows.max(initial=0))
            require(most < 2**31, self._label, "row", most, "a number below 2**31")
            batch.provenance = rows.astype(np.int32)
            batch.eval_sample_weights = np.ones(len(rows), np.float32)
        batch = pad_rows(batch, self.local_batch_size - len(rows), copy=False)
        if self.is_training or not self._is_unreadable.any():
            return batch
        is_blank = np.zeros(self.local_batch_size, bool)
        is_blank[: len(rows)] = self._is_unreadable
        return blank_rows(batch, is_blank)

    def _rows_at(self, positions: np.ndarray, num_rows: int | None) -> np.ndarray:
        """Return the row numbers at these positions of the stream of all epochs."""
        if num_rows is None:
            return positions
        epochs, within = np.divmod(positions, num_rows)
        if not self.shuffle or not len(positions):
            return within
        first, last = int(epochs.min()), int(epochs.max())
        # Orders of past epochs are deleted.
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
        return {"num_rows": self._num_rows(), **order, **self._cached_fingerprint}

    def _reader_state(self) -> dict[str, Any]:
        return {"rows_done": self._rows_done, "data": self._identity()}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        # What identifies the data may depend on the rows that are done.
        self._rows_done = operator.index(position["rows_done"])
        check_same_data(self._label, position["data"], self._identity())
