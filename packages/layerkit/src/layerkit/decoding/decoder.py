"""Decoder: what every way of continuing prompts shares.

A decoder knows nothing of models. It is given a cache and a function that feeds the next tokens of
all rows, and so serves decoder-only models and encoder-decoders alike. Prompts are left-aligned, so
a column of the batch is a position of every row, and all rows share one time step:

    prompts fill the cache in one go
    for each column from the end of the shortest prompt on:
        feed the tokens of the column before
        a row that is still in its prompt takes the prompt's token, any other one chooses

What the first pass wrote beyond a row's own prompt is overwritten before any query can see it, so a
cache must hold a slot per position and take tokens for slots that are already filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from layerkit.decoding.configured_value import ConfiguredValue
from layerkit.decoding.logit_processors import LogitProcessor, MinSteps
from layerkit.nested_map import NestedMap

ExtendFn = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]
"""`(cache, ids [rows, t], time_step) -> (cache, logits [rows, t, vocab])`; `time_step`, an int32
scalar, is the column of the first of the ids."""


class Prompts(NamedTuple):
    """Prompts in rows with room for what follows.

    Attributes:
      ids: int32 `[batch, max_length]`, zeros behind each prompt.
      lengths: int32 `[batch]`; 0 for a row that only fills up the batch.
      limits: int32 `[batch]`, the length at which a row must end.
    """

    ids: jax.Array
    lengths: jax.Array
    limits: jax.Array

    @property
    def start(self) -> jax.Array:
        """The first column that any row chooses, an int32 scalar."""
        return jnp.min(jnp.where(self.lengths == 0, self.ids.shape[1], self.lengths))


class Decoder(ConfiguredValue):
    """How prompts are continued.

    Attributes:
      max_decode_steps: Tokens that a row may get beyond its prompt.
      min_decode_steps: Tokens that it must get before one may end it.
      eos_id: A row ends with this token, or with any of several, which is kept; None never ends
        early.
      processors: What is done to the logits first, in this order; see
        `layerkit.decoding.logit_processors`.

    Raises:
      ValueError: no steps at all, more at least than at most, or ids below 0.
      TypeError: processors that are not `LogitProcessor`s.
    """

    max_decode_steps: int = 64
    min_decode_steps: int = 0
    eos_id: int | tuple[int, ...] | None = None
    processors: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_decode_steps < 1:
            raise ValueError(f"max_decode_steps={self.max_decode_steps} must be at least 1")
        if not 0 <= self.min_decode_steps <= self.max_decode_steps:
            raise ValueError(
                f"min_decode_steps={self.min_decode_steps} must be between 0 and"
                f" max_decode_steps={self.max_decode_steps}"
            )
        if any(token < 0 for token in self.eos_ids):
            raise ValueError(f"eos_id={self.eos_id} must not be negative")
        for processor in self.processors:
            if not isinstance(processor, LogitProcessor):
                raise TypeError(
                    f"processors: {processor!r} is not a LogitProcessor, such as"
                    " NoRepeatNgrams(size=3)"
                )

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """`eos_id` as a tuple."""
        if self.eos_id is None:
            return ()
        return self.eos_id if isinstance(self.eos_id, tuple) else (self.eos_id,)

    @property
    def needs_key(self) -> bool:
        """Whether random numbers are drawn."""
        return False

    def all_processors(self) -> tuple[LogitProcessor, ...]:
        """`processors`, then those that the other fields ask for."""
        if not (self.min_decode_steps and self.eos_ids):
            return self.processors
        minimum = MinSteps(num_steps=self.min_decode_steps, eos_ids=self.eos_ids)
        return (*self.processors, minimum)

    def continue_rows(
        self,
        extend: ExtendFn,
        cache: Any,
        prompts: Prompts,
        *,
        cache_axes: Any,
        keys: jax.Array | None,
    ) -> NestedMap:
        """Continues rows whose prompts `[batch, max_length]` are in the cache already.

        Args:
          extend: Feeds tokens.
          cache: Filled up to the width of the prompts.
          prompts: What it was filled with.
          cache_axes: Where the rows of the cache are; see `row_axes`.
          keys: Random keys `[batch]`; None if nothing is drawn.

        Returns:
          See `extend_prompts`, which is what people call.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not define continue_rows")


def best_first(candidates: NestedMap) -> NestedMap:
    """What a decoder returns, from several continuations of each prompt.

    Args:
      candidates: `ids` and `log_probs` `[batch, n, max_length]`, `lengths` and `scores`
        `[batch, n]`, in any order.

    Returns:
      Those of the best score `[batch, …]`, and all of them, best first, as `candidates`; these are
      left out where there is just one.
    """
    order = jnp.argsort(candidates.scores, axis=1, descending=True, stable=True)
    pick = jax.vmap(lambda x, order: jnp.take(x, order, axis=0))
    ordered = NestedMap({name: pick(value, order) for name, value in candidates.items()})
    best = NestedMap({name: value[:, 0] for name, value in ordered.items()})
    if order.shape[1] > 1:
        best.candidates = ordered
    return best
