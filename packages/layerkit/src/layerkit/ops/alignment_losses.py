"""Losses that sum over all alignments of labels with frames: CTC and the transducer.

Both are forward recursions in log space, in float32. The backward pass is that of autodiff.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.config.checks import check_same_shape
from layerkit.ops.attention.masks import first_tokens

# Logarithm of the probability of an impossible event, which keeps losses and gradients finite.
IMPOSSIBLE = -1e5


def ctc_loss(
    logits: jax.Array,
    labels: jax.Array,
    *,
    logit_paddings: jax.Array,
    label_paddings: jax.Array,
    blank_id: int = 0,
) -> jax.Array:
    """Compute -log p(labels), where frames emit a label, repeat it, or emit a blank.

    Source: Graves et al., 2006, "Connectionist Temporal Classification".

    Args:
      logits: `[batch, frames, classes]`.
      labels: int32 `[batch, labels]`, without blanks.
      logit_paddings: `[batch, frames]`, 1 for padding.
      label_paddings: `[batch, labels]`, 1 for padding, which is last.
      blank_id: Class of the blank.

    Returns:
      Loss in nats, float32 `[batch]`; about 1e5 for each label that has no frame.
    """
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    of_blank = log_probs[:, :, blank_id]
    of_labels = jnp.take_along_axis(log_probs, labels[:, None], axis=-1)
    is_new = labels != jnp.pad(labels, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    # Probability of all paths that end in a blank after n labels, and in label n.
    shape = (labels.shape[0], labels.shape[1] + 1)
    blanks = jnp.full(shape, IMPOSSIBLE).at[:, 0].set(0.0)
    start = blanks, jnp.full(labels.shape, IMPOSSIBLE)

    def advance(state: tuple[jax.Array, jax.Array], frame: tuple[jax.Array, ...]):  # type: ignore[no-untyped-def]
        blanks, ends = state
        blank, label, padding = frame
        before = jnp.pad(ends, ((0, 0), (1, 0)), constant_values=IMPOSSIBLE)
        new_blanks = jnp.logaddexp(blanks, before) + blank[:, None]
        from_last = jnp.where(is_new, before[:, :-1], IMPOSSIBLE)
        stay = jnp.logaddexp(blanks[:, :-1], ends)
        new_ends = jnp.logaddexp(stay, from_last) + label
        is_padding = padding[:, None] != 0
        kept = jnp.where(is_padding, blanks, new_blanks), jnp.where(is_padding, ends, new_ends)
        return kept, None

    frames = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (of_blank, of_labels, logit_paddings))
    (blanks, ends), _ = jax.lax.scan(advance, start, frames)
    before = jnp.pad(ends, ((0, 0), (1, 0)), constant_values=IMPOSSIBLE)
    totals = jnp.logaddexp(blanks, before)
    return -_at(totals, jnp.sum(label_paddings == 0, axis=1))


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

    Raises:
      ConfigError: The shapes do not agree.
    """
    check_same_shape(None, blank_log_probs[..., 1:], label_log_probs=label_log_probs)
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
        totals = jnp.where(number + 1 == ends, _at(alphas, num_labels), totals)
        return (alphas, totals), None

    alphas = jnp.full((batch, states), IMPOSSIBLE).at[:, 0].set(0.0)
    numbers = jnp.arange(frames + states - 1)
    diagonals = (numbers, skew(blank_log_probs), skew(labels))
    (_, totals), _ = jax.lax.scan(advance, (alphas, jnp.full(batch, IMPOSSIBLE)), diagonals)
    return -totals


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
