"""A table of trigrams: what a model must beat to have learned more than three-letter habits.

Interpolated Witten-Bell smoothing (Witten and Bell, 1991; the recursive form of Chen and Goodman,
1999): with n(h, c) how often symbol c followed context h, n(h) the sum over c and T(h) the number
of different c,

    p(c | h) = (n(h, c) + T(h) * p(c | h')) / (n(h) + T(h)),

h' being h without its oldest symbol, and below the empty context the uniform distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_NUM_OUTPUTS = 257  # the bytes and the end of a document
_END = 256
_BEGIN = 257  # stands before a document, twice; is never predicted
_BASE = 258


def trigram_loss(train: Sequence[bytes], heldout: Sequence[bytes]) -> float:
    """Mean loss on `heldout` of a trigram table of `train`, in nats per byte.

    Every byte of a document is predicted from the two before it, and so is the document's end.

    Args:
      train: Documents to count.
      heldout: Documents to predict; together at least one.
    """
    contexts, symbols = _trigrams(train)
    heldout_contexts, heldout_symbols = _trigrams(heldout)
    probability = np.full(len(heldout_symbols), 1.0 / _NUM_OUTPUTS)
    for kept in (1, _BASE, _BASE * _BASE):  # contexts of 0, 1 and 2 symbols
        probability = _interpolate(
            contexts % kept, symbols, heldout_contexts % kept, heldout_symbols, probability
        )
    return float(-np.log(probability).mean())


def _trigrams(documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Contexts (`older * _BASE + newer`) and the symbols that follow; int32 `[symbols]` each."""
    sizes = np.array([len(document) for document in documents], np.int64)
    ends = np.cumsum(sizes + 3)
    stream = np.full(int(ends[-1]), _BEGIN, np.int32)
    for document, end in zip(documents, ends, strict=True):
        stream[end - 1 - len(document) : end - 1] = np.frombuffer(document, np.uint8)
    stream[ends - 1] = _END
    at = np.flatnonzero(stream != _BEGIN)
    return stream[at - 2] * _BASE + stream[at - 1], stream[at]


def _interpolate(
    contexts: np.ndarray,
    symbols: np.ndarray,
    at_contexts: np.ndarray,
    at_symbols: np.ndarray,
    lower: np.ndarray,
) -> np.ndarray:
    """p(symbol | context) at the given places, from counts and a shorter context's p (`lower`)."""
    pairs, pair_counts = np.unique(contexts * _BASE + symbols, return_counts=True)
    owners = pairs // _BASE
    seen, starts, kinds = np.unique(owners, return_index=True, return_counts=True)
    totals = np.add.reduceat(pair_counts, starts)
    n_pair = _look_up(pairs, pair_counts, at_contexts * _BASE + at_symbols)
    n_context = _look_up(seen, totals, at_contexts)
    n_kinds = _look_up(seen, kinds, at_contexts)
    # A context that never occurred says nothing: the shorter one's p stays.
    n_kinds = np.where(n_context == 0, 1, n_kinds)
    return (n_pair + n_kinds * lower) / (n_context + n_kinds)


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """`values` at the `wanted` among sorted `keys`; 0 where a key is not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
