"""Arithmetic that the Pallas kernels of attention on GPUs and on TPUs have in common."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def zero_masked(allowed: jax.Array | None, x: jax.Array) -> jax.Array:
    """Return `x` `[...]` with 0 where `allowed`, the mask of a block, hides it; None hides nothing.

    A query that sees no key so far would hold exp(0) everywhere.
    """
    return x if allowed is None else jnp.where(allowed, x, 0.0)


def gradient_before_cap(
    change: jax.Array, logits: jax.Array, allowed: jax.Array | None, *, logit_cap: float | None
) -> jax.Array:
    """Return the gradient of a block of logits `[...]` before tanh bounds them.

    Args:
      change: Gradient of the capped logits.
      logits: Capped and masked logits.
      allowed: Mask of the allowed pairs; None for all.
      logit_cap: Bound of the logits; None for no bound.
    """
    if logit_cap is None:
        return change
    # The weight of a masked logit, which is far outside the cap, is 0.
    return zero_masked(allowed, change * (1.0 - jnp.square(logits / logit_cap)))


def unmasked_cost(inputs: Any, *, multiply_adds: int) -> pl.CostEstimate:
    """Return the cost of a kernel without a mask, as for array code. Callers account for the mask.

    Args:
      inputs: Arrays that the kernel reads, the queries first.
      multiply_adds: Number of multiplications of the products without a mask.
    """
    return pl.CostEstimate(
        flops=2 * multiply_adds,
        transcendentals=multiply_adds // inputs[0].shape[-1],
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(inputs)),
    )
