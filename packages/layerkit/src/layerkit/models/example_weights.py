"""How much each example of a batch counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.nested_map import NestedMap


def example_weights(batch: NestedMap, num_examples: int) -> jax.Array:
    """Weights float32 `[num_examples]`: 1, times what the batch says of its examples.

    Args:
      batch: `weights` and `eval_sample_weights`, each `[num_examples]` or left out. The second is
        what inputs give in evaluation: 0 for rows that only fill up the last batch.
      num_examples: Rows of the batch.
    """
    total = jnp.ones(num_examples, jnp.float32)
    for name in ("weights", "eval_sample_weights"):
        if name in batch:
            total = total * batch[name].astype(jnp.float32)
    return total
