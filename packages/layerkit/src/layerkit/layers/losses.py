"""Softmax cross-entropy from logits or, chunk by chunk, from hidden states.

The logits of a language model are its largest array: `[batch, length, num_classes]` in float32.
The functions here compute the loss of each token from them (`cross_entropy`) or without ever
holding more than a slice of them (`chunked_cross_entropy`), and average with weights
(`weighted_mean`). They are plain functions on arrays; `layerkit.layers.embeddings` has the layers
that call them.

All losses are in nats and float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenLosses(NamedTuple):
    """What is known of each token; every array has the shape of the labels.

    Attributes:
      xent: −log p(label), to be reported; float32.
      z_loss: The part of `loss` that pulls log Z towards 0; float32.
      loss: What to train on: cross-entropy with smoothed labels, plus `z_loss`; float32.
      correct: Whether the label has the highest logit (of equal ones, the first); bool.
    """

    xent: jax.Array
    z_loss: jax.Array
    loss: jax.Array
    correct: jax.Array


def soft_cap(logits: jax.Array, cap: float | None) -> jax.Array:
    """Squeezes logits into ±cap: cap·tanh(logits/cap), near the identity for small ones.

    Source: Bello et al., 2016 (arXiv:1611.09940); as in Gemma 2 (arXiv:2408.00118).

    Args:
      logits: `[...]`, of any shape.
      cap: Its bound; None leaves the logits alone.

    Raises:
      ValueError: a cap that is not positive.
    """
    if cap is None:
        return logits
    if cap <= 0:
        raise ValueError(f"soft_cap: cap={cap} must be positive, or None for no cap")
    return cap * jnp.tanh(logits / cap)


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> TokenLosses:
    """Softmax cross-entropy of each token.

    With z the logits, V classes and log Z = log Σ exp z:

        xent   = log Z − z[label]
        z_loss = z_loss_weight · (log Z)²
        loss   = log Z − (1 − ε)·z[label] − ε·mean(z) + z_loss,    ε = label_smoothing

    so the smoothed target is ε/V everywhere and 1 − ε more at the label (Szegedy et al., 2015,
    arXiv:1512.00567); the z-loss is PaLM's, with weight 1e-4 there (arXiv:2204.02311).

    Args:
      logits: `[..., num_classes]`; computed on in float32.
      labels: `[...]`, integers in [0, num_classes). Any other label gives NaN rather than a
        plausible number; `weighted_mean` skips it where its weight is 0.
      label_smoothing: Probability taken from the label and spread over all classes; in [0, 1).
      z_loss_weight: At least 0.

    Raises:
      ValueError: shapes that do not fit, labels that are not integers, or an option out of range.
    """
    _check_labels(labels, logits.shape[:-1], "logits", logits.shape)
    check_loss_options(label_smoothing=label_smoothing, z_loss_weight=z_loss_weight)
    logits = logits.astype(jnp.float32)
    labels = jnp.asarray(labels)[..., None]  # NumPy's int64 becomes the int32 that JAX has
    # Comparing with an index, rather than gathering by label, lets the class axis stay split over
    # devices, and fuses with the other reductions, forward and backward.
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    label_logit = jnp.sum(jnp.where(classes == labels, logits, 0.0), -1)
    in_range = jnp.squeeze((labels >= 0) & (labels < logits.shape[-1]), -1)
    log_z = jax.nn.logsumexp(logits, axis=-1)

    xent = jnp.where(in_range, log_z - label_logit, jnp.nan)
    z_loss = z_loss_weight * jnp.square(log_z)
    loss = xent + z_loss
    if label_smoothing:
        loss += label_smoothing * (label_logit - jnp.mean(logits, axis=-1))

    best = jax.lax.stop_gradient(label_logit)[..., None]
    others = jax.lax.stop_gradient(logits)
    beats_all = jnp.all((others < best) | ((others == best) & (classes >= labels)), -1)
    return TokenLosses(xent, z_loss, loss, beats_all & in_range)


def chunked_cross_entropy(
    hidden: jax.Array,
    project: Callable[[jax.Array], jax.Array],
    labels: jax.Array,
    *,
    chunk_size: int,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> TokenLosses:
    """`cross_entropy(project(hidden), labels)` with the logits of one chunk at a time.

    The length axis is cut into the fewest chunks of at most `chunk_size` positions, as even as can
    be, and padded where they do not fill. Backward, each chunk's logits are computed once more.

    Args:
      hidden: `[batch, length, dims]`.
      project: Maps `[batch, positions, dims]` to logits `[batch, positions, num_classes]`, each
        position on its own. The gradient of an array that it closes over is summed over the chunks
        in that array's dtype: let it close over float32.
      labels: `[batch, length]`, as for `cross_entropy`.
      chunk_size: Positions of each row whose logits are held at once.
      label_smoothing: As for `cross_entropy`.
      z_loss_weight: As for `cross_entropy`.

    Returns:
      The losses of each token, `[batch, length]`.

    Raises:
      ValueError: as `cross_entropy`, or a chunk size below 1.
    """
    check_loss_options(
        label_smoothing=label_smoothing, z_loss_weight=z_loss_weight, chunk_size=chunk_size
    )
    if hidden.ndim != 3:
        raise ValueError(f"hidden must be [batch, length, dims], got shape {hidden.shape}")
    _check_labels(labels, hidden.shape[:-1], "hidden", hidden.shape)
    length = hidden.shape[1]
    num_chunks = max(1, math.ceil(length / chunk_size))

    def losses_of(chunk: tuple[jax.Array, jax.Array]) -> TokenLosses:
        return cross_entropy(
            project(chunk[0]),
            chunk[1],
            label_smoothing=label_smoothing,
            z_loss_weight=z_loss_weight,
        )

    chunks = (_split(hidden, num_chunks), _split(labels, num_chunks))
    # prevent_cse guards against undoing the recomputation; a scan cannot undo it.
    losses = jax.lax.map(jax.checkpoint(losses_of, prevent_cse=False), chunks)
    return jax.tree.map(lambda x: _join(x, length), losses)


def _split(x: jax.Array, num_chunks: int) -> jax.Array:
    """`[batch, length, ...]` to `[num_chunks, batch, positions, ...]`.

    A chunk takes every num_chunks-th position, so that a length axis which is split over devices
    stays split within each chunk instead of handing whole chunks to one device.
    """
    batch, length, *rest = x.shape
    positions = math.ceil(length / num_chunks)
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, positions * num_chunks - length)
    padded = jnp.pad(x, widths)
    return jnp.moveaxis(padded.reshape(batch, positions, num_chunks, *rest), 2, 0)


def _join(x: jax.Array, length: int) -> jax.Array:
    """Undoes `_split` for `[num_chunks, batch, positions]`."""
    num_chunks, batch, positions = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(batch, positions * num_chunks)[:, :length]


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Σ values·weights / Σ weights as a float32 scalar; 0, with finite gradients, if all are 0.

    Args:
      values: Of any shape. Where the weight is 0 a value does not count, not even NaN or infinity.
      weights: Of the same shape; at least 0.

    Raises:
      ValueError: the shapes differ.
    """
    if values.shape != weights.shape:
        raise ValueError(f"weights of shape {weights.shape} for values of shape {values.shape}")
    weights = weights.astype(jnp.float32)
    counted = jnp.where(weights != 0, values.astype(jnp.float32), 0.0)
    total = jnp.sum(weights)
    return jnp.sum(counted * weights) / jnp.where(total > 0, total, 1.0)


def check_loss_options(
    *,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    logit_soft_cap: float | None = None,
    chunk_size: int | None = None,
    owner: str = "",
) -> None:
    """Refuses options of the losses that are out of range.

    Raises:
      ValueError: names the owner, the option, its value and the range.
    """
    where = f"{owner}: " if owner else ""
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"{where}label_smoothing={label_smoothing} must be in [0, 1)")
    if not z_loss_weight >= 0.0:
        raise ValueError(f"{where}z_loss_weight={z_loss_weight} must be at least 0")
    if logit_soft_cap is not None and not logit_soft_cap > 0.0:
        raise ValueError(
            f"{where}logit_soft_cap={logit_soft_cap} must be positive, or None for no cap"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(
            f"{where}chunk_size={chunk_size} must be at least 1, or None for all positions at once"
        )


def _check_labels(
    labels: jax.Array, expected: tuple[int, ...], name: str, shape: tuple[int, ...]
) -> None:
    if labels.shape != expected:
        raise ValueError(
            f"labels of shape {labels.shape} for {name} of shape {shape}; expected {expected}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels must be integers, got {labels.dtype}")
