"""SyntheticInput, an input of random tokens for benchmarks and for tests of learning.

Learnable text follows a random cycle through the vocabulary, which depends on the seed: each token
has one successor. With the probability `noise`, the next token is random. A model that has learned
the cycle reaches the entropy of this chain, which `baselines` returns. Each row uses its own
stretch of a random stream with random access. So any row can be generated independently, and rows
of training and evaluation never coincide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.synthetic.generated_rows import GeneratedRows

_CYCLE = 2
"""Random stream of the cycle, beside those of `GeneratedRows`."""


def _bits(seed: int, stream: int) -> np.random.PCG64DXSM:
    """Return the generator of a stream. It can advance by any number of words at once."""
    return np.random.PCG64DXSM(np.random.SeedSequence([seed, stream]))


class SyntheticInput(GeneratedRows):
    """An input of random tokens with the fields of LocalText. Only a last batch has padding."""

    vocab_size: int = 32_000
    """Size of the vocabulary. Tokens are in `[0, vocab_size)`."""
    seq_length: int = 1024
    """Positions of a row."""
    learnable: bool = True
    """Whether tokens follow a fixed cycle. False: tokens are independent and cannot be learned."""
    noise: float = 0.1
    """Probability that the next token of a learnable row is random."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(2, "vocab_size")
        self._check_at_least(1, "seq_length")
        require(0 <= self.noise <= 1, self._label, "noise", self.noise, "a probability in [0, 1]")
        self._bits_of_rows = _bits(self._seed, self._stream)
        self._first_state = self._bits_of_rows.state

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        tokens = self._tokens(rows)
        shape = (len(rows), self.seq_length)
        positions = np.arange(self.seq_length, dtype=np.int32)
        return NestedMap(
            ids=tokens[:, :-1].copy(),
            labels=tokens[:, 1:].copy(),
            weights=np.ones(shape, np.float32),
            paddings=np.zeros(shape, np.float32),
            segment_ids=np.ones(shape, np.int32),
            segment_pos=np.tile(positions, (len(rows), 1)),
        )

    def _tokens(self, rows: np.ndarray) -> np.ndarray:
        """Return the tokens of rows by number, int32 `[rows, length + 1]`."""
        words = self._words(rows)
        if not self.learnable:
            return self._drawn(words).astype(np.int32)
        # The lower half of a word determines whether a token is random, the upper half its value.
        is_drawn = words.astype(np.uint32) < round(self.noise * 2**32)
        is_drawn[:, 0] = True
        draws = np.flatnonzero(is_drawn)
        # Each random token sets the place on the cycle, which advances by one a token.
        starts = self._drawn(words.reshape(-1)[draws]).astype(np.int64) - draws
        places = np.repeat(starts, np.diff(draws, append=words.size))
        places += np.arange(words.size)
        return self._cycle[places].reshape(words.shape)

    def _words(self, rows: np.ndarray) -> np.ndarray:
        """Return the random words of rows, uint64 `[rows, length + 1]`."""
        words = np.empty((len(rows), self.seq_length + 1), np.uint64)
        for place, row in enumerate(rows.tolist()):
            self._bits_of_rows.state = self._first_state
            self._bits_of_rows.advance(row * words.shape[1])
            words[place] = self._bits_of_rows.random_raw(words.shape[1])
        return words

    def _drawn(self, words: np.ndarray) -> np.ndarray:
        """Return tokens, uint64: the upper halves of words as fractions of the vocabulary."""
        half = np.uint64(32)
        return (words >> half) * np.uint64(self.vocab_size) >> half

    @functools.cached_property
    def _cycle(self) -> np.ndarray:
        """Return the cycle, extended by the length of a row, int32."""
        order = np.random.Generator(_bits(self._seed, _CYCLE)).permutation(self.vocab_size)
        return np.resize(order.astype(np.int32), self.vocab_size + self.seq_length)

    def _fingerprint(self) -> dict[str, Any]:
        fields = ("vocab_size", "seq_length", "learnable", "noise", "is_training")
        values = {field: getattr(self, field) for field in fields}
        return {**values, "seed": self._seed}

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Return the ids as numbers, since there is no vocabulary."""
        return [" ".join(str(int(i)) for i in row[:n]) for row, n in zip(ids, lengths, strict=True)]

    def baselines(self) -> dict[str, float]:
        """Return the lowest possible loss: the entropy of the next token, in nats per token."""
        size = self.vocab_size
        if not self.learnable:
            return {"entropy of the source": math.log(size)}
        other = self.noise / size
        successor = 1 - self.noise + other
        entropy = -successor * math.log(successor)
        if other:
            entropy -= (size - 1) * other * math.log(other)
        return {"entropy of the source": entropy}
