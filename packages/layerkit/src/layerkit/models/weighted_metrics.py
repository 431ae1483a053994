"""Weights of the examples of a batch and of their tokens, and metrics weighted by them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base.base_model import Metrics, WeightedScalar
from layerkit.config.nested_map import NestedMap
from layerkit.ops.losses.softmax import weighted_mean


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


def token_metrics(predictions: NestedMap, weights: jax.Array) -> tuple[Metrics, NestedMap]:
    """Compute the results of `BaseModel.compute_loss` from the outputs of a softmax.

    Args:
      predictions: Outputs of `FullSoftmax.fprop`.
      weights: Token weights `[batch, length]`; 0 excludes a token.

    Returns:
      Metrics `loss` (with label smoothing and the like), `xent` (cross-entropy in nats) and
      `accuracy`; and the outputs `per_token_xent` float32 `[batch, length]`, `scores` float32
      `[batch]` (see `row_scores`), and `exact_match` float32 `[batch]`, which is 1 if a row has
      weighted tokens and the model ranks the label of each of them first, and 0 otherwise.
    """
    weight = predictions.total_weight
    accuracy = weighted_mean(predictions.correct.astype(jnp.float32), weights)
    metrics = {
        "loss": WeightedScalar.of(predictions.loss, weight),
        "xent": WeightedScalar.of(predictions.xent, weight),
        "accuracy": WeightedScalar.of(accuracy, weight),
    }
    per_token_xent = predictions.per_token_xent
    scores = row_scores(per_token_xent, weights)
    counts = weights > 0
    is_right = jnp.all(predictions.correct | ~counts, axis=-1) & jnp.any(counts, axis=-1)
    return metrics, NestedMap(
        per_token_xent=per_token_xent, scores=scores, exact_match=is_right.astype(jnp.float32)
    )


def row_scores(per_token_xent: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the log-probability of each row's labels in nats, summed with the weights.

    Args:
      per_token_xent: −log p(label), `[batch, length]`.
      weights: Token weights `[batch, length]`.

    Returns:
      Scores float32 `[batch]`; 0 for a row without weighted tokens.
    """
    weights = weights.astype(jnp.float32)
    # Labels of weight 0 may be invalid, and 0 · NaN is NaN.
    return -jnp.sum(jnp.where(weights > 0, per_token_xent, 0.0) * weights, axis=-1)
