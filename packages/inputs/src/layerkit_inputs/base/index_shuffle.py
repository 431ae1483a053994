"""Permutations of rows whose elements are computed separately, without memory.

A permutation of n rows in memory takes 8 bytes a row. Here a Feistel network computes the row at a
place: each round changes one half of the bits by a hash of the other half and a key. Each round is
invertible, so no two places give the same row. The network permutes the next power of two. Results
outside of the n rows are put through the network again until they are inside (cycle walking), less
than twice on average. The construction is that of Black and Rogaway (2002), "Ciphers with Arbitrary
Finite Domains". It is used for shuffling only, not for encryption.

In the order of `shuffled_rows` any row may be at any place. In the order of `window_shuffled_rows`,
windows of consecutive rows are shuffled, and the rows within each window, so that a disk reads one
window at a time.
"""

from __future__ import annotations

import numpy as np

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
    rows, fewer than a window, are last.

    Args:
      places: int `[places]`, each in `[0, num_rows)`.
      num_rows: Rows of the epoch, at most 2**62.
      window: Number of consecutive rows of a window. The last row is followed by the first.
      seed: Integer in `[0, 2**64)`.
      epoch: Integer in `[0, 2**64)`.

    Returns:
      int64 `[places]`. All places together give each row exactly once.
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
