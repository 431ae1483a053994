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


def overlapping_blocks(
    segments: jax.Array, others: jax.Array, *, blocks: tuple[int, int]
) -> jax.Array:
    """Return which blocks of a row share a segment with each block of another row.

    A block counts if the ranges of segment ids overlap, which includes each block with an equal id.
    In packed rows the ids ascend, and these are the blocks of the same documents.

    Args:
      segments: Segment ids, int32 `[batch, length]`.
      others: Segment ids of the row whose blocks are returned, int32 `[batch, other_length]`.
      blocks: Sizes of the blocks of `segments` and of `others`, divisors of the lengths.

    Returns:
      int32 `[batch, length / block, 2]`: the first and last (exclusive) block of `others`.
    """
    (smallest, largest), (other_smallest, other_largest) = (
        (x.reshape(len(x), -1, block).min(-1), x.reshape(len(x), -1, block).max(-1))
        for x, block in zip((segments, others), blocks, strict=True)
    )
    overlaps = (smallest[..., None] <= other_largest[:, None]) & (
        other_smallest[:, None] <= largest[..., None]
    )
    count = overlaps.shape[-1]
    first = jnp.argmax(overlaps, axis=-1)
    last = jnp.where(overlaps.any(-1), count - jnp.argmax(overlaps[..., ::-1], axis=-1), first)
    return jnp.stack([first, last], axis=-1).astype(jnp.int32)


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
