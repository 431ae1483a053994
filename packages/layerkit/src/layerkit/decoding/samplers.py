"""Sampling of the next token from logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_keys(key: jax.Array, row_ids: jax.Array) -> jax.Array:
    """Return a random key for each row: `fold_in(key, row_id)`.

    The samples of a row then depend only on its id, not on the other rows of the batch.

    Args:
      key: Random key, a scalar.
      row_ids: Ids of the rows, int32 `[rows]`.

    Returns:
      Random keys `[rows]`.
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row_ids)


def sample_token(logits: jax.Array, keys: jax.Array | None) -> jax.Array:
    """Draw one token per row from softmax(logits).

    The index of the largest logit after adding Gumbel noise is such a draw (Gumbel, 1954).

    Args:
      logits: Logits float32 `[rows, vocab]`; -inf is never drawn unless all are -inf.
      keys: Random keys `[rows]`; None selects the most likely token instead.

    Returns:
      Token ids int32 `[rows]`.
    """
    if keys is not None:
        draw_noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))
        logits = logits + draw_noise(keys)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
