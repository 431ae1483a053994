"""Losses that sum over all alignments of labels with frames: CTC and the transducer.

Both are forward recursions in log space, in float32, whose backward pass is that of autodiff.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.ops.attention.masks import first_tokens

# Logarithm of the probability of an impossible event, which keeps losses and gradients finite.
IMPOSSIBLE = -1e5


def ctc_loss(
    logits: jax.Array,
    labels: jax.Array,
    *,
    logit_paddings: jax.Array,
    label_paddings: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute -log p(labels), where frames emit a label, repeat it, or emit the blank 0, by Optax.

    Source: Graves et al., 2006, "Connectionist Temporal Classification".

    Args:
      logits: `[batch, frames, classes]`.
      labels: int32 `[batch, labels]`, without blanks.
      logit_paddings: `[batch, frames]`, 1 for padding.
      label_paddings: `[batch, labels]`, 1 for padding, which is last.

    Returns:
      (loss in nats, float32 `[batch]`, NaN for a label outside [0, classes); bool `[batch]`, True
      for enough frames: one for each label, and one between equal labels. The loss of other rows is
      1e5 or more.)
    """
    # Only models of speech need Optax, whose import takes a while.
    import optax

    is_label = label_paddings == 0
    labels = jnp.where(is_label, labels, 0)
    # Optax selects the log-probabilities of labels by a product.
    with jax.default_matmul_precision("float32"):
        losses = optax.ctc_loss(logits.astype(jnp.float32), logit_paddings, labels, label_paddings)
    is_valid = jnp.all((labels >= 0) & (labels < logits.shape[-1]), axis=1)
    repeats = (labels[:, 1:] == labels[:, :-1]) & is_label[:, 1:]
    needed = jnp.sum(is_label, axis=1) + jnp.sum(repeats, axis=1)
    fits = needed <= jnp.sum(logit_paddings == 0, axis=1)
    return jnp.where(is_valid, losses, jnp.nan), fits


def transducer_loss(
    blank_log_probs: jax.Array,
    label_log_probs: jax.Array,
    *,
    num_frames: jax.Array,
    num_labels: jax.Array,
) -> jax.Array:
    """Compute -log p(labels), where each frame emits any number of labels and then a blank.

    Source: Graves, 2012 (arXiv:1211.3711). The recursion runs over the diagonals of frames and
    labels, whose entries are independent.

    Args:
      blank_log_probs: log p(blank) at each frame after each number of labels, float32 `[batch,
        frames, labels + 1]`.
      label_log_probs: log p(next label) there, float32 `[batch, frames, labels]`.
      num_frames: Number of frames of each row without padding, at least 1, int32 `[batch]`.
      num_labels: Number of labels of each row without padding, int32 `[batch]`.

    Returns:
      Loss in nats, float32 `[batch]`.
    """
    batch, frames, states = blank_log_probs.shape
    labels = jnp.pad(label_log_probs, ((0, 0), (0, 0), (0, 1)), constant_values=IMPOSSIBLE)
    is_frame = first_tokens(num_frames, frames)[..., None]
    ends = num_frames + num_labels

    def skew(x: jax.Array) -> jax.Array:
        """Return `[diagonals, batch, states]`, in which entry (d, u) is that of frame d - u."""
        x = jnp.where(is_frame, x.astype(jnp.float32), IMPOSSIBLE)
        frame = jnp.arange(frames + states - 1)[:, None] - jnp.arange(states)
        is_inside = (frame >= 0) & (frame < frames)
        skewed = jnp.take_along_axis(x, jnp.clip(frame, 0, frames - 1)[None], axis=1)
        return jnp.moveaxis(jnp.where(is_inside, skewed, IMPOSSIBLE), 1, 0)

    def advance(state: tuple[jax.Array, jax.Array], diagonal: tuple[jax.Array, ...]):  # type: ignore[no-untyped-def]
        alphas, totals = state
        number, blank, label = diagonal
        emitted = jnp.pad(alphas + label, ((0, 0), (1, 0)), constant_values=IMPOSSIBLE)[:, :-1]
        alphas = jnp.logaddexp(alphas + blank, emitted)
        last = jnp.take_along_axis(alphas, num_labels[:, None], axis=1)[:, 0]
        totals = jnp.where(number + 1 == ends, last, totals)
        return (alphas, totals), None

    alphas = jnp.full((batch, states), IMPOSSIBLE).at[:, 0].set(0.0)
    numbers = jnp.arange(frames + states - 1)
    diagonals = (numbers, skew(blank_log_probs), skew(labels))
    (_, totals), _ = jax.lax.scan(advance, (alphas, jnp.full(batch, IMPOSSIBLE)), diagonals)
    return -totals
