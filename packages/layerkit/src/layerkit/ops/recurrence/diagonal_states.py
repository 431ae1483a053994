"""Linear recurrences with a diagonal transition, by an associative scan over the tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.ops.recurrence.linear_attention import document_starts


def diagonal_states(
    inputs: jax.Array,
    transition: jax.Array,
    *,
    state: jax.Array,
    segments: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the states s_t = transition · s_{t-1} + inputs_t of all tokens, and the last one.

    Args:
      inputs: complex64 `[batch, length, …]`.
      transition: complex64 `[…]`.
      state: State before the first token, complex64 `[batch, …]`.
      segments: Number of each token's document, int32 `[batch, length]`; 0 is padding, which leaves
        the state as it is. Documents after the first start at 0. None for one document.

    Returns:
      (states `[batch, length, …]`, state after the last token `[batch, …]`).
    """
    factors = jnp.broadcast_to(transition, inputs.shape)
    if segments is not None:
        starts = document_starts(segments)
        is_token, starts = (
            x.reshape(*x.shape, *[1] * (inputs.ndim - 2)) for x in (segments > 0, starts)
        )
        factors = jnp.where(is_token, jnp.where(starts, 0, factors), 1)
        inputs = jnp.where(is_token, inputs, 0)

    def combine(
        first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return second[0] * first[0], second[0] * first[1] + second[1]

    products, sums = jax.lax.associative_scan(combine, (factors, inputs), axis=1)
    states = products * state[:, None] + sums
    return states, states[:, -1]
