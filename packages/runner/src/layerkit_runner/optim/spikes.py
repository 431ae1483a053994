"""Statistics of the last applied steps, by which a learner recognizes a spike.

A step is a spike if its loss or gradient norm exceeds mean + k · std over the last N applied steps:
the rule of `SkipStepOptimizer` of OLMo-core (N = 128, k = 6), and with moving averages that of
`skip_and_clip_by_global_norm` of axlearn. Unlike there, values below the mean are no spikes, the
deviation is at least 0.1 % of the mean, and spikes do not enter the statistics. Half a window of
spikes in a row empties it, so that a level that lasts does not skip steps forever.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

IS_VALID = "learning/is_valid_step"
"""Scalar of a step that is 0 if its loss or gradient is not finite, too large, or a spike."""

IS_SPIKE = "learning/is_spike"
"""Scalar of a step that is 1 if it is finite and a spike; only with `Learner.on_spike`."""

_MIN_DEVIATION = 1e-3


class SpikeWindow(struct.PyTreeNode):
    """The statistics of a run, replicated on all devices.

    Attributes:
      values: Losses and gradient norms before clipping, float32 `[2, window]`, a ring.
      count: Number of values since the window was empty, int32 scalar.
      in_a_row: Number of spikes since the last applied step, int32 scalar.
    """

    values: jax.Array
    count: jax.Array
    in_a_row: jax.Array

    @classmethod
    def empty(cls, size: int) -> SpikeWindow:
        """Return a window of `size` steps without values."""
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.zeros((2, size), jnp.float32), zero, zero)

    def has_spike(self, values: jax.Array, *, deviations: float) -> jax.Array:
        """Return whether a step is a spike, bool scalar; false until the window is half full.

        Args:
          values: Loss and gradient norm of the step, float32 `[2]`.
          deviations: Number k of standard deviations above the mean.
        """
        size = self.values.shape[1]
        is_known = jnp.arange(size) < jnp.maximum(self.count, 2)  # A mean of none is NaN.
        mean = jnp.mean(self.values, axis=1, where=is_known)
        deviation = jnp.std(self.values, axis=1, where=is_known, ddof=1)
        limit = mean + deviations * jnp.maximum(deviation, _MIN_DEVIATION * jnp.abs(mean))
        return jnp.any(values > limit) & (self.count >= size // 2)

    def after(
        self, values: jax.Array, *, is_applied: jax.Array, is_spike: jax.Array
    ) -> SpikeWindow:
        """Return the window after a step; one that is neither applied nor a spike is ignored."""
        size = self.values.shape[1]
        column, in_a_row = self.count % size, self.in_a_row + is_spike
        is_level = in_a_row >= size // 2
        column_values = jnp.where(is_applied, values, self.values[:, column])
        return SpikeWindow(
            values=self.values.at[:, column].set(column_values),
            count=jnp.where(is_level, 0, self.count + is_applied),
            in_a_row=jnp.where(is_level | is_applied, 0, in_a_row),
        )
