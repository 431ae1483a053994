"""Dropout and stochastic depth, which have an effect only in training."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config.checks import check_rates, require


class Dropout(BaseLayer):
    """Dropout: random elements of the inputs are zeroed in training (Srivastava et al., 2014).

    Other elements are divided by 1 - rate, which keeps the expected value. Outside of training, or
    at rate 0, the inputs are returned unchanged and no key is needed.

    The mask depends on the key of the step, the path of the layer, the number of its calls in the
    step, and the position in the array. It does not depend on the mesh.

    Attributes:
      rate: Probability that an element is zeroed, in [0, 1).
      broadcast_dims: Dimensions, counted from the front or (negative) from the back, whose elements
        share one random draw: `(-2,)` drops whole features of `[batch, length, dims]`.
    """

    rate: float = 0.0
    broadcast_dims: tuple[int, ...] = ()

    def setup(self) -> None:
        """Check the fields."""
        check_rates(self, rate=self.rate)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply dropout to `[...]`; the outputs have the compute dtype.

        Raises:
          ConfigError: The inputs do not have a dimension of `broadcast_dims`.
        """
        inputs = self.cast(inputs)
        if self.rate == 0.0 or not self.is_training:
            return inputs
        keep_probability = 1.0 - self.rate
        shape = self._mask_shape(inputs.shape)
        keep = jax.random.bernoulli(self.next_prng_key(), keep_probability, shape)
        return jnp.where(keep, inputs / keep_probability, jnp.zeros_like(inputs))

    def _mask_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rank = len(shape)
        is_valid = all(-rank <= dim < rank for dim in self.broadcast_dims)
        expected = f"numbers from {-rank} to {rank - 1} for inputs of the shape {list(shape)}"
        require(is_valid, self, "broadcast_dims", self.broadcast_dims, expected)
        shared = {dim % rank for dim in self.broadcast_dims}
        return tuple(1 if dim in shared else size for dim, size in enumerate(shape))


class StochasticResidual(BaseLayer):
    """A residual x + branch in which training drops the branch of random examples.

    Stochastic depth (Huang et al., 2016, arXiv:1603.09382), also called droppath. Other branches
    are divided by 1 - rate, which keeps the expected value. Outside of training, or at rate 0, this
    is the plain sum and no key is needed.

    Attributes:
      rate: Probability that the branch of an example is dropped, in [0, 1).
    """

    rate: float = 0.0

    def setup(self) -> None:
        """Check the fields."""
        check_rates(self, rate=self.rate)

    def fprop(self, x: jax.Array, branch: jax.Array, *, rate: jax.Array | None = None) -> jax.Array:
        """Return the sum in the compute dtype.

        Args:
          x: `[batch, ...]`.
          branch: Array with the shape of `x`.
          rate: float32 scalar that replaces the field, for a layer that is compiled once for
            several depths.
        """
        x, branch = self.cast(x), self.cast(branch)
        if (rate is None and self.rate == 0.0) or not self.is_training:
            return x + branch
        keep_probability = 1.0 - (self.rate if rate is None else rate)
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        keep = jax.random.bernoulli(self.next_prng_key(), keep_probability, shape)
        return x + jnp.where(keep, self.cast(branch / keep_probability), jnp.zeros_like(branch))
