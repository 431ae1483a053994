"""Smooth bounds of logits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from layerkit.ops.remat import save_slopes


def soft_cap(logits: jax.Array, cap: float | None) -> jax.Array:
    """Bound logits to ±cap by cap·tanh(logits/cap), which is near the identity for small logits.

    Source: Bello et al., 2016 (arXiv:1611.09940); as in Gemma 2 (arXiv:2408.00118).

    Args:
      logits: `[...]`, of any shape.
      cap: Bound of the logits; None returns them unchanged.

    Raises:
      ConfigError: The cap is not positive.
    """
    if cap is None:
        return logits
    # Logits are the largest arrays: XLA may compute the slopes again.
    return save_slopes(functools.partial(_capped, cap=cap), logits, has_policy=True)


def _capped(logits: jax.Array, *, cap: float) -> jax.Array:
    return cap * jnp.tanh(logits / cap)
