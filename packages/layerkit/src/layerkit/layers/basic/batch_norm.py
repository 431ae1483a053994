"""Normalizations with statistics over several positions: BatchNorm and GroupNorm.

Statistics are float32 and exclude padding. The mask `is_token` is True for tokens and False for
padding. It has the shape of the inputs without the last axis, such as `[batch, length]`.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config.checks import (
    check_divisible,
    check_last_axis,
    check_non_negative,
    check_rates,
    check_sizes,
)
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.normalizations import BaseNormalization


class BatchNorm(BaseNormalization):
    """Batch normalization: y = (x - mean) / √(variance + ε) · (1 + w) + b.

    Training normalizes by the mean and variance over all axes but the last, and updates moving
    averages of both. Evaluation normalizes by the moving averages (Ioffe and Szegedy, 2015,
    arXiv:1502.03167). On a mesh the statistics are those of the global batch. Under the pmap
    partitioner each device uses the statistics of its own batch, and the moving averages are
    averaged over the devices.

    Attributes:
      dims: Size of the last axis.
      decay: Weight of the old moving average in each update; the batch has the weight 1 - decay.
      epsilon: ε, which keeps the output of a constant feature finite.
      initial_scale: First value of the scale 1 + w. A residual branch that ends in a norm with 0
        adds nothing at first (Goyal et al., 2017, arXiv:1706.02677).
      use_moving_averages_in_training: True to normalize by the moving averages in training as well,
        after each update, so that training and evaluation apply the same function. The layer then
        has no scale and bias (as in Lingvo and Pax).
      force_evaluation: True to normalize by the moving averages in training without updating them,
        such as for fine-tuning with loaded statistics.

    Raises:
      ConfigError: The decay is outside of [0, 1), or epsilon is negative.
    """

    used_only_if: ClassVar[Conditions] = {"initial_scale": "not use_moving_averages_in_training"}

    dims: int = 0
    decay: float = 0.999
    epsilon: float = 1e-3
    initial_scale: float = 1.0
    use_moving_averages_in_training: bool = False
    force_evaluation: bool = False

    def setup(self) -> None:
        """Create scale, bias and moving averages."""
        check_sizes(self, dims=self.dims)
        check_non_negative(self, epsilon=self.epsilon)
        check_rates(self, decay=self.decay)
        zeros, ones = WeightInit.Constant(0.0), WeightInit.Constant(1.0)
        if not self.use_moving_averages_in_training:
            for name, value in (("scale", self.initial_scale - 1.0), ("bias", 0.0)):
                init = WeightInit.Constant(value)
                self.create_variable(name, WeightHParams((self.dims,), ("norm",), init=init))
        for name, init in (("moving_mean", zeros), ("moving_variance", ones)):
            # bfloat16 would round off updates of the moving averages by a factor of 0.001.
            hparams = WeightHParams((self.dims,), ("norm",), init=init, dtype=jnp.float32)
            self.create_variable(name, hparams, trainable=False)

    def fprop(self, inputs: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """Normalize `[batch, ..., dims]`, and return outputs in the compute dtype.

        Args:
          inputs: Array `[batch, ..., dims]`.
          is_token: bool `[batch, ...]`, False for padding, for which the outputs are 0.
        """
        check_last_axis(self, inputs, dims=self.dims)
        x = _zero_padding(inputs.astype(jnp.float32), is_token)
        mean, variance = self.get_var("moving_mean"), self.get_var("moving_variance")
        if not self.force_evaluation and self.is_training:
            axes = tuple(range(x.ndim - 1))
            batch_mean, batch_variance = masked_moments(x, is_token, axes=axes)
            batch_mean, batch_variance = batch_mean.reshape(-1), batch_variance.reshape(-1)
            # A batch without tokens leaves the moving averages unchanged.
            has_token = x.size > 0 if is_token is None else is_token.any()
            decay = jnp.where(has_token, self.decay, 1.0)
            mean = decay * mean + (1.0 - decay) * batch_mean
            variance = decay * variance + (1.0 - decay) * batch_variance
            self.update_var("moving_mean", jax.lax.stop_gradient(mean))
            self.update_var("moving_variance", jax.lax.stop_gradient(variance))
            if not self.use_moving_averages_in_training:
                mean, variance = batch_mean, batch_variance
        y = (x - mean) * jax.lax.rsqrt(variance + self.epsilon)
        if not self.use_moving_averages_in_training:
            y = y * (1.0 + self.theta.scale.astype(jnp.float32))
            y = y + self.theta.bias.astype(jnp.float32)
        return _zero_padding(y, is_token).astype(self.compute_dtype)


class GroupNorm(BaseNormalization):
    """Group normalization: y = (x - mean) / √(variance + ε) · (1 + w) + b.

    Mean and variance are computed for each example and group of features, over all positions and
    the features of the group (Wu and He, 2018, arXiv:1803.08494). Training and evaluation apply the
    same function.

    Attributes:
      dims: Size of the last axis.
      num_groups: Number of groups of adjacent features; a divisor of dims.
      epsilon: ε, which keeps the output of a constant group finite.

    Raises:
      ConfigError: `num_groups` does not divide `dims`, or epsilon is negative.
    """

    dims: int = 0
    num_groups: int = 32
    epsilon: float = 1e-3

    def setup(self) -> None:
        """Create scale and bias."""
        check_sizes(self, dims=self.dims, num_groups=self.num_groups)
        check_non_negative(self, epsilon=self.epsilon)
        check_divisible(self, by=("num_groups", self.num_groups), dims=self.dims)
        zeros = WeightInit.Constant(0.0)
        for name in ("scale", "bias"):
            self.create_variable(name, WeightHParams((self.dims,), axes=("norm",), init=zeros))

    def fprop(self, inputs: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """Normalize `[batch, ..., dims]`, and return outputs in the compute dtype.

        Args:
          inputs: Array `[batch, ..., dims]`.
          is_token: bool `[batch, ...]`, False for padding, for which the outputs are 0.
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
    """Compute mean and variance over some axes, without padding.

    Args:
      x: float32 `[..., dims]`, finite.
      is_token: bool `[...]` without the last axis, broadcast against `x`; None if all are tokens.
      axes: Axes to reduce, which are kept with size 1.

    Returns:
      (mean, variance), float32; both 0 if there are no tokens.
    """
    if is_token is None:
        mean = jnp.mean(x, axis=axes, keepdims=True)
        return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)
    counts = jnp.broadcast_to(is_token[..., None], x.shape).astype(jnp.float32)
    total = jnp.maximum(jnp.sum(counts, axis=axes, keepdims=True), 1.0)
    mean = jnp.sum(x * counts, axis=axes, keepdims=True) / total
    return mean, jnp.sum(jnp.square(x - mean) * counts, axis=axes, keepdims=True) / total


def _zero_padding(y: jax.Array, is_token: jax.Array | None) -> jax.Array:
    # Multiplication by the mask would keep NaN in padding.
    return y if is_token is None else jnp.where(is_token[..., None], y, 0.0)
