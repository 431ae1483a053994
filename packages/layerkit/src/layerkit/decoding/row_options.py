"""Sampling options that differ between the rows of a batch.

A service decodes requests with different options in one batch. `SampleDecoder` runs the processor
of an option for each row with the row's own value, in the place of its field's processor.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from layerkit.decoding.logit_processors import (
    LogitProcessor,
    RowsSoFar,
    keep_above,
    keep_top_p,
)


class RowOptions(NamedTuple):
    """Options of the rows, each of which replaces the field of that name of a `SampleDecoder`.

    Attributes:
      temperature: Divisor of the logits, float32 `[batch]`; 0 chooses the most likely token. None
        for the field's value in all rows.
      top_k: Number of most likely tokens to sample from, int32 `[batch]`; 0 for all. None for the
        field's value in all rows.
      top_p: Total probability of the fewest most likely tokens to sample from, float32 `[batch]`;
        1 for all tokens. None for the field's value in all rows.
    """

    temperature: jax.Array | None = None
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None

    def names(self) -> tuple[str, ...]:
        """Return the names of the options that differ between rows."""
        return tuple(name for name, value in self._asdict().items() if value is not None)


class OptionOfRows(LogitProcessor):
    """A processor that applies an option with the value of each row.

    Attributes:
      option: `temperature`, `top_k` or `top_p`.
    """

    option: str = "temperature"

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Apply the option of each row to logits `[rows, vocab]`."""
        values = getattr(rows.options, self.option)[:, None]
        return _APPLY[self.option](logits, values)


def _divide(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    is_greedy = temperature <= 0
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=bool)
    divided = logits / jnp.where(is_greedy, 1.0, temperature)
    return jnp.where(is_greedy & ~best, -jnp.inf, divided)


def _keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    size = logits.shape[-1]
    last = jnp.where(k <= 0, size, jnp.minimum(k, size)) - 1
    descending = jnp.sort(logits, axis=-1, descending=True)
    return keep_above(logits, jnp.take_along_axis(descending, last, axis=-1))


def _keep_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    return jnp.where(p >= 1, logits, keep_top_p(logits, p))


_APPLY = {"temperature": _divide, "top_k": _keep_top_k, "top_p": _keep_top_p}
