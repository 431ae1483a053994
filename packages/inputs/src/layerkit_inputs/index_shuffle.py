"""Orders of rows that are computed place by place: any number of rows, any place, no memory.

A permutation of n rows drawn whole costs 8 bytes a row. Here the row at a place is computed from
the place, by a Feistel network: one half of its bits is changed by a hash of the other half and a
key, in turns. Every turn can be undone, so no two places give the same row. That permutes the next
power of two; what falls outside of the n rows is put in again until it is inside (cycle walking),
less than twice on average. The construction is that of Black and Rogaway (2002), "Ciphers with
Arbitrary Finite Domains"; here it shuffles and hides nothing.

Two orders are made of it. In `shuffled_rows` any row may come at any place. In
`window_shuffled_rows` rows that are stored together come together: stretches of consecutive rows in
shuffled order, and the rows of each in shuffled order, so that a disk reads one stretch at a time.
"""

from __future__ import annotations

import numpy as np

# As many rounds, and for small sizes as many bits, as it takes for no chi-square test of places,
# neighbours and whole orders to tell the orders of many epochs from random ones.
_NUM_ROUNDS = 8
_LEAST_BITS = 6
_MOST_ROWS = 2**62
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def shuffled_rows(places: np.ndarray, num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """The rows at some places of an epoch's order.

    Args:
      places: int `[places]`, each in `[0, num_rows)`.
      num_rows: Rows of the epoch, at most 2**62.
      seed: In `[0, 2**64)`.
      epoch: In `[0, 2**64)`; every seed and epoch have an order of their own.

    Returns:
      int64 `[places]`; over all places each row exactly once.

    Raises:
      ValueError: a place outside of the epoch.
    """
    places = _checked_places(places, num_rows)
    return _permuted(places, num_rows, _random_keys(seed, epoch)[:_NUM_ROUNDS, None])


def window_shuffled_rows(
    places: np.ndarray, num_rows: int, *, window: int, seed: int, epoch: int
) -> np.ndarray:
    """As `shuffled_rows`, but the rows of a window come one after the other.

    An epoch's windows begin at a row of its own, so they are others each time; the rows that are
    left over, fewer than a window, come last.

    Args:
      places: int `[places]`, each in `[0, num_rows)`.
      num_rows: Rows of the epoch, at most 2**62.
      window: How many consecutive rows are shuffled among each other, at least 1. The last row is
        followed by the first.
      seed: In `[0, 2**64)`.
      epoch: In `[0, 2**64)`.

    Returns:
      int64 `[places]`; over all places each row exactly once.

    Raises:
      ValueError: a place outside of the epoch, or a window below 1.
    """
    places = _checked_places(places, num_rows)
    if window < 1:
        raise ValueError(f"window={window}; expected at least 1.")
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
        # Each window has keys of its own.
        own_keys = _mixed(row_keys[:, None] + (number.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        rows[here] = number * window + _permuted(within[here], size, own_keys)
    return (rows + first_row) % num_rows


def _checked_places(places: np.ndarray, num_rows: int) -> np.ndarray:
    places = np.asarray(places, np.int64)
    if num_rows > _MOST_ROWS:
        raise ValueError(f"num_rows={num_rows}; expected at most 2**62.")
    if places.size and not 0 <= places.min() <= places.max() < num_rows:
        raise ValueError(
            f"places from {places.min()} to {places.max()} of an epoch of {num_rows} rows."
        )
    return places


def _random_keys(seed: int, epoch: int) -> np.ndarray:
    """uint64 `[keys]`: one for each round over rows and over windows, and one more."""
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return generator.random_raw(2 * _NUM_ROUNDS + 1)


def _permuted(places: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of `[0, size)` at `places`; `keys` are uint64 `[rounds, places or 1]`."""
    bits = max((size - 1).bit_length(), _LEAST_BITS)
    keys = np.broadcast_to(keys, (len(keys), len(places)))
    values = _network(places.astype(np.uint64), bits, keys)
    while (outside := values >= size).any():
        values[outside] = _network(values[outside], bits, keys[:, outside])
    return values.astype(np.int64)


def _network(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of `[0, 2**bits)`: each round changes one half by a hash of the other."""
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
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each bit reaches all others."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
