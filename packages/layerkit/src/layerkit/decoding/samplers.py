"""Choosing the next token from logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sample_token(logits: jax.Array, key: jax.Array, *, temperature: float) -> jax.Array:
    """Draws one token per row.

    Adds Gumbel noise times the temperature to the logits and takes the largest, which draws from
    softmax(logits / temperature); temperature 0 is greedy.

    Args:
      logits: float32 `[batch, vocab]`.
      key: For the noise; not used at temperature 0.
      temperature: Not negative.

    Returns:
      int32 `[batch]`.

    Raises:
      ValueError: a negative temperature.
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must not be negative (0 is greedy)")
    if temperature > 0:
        logits = logits + temperature * jax.random.gumbel(key, logits.shape, logits.dtype)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
