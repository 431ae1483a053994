"""SyntheticInput: made-up rows of tokens, to measure speed and to watch a model learn something.

Learnable text walks a cycle through the whole vocabulary, drawn by the seed: each token has one
successor, and now and then (`noise`) the next token is a random one. A model that has learned the
cycle reaches the entropy of that chain, which `baselines` states. Each row is drawn from its own
number, so any row can be made anywhere, and the rows of training and evaluation never coincide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.indexed_input import IndexedInput

# Streams of the generator, beside the numbers of training rows.
_EVAL_ROWS = 1 << 62
_CYCLE = 1 << 63


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))


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
            raise self._refuse(
                f"vocab_size={self.vocab_size}, seq_length={self.seq_length}; expected at least 2 "
                "tokens and 1 position."
            )
        if not 0 <= self.noise <= 1:
            raise self._refuse(f"noise={self.noise}; expected a probability.")
        if self.num_examples is None and not self.endless:
            raise self._refuse("num_examples is not set; one epoch needs a number of rows.")
        if self.num_examples is not None and self.num_examples < 1:
            raise self._refuse(f"num_examples={self.num_examples}; expected at least 1.")
        self._cycle: np.ndarray | None = None

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
        """Tokens int32 `[rows, length + 1]` of rows by number, each from a generator of its own."""
        shape = (len(rows), self.seq_length + 1)
        drawn, chance = np.empty(shape, np.int32), np.empty(shape, np.float32)
        first_stream = 0 if self.is_training else _EVAL_ROWS
        generator = _generator(self._seed, first_stream)
        state = generator.bit_generator.state
        for place, row in enumerate(rows.tolist()):
            # As a new generator with this key, which would take five times as long to make.
            state["state"]["key"][1] = row + first_stream
            generator.bit_generator.state = state
            drawn[place] = generator.integers(self.vocab_size, size=shape[1], dtype=np.int32)
            if self.learnable:
                generator.random(out=chance[place], dtype=np.float32)
        if not self.learnable:
            return drawn
        # Where on the cycle: one step on each time, or, at a draw, as many as were drawn.
        is_drawn = chance < self.noise
        is_drawn[:, 0] = True
        steps = np.where(is_drawn, drawn, 1)
        if self._cycle is None:
            order = _generator(self._seed, _CYCLE).permutation(self.vocab_size)
            self._cycle = order.astype(np.int32)
        return self._cycle[np.cumsum(steps, axis=1, dtype=np.int64) % self.vocab_size]

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
