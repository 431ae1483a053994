"""Softmax cross-entropy of logits, in nats and float32.

`cross_entropy` computes the loss of each token from its logits, and `weighted_mean` averages the
losses. `linear.py` calls them for chunks of hidden states, so that the logits of a
batch are never in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import zero_from_primal

from layerkit.config.checks import check_integer_arrays, check_same_shape, require


class TokenLosses(NamedTuple):
    """The losses of each token; every array has the shape of the labels.

    Attributes:
      xent: −log p(label), for reports; float32.
      z_loss: Part of `loss` that pulls log Z towards 0; float32.
      loss: Cross-entropy with smoothed labels plus `z_loss` and the entropy loss, for training;
        float32.
      correct: True where the label has the highest logit (the first of equal ones); bool.
    """

    xent: jax.Array
    z_loss: jax.Array
    loss: jax.Array
    correct: jax.Array


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    entropy_loss_weight: float = 0.0,
) -> TokenLosses:
    """Compute the softmax cross-entropy of each token.

    With z the logits, V classes, log Z = log Σ exp z, p = exp(z)/Z and ε = label_smoothing:

        xent    = log Z − z[label]
        z_loss  = z_loss_weight · (log Z)²
        entropy = entropy_loss_weight · Σ p·log p
        loss    = log Z − (1 − ε)·z[label] − ε·mean(z) + z_loss + entropy

    The smoothed target is 1 − ε + ε/V for the label and ε/V for all other classes (Szegedy et al.,
    2015, arXiv:1512.00567). The z-loss is that of PaLM, where its weight is 1e-4
    (arXiv:2204.02311).

    Args:
      logits: `[..., num_classes]`, converted to float32.
      labels: `[...]`, integers in [0, num_classes). The loss of any other label is NaN, which
        `weighted_mean` ignores if the weight is 0.
      label_smoothing: ε, the probability that is moved from the label to all classes; in [0, 1).
      z_loss_weight: Weight of the z-loss, at least 0.
      entropy_loss_weight: Weight of the negative entropy; above 0 it makes predictions less
        certain.

    Raises:
      ConfigError: The shapes differ, labels are not integers, or an option is out of range.
    """
    owner = "cross_entropy"
    shape, expected = list(labels.shape), list(logits.shape[:-1])
    require(shape == expected, owner, "shape of labels", shape, str(expected))
    check_integer_arrays(owner, labels=labels)
    logits = logits.astype(jnp.float32)
    labels = jnp.asarray(labels, jnp.int32)  # small integers cannot hold the number of classes
    in_range = (labels >= 0) & (labels < logits.shape[-1])
    log_z, label_logit, is_best = _row_statistics(logits, labels)

    xent = jnp.where(in_range, log_z - label_logit, jnp.nan)
    z_loss = z_loss_weight * jnp.square(log_z)
    loss = xent + z_loss
    if label_smoothing:
        loss += label_smoothing * (label_logit - jnp.mean(logits, axis=-1))
    loss += _entropy_loss(logits, log_z, weight=entropy_loss_weight)
    return TokenLosses(xent, z_loss, loss, is_best & ~jnp.isnan(xent))


@jax.custom_jvp
def _row_statistics(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log Z, the label's logit (0 if out of range), and whether it is the first highest.

    Args:
      logits: float32 `[..., num_classes]`.
      labels: Integers `[...]`.

    Returns:
      Three arrays `[...]`: float32, float32 and bool.
    """
    gpu = _statistics_in_one_pass
    results: tuple[jax.Array, jax.Array, jax.Array] = jax.lax.platform_dependent(
        logits, labels, cuda=gpu, rocm=gpu, default=_statistics_in_four_passes
    )
    return results


@_row_statistics.defjvp
def _row_statistics_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (logits, labels), logits_dot = primals, tangents[0]
    log_z, label_logit, is_best = _row_statistics(logits, labels)
    log_z_dot = jnp.sum(jnp.exp(logits - log_z[..., None]) * logits_dot, axis=-1)
    label_dot = jnp.sum(jnp.where(_is_label(logits, labels), logits_dot, 0.0), axis=-1)
    results = log_z, label_logit, is_best
    return results, (log_z_dot, label_dot, zero_from_primal(is_best))


