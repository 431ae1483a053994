"""Layers that draw random numbers while training, and do nothing otherwise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_rates


class Dropout(BaseLayer):
    """Zeroes a random part of the inputs while training (Srivastava et al., 2014).

    What is kept is divided by 1 - rate, so that the expected value stays. Without training, or at
    rate 0, the inputs pass unchanged and no key is needed.

    The mask depends on the key of the step, where the layer sits, how often it was called in that
    step, and the position in the array; not on the mesh.

    Attributes:
      rate: Probability that an element is zeroed, in [0, 1).
      broadcast_dims: Dimensions along which one draw holds for all elements, from the front or
        (negative) from the back: `(-2,)` drops whole features of `[batch, length, dims]`.
    """

    rate: float = 0.0
    broadcast_dims: tuple[int, ...] = ()

    def setup(self) -> None:
        check_rates(self, rate=self.rate)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """`[...]` → `[...]` in the compute dtype.

        Raises:
          ValueError: a broadcast dimension that the inputs do not have.
        """
        inputs = self.cast(inputs)
        if self.rate == 0.0 or not self.is_training:
            return inputs
        keep_probability = 1.0 - self.rate
        shape = self._mask_shape(inputs.shape)
        keep = jax.random.bernoulli(self.next_prng_key(), keep_probability, shape)
        return jnp.where(keep, inputs / keep_probability, jnp.zeros_like(inputs))

    @nn.nowrap
    def _mask_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rank = len(shape)
        for dim in self.broadcast_dims:
            if not -rank <= dim < rank:
                raise ValueError(
                    f"{self.path_name}: broadcast_dims={self.broadcast_dims} names dimension {dim}"
                    f" of inputs of the shape {shape}; expected {-rank} to {rank - 1}"
                )
        shared = {dim % rank for dim in self.broadcast_dims}
        return tuple(1 if dim in shared else size for dim, size in enumerate(shape))


class StochasticResidual(BaseLayer):
    """x + branch, where training leaves the branch of a whole example out at random.

    Stochastic depth (Huang et al., 2016, arXiv:1603.09382), also called droppath. A branch that is
    kept is divided by 1 - rate, so that the expected value stays. Without training, or at rate 0,
    this is the plain sum and no key is needed.

    Attributes:
      rate: Probability that the branch of an example is left out, in [0, 1).
    """

    rate: float = 0.0

    def setup(self) -> None:
        check_rates(self, rate=self.rate)

    def fprop(self, x: jax.Array, branch: jax.Array, *, rate: jax.Array | None = None) -> jax.Array:
        """The sum, in the compute dtype.

        Args:
          x: `[batch, ...]`.
          branch: The shape of `x`.
          rate: float32 scalar, instead of the field of this name, for a layer that is compiled once
            for several depths.
        """
        x, branch = self.cast(x), self.cast(branch)
        if (rate is None and self.rate == 0.0) or not self.is_training:
            return x + branch
        keep_probability = 1.0 - (self.rate if rate is None else rate)
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        keep = jax.random.bernoulli(self.next_prng_key(), keep_probability, shape)
        return x + jnp.where(keep, self.cast(branch / keep_probability), jnp.zeros_like(branch))
