"""Choosing the next token from logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sample_token(logits: jax.Array, key: jax.Array | None, *, temperature: float) -> jax.Array:
    """Draws one token per row.

    Adds Gumbel noise times the temperature to the logits and takes the largest, which draws from
    softmax(logits / temperature); temperature 0 is greedy.

    Args:
      logits: float32 `[batch, vocab]`.
      key: For the noise; None only at temperature 0.
      temperature: Not negative.

    Returns:
      int32 `[batch]`.

    Raises:
      ValueError: a negative temperature, or noise without a key.
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must not be negative (0 is greedy)")
    if temperature > 0:
        if key is None:
            raise ValueError(f"temperature={temperature} needs a random key (only 0 needs none)")
        logits = logits + temperature * jax.random.gumbel(key, logits.shape, logits.dtype)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
