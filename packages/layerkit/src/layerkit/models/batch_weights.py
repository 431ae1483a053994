"""Weights of the examples of a batch, and of their tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.config.nested_map import NestedMap


def example_weights(batch: NestedMap, num_examples: int) -> jax.Array:
    """Return weights float32 `[num_examples]`, the product of those that the batch has.

    Args:
      batch: Batch with optional entries `weights` and `eval_sample_weights`, each
        `[num_examples]`. Inputs set the second in evaluation: it is 0 for rows of padding.
      num_examples: Number of rows of the batch.

    Returns:
      Product of the entries, or 1 for each row if the batch has none.
    """
    total = jnp.ones(num_examples, jnp.float32)
    for name in ("weights", "eval_sample_weights"):
        if name in batch:
            total = total * batch[name].astype(jnp.float32)
    return total


def token_weights(weights: jax.Array, batch: NestedMap, *, apply: bool) -> jax.Array:
    """Return token weights `[batch, length]`, multiplied by those of the examples of an evaluation.

    Args:
      weights: Token weights `[batch, length]`.
      batch: Batch with the optional entry `eval_sample_weights` `[batch]`.
      apply: False to return `weights` unchanged.
    """
    if not apply or "eval_sample_weights" not in batch:
        return weights
    return weights * batch.eval_sample_weights.astype(weights.dtype)[:, None]
