"""Element-wise layers: activations, dropout and stochastic depth.

An activation maps `[...]` of any shape to the same shape in the compute dtype. A custom activation
is a subclass of `BaseActivation` with an `elementwise`, a `function` or an `fprop`; every
`activation_tpl` accepts it.

The backward pass of a `function` keeps one array, the slope (`save_slopes`). JAX would keep an
array for each step of the formula: five for the GELU.

`Dropout` and `StochasticResidual` have an effect only in training.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base.base_layer import BaseLayer
from layerkit.config.checks import check_rates, require
from layerkit.ops.remat import ElementWise, save_slopes


class BaseActivation(BaseLayer):
    """The base class of activations, which have no weights.

    A subclass defines `elementwise`, `function` if this depends on its fields, or `fprop` if it is
    not a pure function of its inputs.

    Attributes:
      elementwise: Static method, the function of `[...]` that the layer applies.
      saves_slope: False for a function whose gradient in JAX keeps no more than its slope.
    """

    elementwise: ClassVar[Any] = None
    saves_slope: ClassVar[bool] = True

    @nn.nowrap
    def function(self) -> ElementWise:
        """Return the function of `[...]` that the layer applies."""
        if self.elementwise is None:
            raise NotImplementedError(
                f"{type(self).__qualname__} does not define fprop or function"
            )
        function: ElementWise = self.elementwise
        return function

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[...]` to `[...]`, element by element."""
        function, inputs = self.function(), self.cast(inputs)
        return save_slopes(function, inputs) if self.saves_slope else function(inputs)

    def gate(
        self,
        gate: jax.Array,
        factor: jax.Array,
        *,
        limit: float | None = None,
        offset: float = 0.0,
    ) -> jax.Array:
        """Return activation(gate) · (factor + offset), both `[...]`, in the compute dtype.

        The backward pass keeps two arrays, the slopes of the product.

        Args:
          gate: `[...]`, input of the activation.
          factor: `[...]`, the other factor.
          limit: Bound of both arguments: from above of the gate, on both sides of the factor. None
            for no bound.
          offset: Number that is added to the factor.
        """
        product = functools.partial(_gated_product, limit=limit, offset=offset)
        factor = self.cast(factor)
        if type(self).fprop is not BaseActivation.fprop:
            return product(self, gate, factor)
        product = functools.partial(product, self.function())
        return save_slopes(product, self.cast(gate), factor)


def _gated_product(
    activation: ElementWise,
    gate: jax.Array,
    factor: jax.Array,
    *,
    limit: float | None,
    offset: float,
) -> jax.Array:
    if limit is not None:
        gate = jnp.minimum(gate, limit)
        factor = jnp.clip(factor, -limit, limit)
    if offset:
        factor = factor + offset
    return activation(gate) * factor


class Identity(BaseActivation):
    """The identity x, for templates that must name an activation."""

    saves_slope: ClassVar[bool] = False
    elementwise = staticmethod(lambda x: x)


class ReLU(BaseActivation):
    """max(x, 0)."""

    saves_slope: ClassVar[bool] = False
    elementwise = staticmethod(jax.nn.relu)


class SquaredReLU(BaseActivation):
    """max(x, 0)² (So et al., 2021: Primer)."""

    elementwise = staticmethod(lambda x: jnp.square(jax.nn.relu(x)))


class GELU(BaseActivation):
    """x·Φ(x), Φ the normal distribution function (Hendrycks and Gimpel, 2016).

    Attributes:
      approximate: True to use 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))). It is cheaper, differs
        by at most about 5e-4, and most published models were trained with it.
    """

    approximate: bool = True

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return functools.partial(jax.nn.gelu, approximate=self.approximate)


class SiLU(BaseActivation):
    """x·sigmoid(beta·x) (Elfwing et al., 2017); the gate of SwiGLU.

    Attributes:
      beta: Factor inside of the sigmoid (Ramachandran et al., 2017); 1.702 in gpt-oss.
    """

    beta: float = 1.0

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        if self.beta == 1.0:
            return jax.nn.silu
        return functools.partial(_silu, beta=self.beta)


# Name of the same function in Ramachandran et al. (2017).
Swish = SiLU


class Sigmoid(BaseActivation):
    """1 / (1 + exp(-x))."""

    saves_slope: ClassVar[bool] = False
    elementwise = staticmethod(jax.nn.sigmoid)


class Tanh(BaseActivation):
    """tanh(x)."""

    elementwise = staticmethod(jnp.tanh)


class ReLU6(BaseActivation):
    """min(max(x, 0), 6) (Krizhevsky, 2010)."""

    saves_slope: ClassVar[bool] = False
    elementwise = staticmethod(jax.nn.relu6)


class CubedReLU(BaseActivation):
    """max(x, 0)³."""

    elementwise = staticmethod(lambda x: jnp.power(jax.nn.relu(x), 3))


class LeakyReLU(BaseActivation):
    """x for positive x, else slope·x (Maas et al., 2013).

    Attributes:
      negative_slope: Slope for negative x.
    """

    negative_slope: float = 0.01

    saves_slope: ClassVar[bool] = False

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return functools.partial(jax.nn.leaky_relu, negative_slope=self.negative_slope)


class ELU(BaseActivation):
    """x for positive x, else α·(exp(x) − 1) (Clevert et al., 2015).

    Attributes:
      alpha: α; the outputs are above −α.
    """

    alpha: float = 1.0

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return functools.partial(jax.nn.elu, alpha=self.alpha)


class Softplus(BaseActivation):
    """log(1 + exp(x))."""

    elementwise = staticmethod(jax.nn.softplus)


class Exp(BaseActivation):
    """exp(x)."""

    saves_slope: ClassVar[bool] = False
    elementwise = staticmethod(jnp.exp)


class SineOfReLU(BaseActivation):
    """sin(max(x, 0)), which Pax calls SineReLU."""

    elementwise = staticmethod(lambda x: jnp.sin(jax.nn.relu(x)))


def _silu(x: jax.Array, *, beta: float) -> jax.Array:
    return x * jax.nn.sigmoid(beta * x)


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
