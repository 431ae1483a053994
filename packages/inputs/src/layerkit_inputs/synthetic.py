"""SyntheticInput: made-up rows of tokens, to measure speed and to watch a model learn something.

Learnable text walks a cycle through the whole vocabulary, drawn by the seed: each token has one
successor, and now and then (`noise`) the next token is a random one. A model that has learned the
cycle reaches the entropy of that chain, which `baselines` states. Each row has a stretch of its own
of a random stream that can be entered anywhere, so any row can be made anywhere, those that follow
one another are drawn at once, and the rows of training and evaluation never coincide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.indexed_input import IndexedInput

# Streams of a seed.
_TRAINING_ROWS, _EVAL_ROWS, _CYCLE = range(3)


def _bits(seed: int, stream: int) -> np.random.PCG64DXSM:
    """The generator of a stream, which can advance by any number of words at once."""
    return np.random.PCG64DXSM(np.random.SeedSequence([seed, stream]))


class SyntheticInput(IndexedInput):
    """Rows of random tokens with the fields of LocalText; nothing is padded but a last batch."""

    vocab_size: int = 32_000
    """Tokens are in `[0, vocab_size)`."""
    seq_length: int = 1024
    """Positions of a row."""
    num_examples: int | None = None
    """Rows of an epoch. None: no end; an evaluation of one epoch needs a number."""
    learnable: bool = True
    """Walk a fixed cycle; False: every token is drawn alone and nothing can be learned."""
    noise: float = 0.1
    """How often a learnable row's next token is a random one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < 2 or self.seq_length < 1:
            raise self._config_error(
                f"vocab_size={self.vocab_size}, seq_length={self.seq_length}; expected at least 2 "
                "tokens and 1 position."
            )
        if not 0 <= self.noise <= 1:
            raise self._config_error(f"noise={self.noise}; expected a probability.")
        if self.num_examples is None and not self.endless:
            raise self._config_error("num_examples is not set; one epoch needs a number of rows.")
        self._check_at_least(1, "num_examples")
        self._bits_of_rows = _bits(self._seed, _TRAINING_ROWS if self.is_training else _EVAL_ROWS)
        self._first_state = self._bits_of_rows.state

    def _num_rows(self) -> int | None:
        return self.num_examples

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
        """Tokens of rows by number: int32 `[rows, length + 1]`."""
        words = self._words(rows)
        if not self.learnable:
            return self._drawn(words).astype(np.int32)
        # The lower half of a word says whether a token is drawn, the upper half which one.
        is_drawn = words.astype(np.uint32) < round(self.noise * 2**32)
        is_drawn[:, 0] = True
        draws = np.flatnonzero(is_drawn)
        # Where each draw puts a row on the cycle; from there it takes one step a token.
        starts = self._drawn(words.reshape(-1)[draws]).astype(np.int64) - draws
        places = np.repeat(starts, np.diff(draws, append=words.size))
        places += np.arange(words.size)
        return self._cycle[places].reshape(words.shape)

    def _words(self, rows: np.ndarray) -> np.ndarray:
        """The random words of rows: uint64 `[rows, length + 1]`."""
        width = self.seq_length + 1
        begins = np.append(0, np.flatnonzero(np.diff(rows) != 1) + 1)
        ends = np.append(begins[1:], len(rows))
        parts = []
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            # Rows that follow one another.
            self._bits_of_rows.state = self._first_state
            self._bits_of_rows.advance(int(rows[begin]) * width)
            parts.append(self._bits_of_rows.random_raw((end - begin) * width))
        words = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return words.reshape(len(rows), width)

    def _drawn(self, words: np.ndarray) -> np.ndarray:
        """The tokens that words stand for, uint64: their upper halves as fractions."""
        half = np.uint64(32)
        return (words >> half) * np.uint64(self.vocab_size) >> half

    @functools.cached_property
    def _cycle(self) -> np.ndarray:
        """int32: the cycle, and as much of it again as a row may go on from its last place."""
        order = np.random.Generator(_bits(self._seed, _CYCLE)).permutation(self.vocab_size)
        return np.resize(order.astype(np.int32), self.vocab_size + self.seq_length)

    def _fingerprint(self) -> dict[str, Any]:
        fields = ("vocab_size", "seq_length", "learnable", "noise", "is_training")
        values = {field: getattr(self, field) for field in fields}
        return {**values, "seed": self._seed}

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """The numbers themselves: there are no words."""
        return [" ".join(str(int(i)) for i in row[:n]) for row, n in zip(ids, lengths, strict=True)]

    def baselines(self) -> dict[str, float]:
        """The loss that nothing can beat: the entropy of the next token, in nats per token."""
        size = self.vocab_size
        if not self.learnable:
            return {"entropy of the source": math.log(size)}
        other = self.noise / size
        successor = 1 - self.noise + other
        entropy = -successor * math.log(successor)
        if other:
            entropy -= (size - 1) * other * math.log(other)
        return {"entropy of the source": entropy}
