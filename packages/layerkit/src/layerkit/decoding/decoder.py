"""Decoder: the base class of decoders, which continue prompts.

A decoder does not depend on a model. It gets a cache and a function that runs the model on the next
tokens of all rows, so it serves decoder-only models and encoder-decoders. Prompts are left-aligned:
a column of the batch is the same position in all rows, and all rows share one time step.

    one pass over the prompts fills the cache
    for each column from the end of the shortest prompt on:
        run the model on the tokens of the previous column
        rows still in their prompt take the prompt's token, the others choose one

The first pass also writes cache slots beyond the prompt of a short row. They are overwritten before
any query attends to them. So a cache must have a slot per position and allow overwriting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from layerkit.config.checks import check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.logit_processors import ConfiguredValue, LogitProcessor, MinSteps, RowOptions

ExtendFn = Callable[..., tuple[Any, jax.Array]]
"""Function `(cache, ids [rows, t], time_step) -> (cache, logits [rows, t, vocab])`, where
`time_step`, an int32 scalar, is the column of the first ids. Of a decoder with `drafts` it also has
`method`, the method of the network."""


class Prompts(NamedTuple):
    """Prompts to continue.

    Attributes:
      ids: Left-aligned token ids int32 `[batch, width]`; ids after a row's length are ignored.
      lengths: Number of tokens of each prompt, int32 `[batch]`, at most `width`. A row of length 0
        is padding: no tokens are decoded for it, and it does not prolong the loop.
      key: Scalar random key; None if the decoder draws no random numbers. Each token is drawn with
        a key that folds in the row id, the sample index and the column. A row's tokens therefore
        do not depend on the other rows.
      row_ids: Row ids that are folded into the key, int32 `[batch]`; None for row indices.
      max_steps: Maximal number of decoded tokens of each row, int32 `[batch]`. Values are clipped
        to 0 … `max_decode_steps`. None for `max_decode_steps`.
      options: Sampling options that differ between rows, which only `SampleDecoder` supports.
    """

    ids: jax.Array
    lengths: jax.Array
    key: jax.Array | None = None
    row_ids: jax.Array | None = None
    max_steps: jax.Array | None = None
    options: RowOptions = RowOptions()


class PromptRows(NamedTuple):
    """Prompts in rows with space for continuations.

    Attributes:
      ids: Token ids int32 `[batch, max_length]`, 0 after each prompt.
      lengths: Number of tokens of each prompt, int32 `[batch]`; 0 for rows of padding.
      limits: Length at which a row must end, int32 `[batch]`.
      options: Sampling options that differ between rows.
      keys: Random keys `[batch]`; None if the decoder does not draw.
    """

    ids: jax.Array
    lengths: jax.Array
    limits: jax.Array
    options: RowOptions = RowOptions()
    keys: jax.Array | None = None

    @property
    def start(self) -> jax.Array:
        """First column in which any row chooses a token, an int32 scalar."""
        return jnp.min(jnp.where(self.lengths == 0, self.ids.shape[1], self.lengths))


class Decoder(ConfiguredValue):
    """Base class of decoders, which continue prompts.

    Attributes:
      row_options: Names of the `RowOptions` that the decoder supports.
      drafts: True if the decoder calls `draft_step` of the network.
      max_decode_steps: Largest number of tokens that a row gets beyond its prompt.
      max_length: Largest number of tokens of prompt and continuation; None for no such limit. A
        longer prompt gets no token.
      min_decode_steps: Number of tokens that a row gets before a token may end it.
      eos_id: End token, or several. A row ends with any of them and includes it. None for no end
        token.
      lazy_prefix_broadcast: True for continuations that read the keys and values of their prompt
        from one copy, which saves memory and time; False for a copy of the cache for each. See
        `layerkit.decoding.lazy_prefix_broadcast`.
      processors: Processors of the logits, in this order; see
        `layerkit.decoding.logit_processors`.

    Raises:
      ConfigError: A number of steps or an id is out of range, a decoder with drafts has
        `lazy_prefix_broadcast`, or an element of `processors` is not a `LogitProcessor`.
    """

    row_options: ClassVar[tuple[str, ...]] = ()
    drafts: ClassVar[bool] = False

    max_decode_steps: int = 64
    max_length: int | None = None
    min_decode_steps: int = 0
    eos_id: int | tuple[int, ...] | None = None
    lazy_prefix_broadcast: bool = False
    processors: Annotated[Any, tuple[LogitProcessor, ...]] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        owner = type(self).__qualname__
        check_sizes(owner, max_decode_steps=self.max_decode_steps, max_length=self.max_length)
        steps, expected = self.min_decode_steps, f"0 to max_decode_steps={self.max_decode_steps}"
        require(0 <= steps <= self.max_decode_steps, owner, "min_decode_steps", steps, expected)
        is_lazy, expected = self.lazy_prefix_broadcast, "False in a decoder with drafts"
        require(not (is_lazy and self.drafts), owner, "lazy_prefix_broadcast", is_lazy, expected)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """`eos_id` as a tuple."""
        if self.eos_id is None:
            return ()
        return self.eos_id if isinstance(self.eos_id, tuple) else (self.eos_id,)

    @property
    def needs_key(self) -> bool:
        """True if the decoder draws random numbers."""
        return False

    def row_length(self, width: int) -> int:
        """Return the number of columns of rows whose prompts have `width` columns."""
        length = width + self.max_decode_steps
        return length if self.max_length is None else max(width, min(length, self.max_length))

    def all_processors(self) -> tuple[LogitProcessor, ...]:
        """Return `processors`, then the processors of the other fields."""
        if not (self.min_decode_steps and self.eos_ids):
            return self.processors
        minimum = MinSteps(num_steps=self.min_decode_steps, eos_ids=self.eos_ids)
        return (*self.processors, minimum)

    def continue_rows(
        self, extend: ExtendFn, cache: Any, prompts: PromptRows, *, cache_axes: Any
    ) -> NestedMap:
        """Continue rows whose prompts `[batch, max_length]` are in the cache.

        `extend_prompts` calls this method.

        Args:
          extend: Function that runs the model on the next tokens.
          cache: Cache that is filled up to the width of the prompts.
          prompts: Prompts in the cache.
          cache_axes: Row axis of each array of the cache; see `row_axes`.

        Returns:
          Outputs of `extend_prompts` without `prompt_lengths`.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not define continue_rows")


def require_cache_axes(decoder: Decoder, cache_axes: Any) -> None:
    """Raise `ConfigError` if a decoder that repeats the rows of the cache lacks their axes."""
    owner, expected = type(decoder).__qualname__, "the row axes of the cache; see row_axes"
    require(cache_axes is not None, owner, "cache_axes", None, expected)


def best_first(candidates: NestedMap) -> NestedMap:
    """Sort the continuations of each prompt by score, as a decoder returns them.

    Args:
      candidates: `ids` and `log_probs` `[batch, n, max_length]`, `lengths` and `scores`
        `[batch, n]`, in any order.

    Returns:
      The continuations of the best score `[batch, …]`. If n > 1, the entry `candidates` has all of
      them, best first.
    """
    order = jnp.argsort(candidates.scores, axis=1, descending=True, stable=True)
    pick = jax.vmap(lambda x, order: jnp.take(x, order, axis=0))
    ordered = NestedMap({name: pick(value, order) for name, value in candidates.items()})
    best = NestedMap({name: value[:, 0] for name, value in ordered.items()})
    if order.shape[1] > 1:
        best.candidates = ordered
    return best
