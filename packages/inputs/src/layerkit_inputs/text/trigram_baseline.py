"""A trigram table, a baseline for language models of bytes.

Interpolated Witten-Bell smoothing (Witten and Bell, 1991; the recursive form of Chen and Goodman,
1999): let n(h, c) be the count of symbol c after context h, n(h) its sum over c, and T(h) the
number of different c. Then

    p(c | h) = (n(h, c) + T(h) * p(c | h')) / (n(h) + T(h)),

where h' is h without its oldest symbol. The recursion ends with the uniform distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

_NUM_OUTPUTS = 257  # the bytes and the end of a document
_END = 256
_BEGIN = 257  # precedes a document twice; is never predicted
_BASE = 258
_PIECE = 1 << 20


def trigram_loss(train: Iterable[bytes], heldout: Iterable[bytes]) -> float:
    """Return the mean loss on `heldout` of a trigram table of `train`, in nats per byte.

    Every byte and the end of a document are predicted from the two symbols before. The memory is
    under 200 MB for the table, plus one document.

    Args:
      train: Documents to count, below 2³¹ bytes in total.
      heldout: Documents to predict, at least one.
    """
    counts = np.zeros(_BASE**3, np.int32)
    for document in train:
        for keys in _trigrams(document):
            np.add.at(counts, keys, 1)
    orders = [_Order.of(counts, num_symbols=order) for order in (1, 2, 3)]
    loss, num_predictions = 0.0, 0
    for document in heldout:
        for keys in _trigrams(document):
            probability = np.full(len(keys), 1.0 / _NUM_OUTPUTS)
            for order in orders:
                probability = order.interpolate(keys, probability)
            loss -= np.log(probability).sum()
            num_predictions += len(keys)
    return float(loss / num_predictions)


def _trigrams(document: bytes) -> Iterator[np.ndarray]:
    """Yield `(oldest * _BASE + older) * _BASE + symbol` of all predictions, int32, in pieces."""
    data = np.frombuffer(document, np.uint8)
    before = np.full(2, _BEGIN, np.int32)
    for start in range(0, len(data) + 1, _PIECE):
        is_last = start + _PIECE > len(data)
        end = np.full(int(is_last), _END, np.int32)
        piece = np.concatenate([before, data[start : start + _PIECE], end], dtype=np.int32)
        yield (piece[:-2] * _BASE + piece[1:-1]) * _BASE + piece[2:]
        before = piece[-2:]


class _Order(NamedTuple):
    """Counts of one length of context."""

    pairs: np.ndarray
    """Counts n(h, c) at `h * _BASE + c`."""
    totals: np.ndarray
    """Counts n(h)."""
    kinds: np.ndarray
    """Counts T(h), or 1 for a context that never occurred, which gives the p of the shorter one."""

    @classmethod
    def of(cls, counts: np.ndarray, *, num_symbols: int) -> _Order:
        """Return the table of the last `num_symbols` of each trigram, context and symbol."""
        size = _BASE**num_symbols
        pairs = counts.reshape(-1, size).sum(0, dtype=np.int32) if num_symbols < 3 else counts
        table = pairs.reshape(-1, _BASE)
        return cls(pairs, table.sum(1), np.maximum(np.count_nonzero(table, axis=1), 1))

    def interpolate(self, keys: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Return p(symbol | context) of trigrams from the p of the shorter context."""
        pair = keys % len(self.pairs)
        kinds, total = self.kinds[pair // _BASE], self.totals[pair // _BASE]
        return (self.pairs[pair] + kinds * lower) / (total + kinds)