def _statistics_in_four_passes(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `_row_statistics` by one reduction for each number, which is fast on CPUs."""
    label_logit = jnp.sum(jnp.where(_is_label(logits, labels), logits, 0.0), axis=-1)
    best, is_not_earlier = label_logit[..., None], _classes(logits) >= labels[..., None]
    is_best = jnp.all((logits < best) | ((logits == best) & is_not_earlier), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1), label_logit, is_best


def _statistics_in_one_pass(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `_row_statistics` by one reduction, since GPUs would read the logits four times.

    As in Milakov and Gimelshein, 2018 (arXiv:1805.02867), the sum of exp is relative to the highest
    logit so far.
    """

    def merge(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        (top, total, index, of_label), (other, other_total, other_index, other_label) = left, right
        is_left = top >= other
        ratio = jnp.exp(-jnp.abs(top - other))
        first = jnp.where(is_left, index, other_index)
        return (
            jnp.maximum(top, other),
            jnp.where(is_left, total + other_total * ratio, other_total + total * ratio),
            jnp.where(top == other, jnp.minimum(index, other_index), first),
            of_label + other_label,
        )

    # The first maximum is the lowest finite number, since -inf - (-inf) is NaN.
    low, largest = np.float32(np.finfo(np.float32).min), np.iinfo(np.int32).max
    highest, total, index, label_logit = jax.lax.reduce(
        (
            logits,
            jnp.ones_like(logits),
            _classes(logits),
            jnp.where(_is_label(logits, labels), logits, 0.0),
        ),
        (low, np.float32(0), np.int32(largest), np.float32(0)),
        merge,
        (logits.ndim - 1,),
    )
    return highest + jnp.log(total), label_logit, index == labels


def _is_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return whether each class is the label, bool `[..., num_classes]`.

    Unlike a gather by label, a comparison keeps the class axis sharded and fuses with reductions.
    """
    return _classes(logits) == labels[..., None]


def _classes(logits: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


def soft_cross_entropy(
    logits: jax.Array,
    class_probabilities: jax.Array,
    *,
    z_loss_weight: float = 0.0,
    entropy_loss_weight: float = 0.0,
) -> TokenLosses:
    """Compute the softmax cross-entropy of each token to a distribution over the classes.

    xent is −Σ q·log p, with q the given and p the predicted probabilities, as in distillation
    (Hinton et al., 2015, arXiv:1503.02531) and mixup. `correct` compares the most likely classes.

    Args:
      logits: `[..., num_classes]`, converted to float32.
      class_probabilities: Targets q, `[..., num_classes]`, without gradients.
      z_loss_weight: Weight of the z-loss; see `cross_entropy`.
      entropy_loss_weight: Weight of the negative entropy; see `cross_entropy`.

    Raises:
      ConfigError: The shapes differ, or an option is out of range.
    """
    owner = "soft_cross_entropy"
    check_same_shape(owner, logits, class_probabilities=class_probabilities)
    logits = logits.astype(jnp.float32)
    targets = jax.lax.stop_gradient(jnp.asarray(class_probabilities).astype(jnp.float32))
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A class of probability 0 counts 0, also if its logit is -inf.
    costs = jnp.where(targets > 0, log_z[..., None] - logits, 0.0)
    xent = jnp.sum(targets * costs, axis=-1)
    z_loss = z_loss_weight * jnp.square(log_z)
    loss = xent + z_loss + _entropy_loss(logits, log_z, weight=entropy_loss_weight)
    correct = jnp.argmax(logits, axis=-1) == jnp.argmax(targets, axis=-1)
    return TokenLosses(xent, z_loss, loss, correct)


def _entropy_loss(logits: jax.Array, log_z: jax.Array, *, weight: float) -> jax.Array:
    """Return weight·Σ p·log p of logits `[..., num_classes]` with log Z `[...]`."""
    if not weight:
        return jnp.zeros_like(log_z)
    log_probs = logits - log_z[..., None]
    # The limit of p·log p at 0 is 0.
    factors = jnp.where(jnp.isneginf(log_probs), 0.0, log_probs)
    return weight * jnp.sum(jnp.exp(log_probs) * factors, axis=-1)


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Compute Σ values·weights / Σ weights as a float32 scalar.

    The mean is 0, with finite gradients, if all weights are 0.

    Args:
      values: Array of any shape. Values with weight 0 are ignored, even NaN and infinity.
      weights: Array of the same shape, at least 0.

    Raises:
      ConfigError: The shapes differ.
    """
    check_same_shape("weighted_mean", values, weights=weights)
    weights = weights.astype(jnp.float32)
    counted = jnp.where(weights != 0, values.astype(jnp.float32), 0.0)
    total = jnp.sum(weights)
    return jnp.sum(counted * weights) / jnp.where(total > 0, total, 1.0)
