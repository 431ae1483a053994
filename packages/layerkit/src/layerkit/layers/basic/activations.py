"""Element-wise activations as layers, so that a config can choose one.

Each maps `[...]` of any shape to the same shape in the compute dtype. A custom activation is a
subclass of `BaseActivation` with a `function` or an `fprop`; every `activation_tpl` accepts it.

The backward pass of a `function` keeps one array, the slope (`save_slopes`). JAX would keep an
array for each step of the formula: five for the GELU.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base.base_layer import BaseLayer
from layerkit.ops.remat import ElementWise, save_slopes


class BaseActivation(BaseLayer):
    """The base class of activations, which have no weights.

    A subclass defines `function`, or `fprop` if it is not a pure function of its inputs.

    Attributes:
      saves_slope: False for a function whose gradient in JAX keeps no more than its slope.
    """

    saves_slope: ClassVar[bool] = True

    @nn.nowrap
    def function(self) -> ElementWise:
        """Return the function of `[...]` that the layer applies."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define fprop or function")

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

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return _identity


class ReLU(BaseActivation):
    """max(x, 0)."""

    saves_slope: ClassVar[bool] = False

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return jax.nn.relu


class SquaredReLU(BaseActivation):
    """max(x, 0)² (So et al., 2021: Primer)."""

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return _squared_relu


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

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return jax.nn.sigmoid


class Tanh(BaseActivation):
    """tanh(x)."""

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return jnp.tanh


class ReLU6(BaseActivation):
    """min(max(x, 0), 6) (Krizhevsky, 2010)."""

    saves_slope: ClassVar[bool] = False

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return jax.nn.relu6


class CubedReLU(BaseActivation):
    """max(x, 0)³."""

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return _cubed_relu


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

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return jax.nn.softplus


class Exp(BaseActivation):
    """exp(x)."""

    saves_slope: ClassVar[bool] = False

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return jnp.exp


class SineOfReLU(BaseActivation):
    """sin(max(x, 0)), which Pax calls SineReLU."""

    def function(self) -> ElementWise:
        """Return the function of `[...]`."""
        return _sine_of_relu


def _identity(x: jax.Array) -> jax.Array:
    return x


def _squared_relu(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def _silu(x: jax.Array, *, beta: float) -> jax.Array:
    return x * jax.nn.sigmoid(beta * x)


def _cubed_relu(x: jax.Array) -> jax.Array:
    return jnp.power(jax.nn.relu(x), 3)


def _sine_of_relu(x: jax.Array) -> jax.Array:
    return jnp.sin(jax.nn.relu(x))
