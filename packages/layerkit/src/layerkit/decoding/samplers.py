"""Choosing the next token from logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_keys(key: jax.Array, row_ids: jax.Array) -> jax.Array:
    """A random key for each row: `fold_in(key, row_id)`.

    What is drawn for a row then depends on its own number alone, and not on the rows around it.

    Args:
      key: Random key, a scalar.
      row_ids: int32 `[rows]`.

    Returns:
      Keys `[rows]`.
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row_ids)


def sample_token(logits: jax.Array, keys: jax.Array | None) -> jax.Array:
    """Draws one token per row from softmax(logits).

    The largest of the logits, with Gumbel noise added to them, is such a draw (Gumbel, 1954).

    Args:
      logits: float32 `[rows, vocab]`; -inf is never drawn where there is anything else.
      keys: Random keys `[rows]`; None takes the most likely token instead.

    Returns:
      int32 `[rows]`.
    """
    if keys is not None:
        draw_noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))
        logits = logits + draw_noise(keys)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
