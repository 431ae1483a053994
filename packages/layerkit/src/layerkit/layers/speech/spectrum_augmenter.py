"""SpectrumAugmenter: masks of time and frequency in training (SpecAugment).

Source: Park et al., 2019 (arXiv:1904.08779), with the adaptive masks of Park et al., 2020
(arXiv:1912.05533).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config.checks import check_integers, check_non_negative, require


class SpectrumAugmenter(BaseLayer):
    """A layer that sets random spans of frames and of frequency bins to 0 in training.

    Spans may overlap, and each lies within the frames of its utterance.

    Attributes:
      freq_mask_max_bins: Largest number of bins of a span.
      freq_mask_count: Number of spans of bins.
      time_mask_max_frames: Largest number of frames of a span; None to bound spans by
        `time_mask_max_ratio` alone.
      time_mask_count: Number of spans of frames, or the largest number of them with
        `time_masks_per_frame`.
      time_mask_max_ratio: Largest part of the frames of an utterance that a span covers.
      time_masks_per_frame: Number of spans of frames for each frame of an utterance; 0 for
        `time_mask_count` spans in each utterance.

    Raises:
      ConfigError: A number is negative, or the ratio is above 1.
    """

    freq_mask_max_bins: int = 27
    freq_mask_count: int = 2
    time_mask_max_frames: int | None = None
    time_mask_count: int = 10
    time_mask_max_ratio: float = 0.05
    time_masks_per_frame: float = 0.0

    def setup(self) -> None:
        """Check the fields."""
        counts = {"freq_mask_count": self.freq_mask_count, "time_mask_count": self.time_mask_count}
        check_integers(self, minimum=0, freq_mask_max_bins=self.freq_mask_max_bins, **counts)
        ratio = self.time_mask_max_ratio
        check_non_negative(self, time_masks_per_frame=self.time_masks_per_frame)
        require(0.0 <= ratio <= 1.0, self, "time_mask_max_ratio", ratio, "a number in [0, 1]")

    def fprop(self, features: jax.Array, *, paddings: jax.Array) -> jax.Array:
        """Mask features.

        Args:
          features: `[batch, frames, bins]`.
          paddings: `[batch, frames]`, 1 for frames of padding, which are last.

        Returns:
          `[batch, frames, bins]`, as they are outside of training.
        """
        if not self.is_training:
            return features
        batch, num_frames, num_bins = features.shape
        time_key, freq_key = jax.random.split(self.next_prng_key())
        lengths = jnp.sum(paddings == 0, axis=1)
        is_kept = ~span_mask(
            jax.random.uniform(time_key, (2, batch, self.time_mask_count)),
            lengths,
            size=num_frames,
            longest=self.time_mask_max_frames,
            max_ratio=self.time_mask_max_ratio,
            per_position=self.time_masks_per_frame,
        )[:, :, None]
        is_kept &= ~span_mask(
            jax.random.uniform(freq_key, (2, batch, self.freq_mask_count)),
            jnp.full(batch, num_bins),
            size=num_bins,
            longest=self.freq_mask_max_bins,
        )[:, None]
        return jnp.where(is_kept, features, 0.0)


def span_mask(
    draws: jax.Array,
    lengths: jax.Array,
    *,
    size: int,
    longest: int | None,
    max_ratio: float = 1.0,
    per_position: float = 0.0,
) -> jax.Array:
    """Return the union of random spans of each row.

    Args:
      draws: Uniform numbers in [0, 1), float32 `[2, batch, spans]`: the size of each span as a part
        of the largest one, and its place.
      lengths: int32 `[batch]`, number of first positions within which spans lie.
      size: Number of positions of a row.
      longest: Largest size of a span; None for lengths·max_ratio.
      max_ratio: Largest part of `lengths` that a span covers. A span of one position is allowed.
      per_position: Number of spans for each of the `lengths`, at most all; 0 for all.

    Returns:
      bool `[batch, size]`, True in a span.
    """
    lengths = lengths[:, None]
    largest = lengths * max_ratio if longest is None else jnp.full(lengths.shape, longest)
    bound = jnp.maximum((max_ratio * lengths).astype(jnp.int32), 1)
    sizes = jnp.minimum((largest * draws[0]).astype(jnp.int32), bound)
    starts = (draws[1] * (lengths - sizes + 1)).astype(jnp.int32)
    if per_position:
        is_used = jnp.arange(draws.shape[-1]) < per_position * lengths
        sizes = jnp.where(is_used, sizes, 0)
    after = jnp.arange(size) - starts[..., None]
    return jnp.any((after >= 0) & (after < sizes[..., None]), axis=1)
