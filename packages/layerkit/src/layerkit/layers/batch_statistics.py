"""Normalisations whose statistics are taken over more than one position: BatchNorm and GroupNorm.

Statistics are float32 and leave padding out: a padded position changes nothing elsewhere. The mask
`is_token` `[batch, length]` (or with whatever stands between batch and dims) is True where there is
something.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base_layer import BaseLayer
from layerkit.checks import (
    check_last_axis,
    check_non_negative,
    check_rates,
    check_sizes,
)
from layerkit.weights import WeightHParams, WeightInit


class BatchNorm(BaseLayer):
    """y = (x - mean) / √(variance + ε) · (1 + w) + b, over batch and positions.

    In training the statistics are those of the batch, and moving averages of them are kept;
    otherwise they are the moving averages (Ioffe and Szegedy, 2015, arXiv:1502.03167). Over a mesh
    the batch is the global one; under the pmap partitioner each device has statistics of its own,
    and the moving averages are the mean of theirs.

    Attributes:
      dims: Size of the last axis.
      decay: How much of a moving average stays at a step.
      epsilon: Keeps a constant feature finite.
      use_moving_averages_in_training: Normalises by them in training too (they are still kept).
      force_evaluation: Neither takes nor keeps statistics of the batch, even in training: for
        fine-tuning with those that were loaded.

    Raises:
      ValueError: a decay outside [0, 1).
    """

    dims: int = 0
    decay: float = 0.999
    epsilon: float = 1e-3
    use_moving_averages_in_training: bool = False
    force_evaluation: bool = False

    def setup(self) -> None:
        check_sizes(self, dims=self.dims)
        check_non_negative(self, epsilon=self.epsilon)
        check_rates(self, decay=self.decay)
        zeros, ones = WeightInit.Constant(0.0), WeightInit.Constant(1.0)
        for name in ("scale", "bias"):
            self.create_variable(name, WeightHParams((self.dims,), axes=("norm",), init=zeros))
        for name, init in (("moving_mean", zeros), ("moving_variance", ones)):
            # A step of 0.001 is lost in bfloat16.
            hparams = WeightHParams((self.dims,), ("norm",), init=init, dtype=jnp.float32)
            self.create_variable(name, hparams, trainable=False)

    def fprop(self, inputs: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """`[batch, ..., dims]` → the same, in the compute dtype.

        Args:
          inputs: To be normalised.
          is_token: bool `[batch, ...]`, False for padding, which gives 0.

        Raises:
          ValueError: the last axis has another size.
        """
        check_last_axis(self, inputs, dims=self.dims)
        x = _zero_padding(inputs.astype(jnp.float32), is_token)
        mean, variance = self.get_var("moving_mean"), self.get_var("moving_variance")
        if not self.force_evaluation and self.is_training:
            axes = tuple(range(x.ndim - 1))
            batch_mean, batch_variance = masked_moments(x, is_token, axes=axes)
            batch_mean, batch_variance = batch_mean.reshape(-1), batch_variance.reshape(-1)
            # A batch without tokens has nothing to tell.
            decay = self.decay if is_token is None else jnp.where(is_token.any(), self.decay, 1.0)
            for name, old, new in (
                ("moving_mean", mean, batch_mean),
                ("moving_variance", variance, batch_variance),
            ):
                new = jax.lax.stop_gradient(new)
                self.update_var(name, decay * old + (1.0 - decay) * new)
            if not self.use_moving_averages_in_training:
                mean, variance = batch_mean, batch_variance
        scale = 1.0 + self.theta.scale.astype(jnp.float32)
        y = (x - mean) * jax.lax.rsqrt(variance + self.epsilon) * scale
        y = y + self.theta.bias.astype(jnp.float32)
        return _zero_padding(y, is_token).astype(self.compute_dtype)


class GroupNorm(BaseLayer):
    """Each example's features in groups, normalised over positions and the group's features.

    y = (x - mean) / √(variance + ε) · (1 + w) + b (Wu and He, 2018, arXiv:1803.08494). Without
    statistics of a batch there is nothing to keep, and training and evaluation are alike.

    Attributes:
      dims: Size of the last axis.
      num_groups: Groups of neighbouring features, a divisor of dims.
      epsilon: Keeps a constant group finite.

    Raises:
      ValueError: groups that do not divide the features.
    """

    dims: int = 0
    num_groups: int = 32
    epsilon: float = 1e-3

    def setup(self) -> None:
        check_sizes(self, dims=self.dims, num_groups=self.num_groups)
        check_non_negative(self, epsilon=self.epsilon)
        if self.dims % self.num_groups:
            raise ValueError(
                f"{self.path_name}: num_groups={self.num_groups} does not divide dims={self.dims}"
            )
        zeros = WeightInit.Constant(0.0)
        for name in ("scale", "bias"):
            self.create_variable(name, WeightHParams((self.dims,), axes=("norm",), init=zeros))

    def fprop(self, inputs: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """`[batch, ..., dims]` → the same, in the compute dtype.

        Args:
          inputs: To be normalised.
          is_token: bool `[batch, ...]`, False for padding, which gives 0.

        Raises:
          ValueError: the last axis has another size.
        """
        check_last_axis(self, inputs, dims=self.dims)
        x = _zero_padding(inputs.astype(jnp.float32), is_token)
        groups = x.reshape(*x.shape[:-1], self.num_groups, self.dims // self.num_groups)
        kept = tuple(axis for axis in range(1, groups.ndim) if axis != groups.ndim - 2)
        in_group = None if is_token is None else is_token[..., None]
        mean, variance = masked_moments(groups, in_group, axes=kept)
        y = ((groups - mean) * jax.lax.rsqrt(variance + self.epsilon)).reshape(x.shape)
        y = y * (1.0 + self.theta.scale.astype(jnp.float32)) + self.theta.bias.astype(jnp.float32)
        return _zero_padding(y, is_token).astype(self.compute_dtype)


def masked_moments(
    x: jax.Array, is_token: jax.Array | None, *, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over some axes, leaving out what is no token.

    Args:
      x: float32 `[..., dims]`, finite.
      is_token: bool `[...]`, of one axis less, broadcast against it; None for all.
      axes: Which to reduce; they stay, with size 1.

    Returns:
      (mean, variance), float32; 0 and 0 where nothing counts.
    """
    if is_token is None:
        mean = jnp.mean(x, axis=axes, keepdims=True)
        return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)
    counts = jnp.broadcast_to(is_token[..., None], x.shape).astype(jnp.float32)
    total = jnp.maximum(jnp.sum(counts, axis=axes, keepdims=True), 1.0)
    mean = jnp.sum(x * counts, axis=axes, keepdims=True) / total
    return mean, jnp.sum(jnp.square(x - mean) * counts, axis=axes, keepdims=True) / total


def _zero_padding(y: jax.Array, is_token: jax.Array | None) -> jax.Array:
    # By choice rather than by product: padding may hold anything, NaN included.
    return y if is_token is None else jnp.where(is_token[..., None], y, 0.0)
