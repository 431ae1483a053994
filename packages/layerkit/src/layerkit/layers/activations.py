"""Element-wise activations as layers, so that a config can choose one.

Each maps `[...]` of any shape to the same shape in the compute dtype. A custom activation is a
subclass of `BaseActivation` with an `fprop`; every `activation_tpl` accepts it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base_layer import BaseLayer


class BaseActivation(BaseLayer):
    """The base class of activations, which have no weights."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[...]` to `[...]`, element by element."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define fprop")


class Identity(BaseActivation):
    """The identity x, for templates that must name an activation."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return self.cast(inputs)


class ReLU(BaseActivation):
    """max(x, 0)."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jax.nn.relu(self.cast(inputs))


class SquaredReLU(BaseActivation):
    """max(x, 0)² (So et al., 2021: Primer)."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jnp.square(jax.nn.relu(self.cast(inputs)))


class GELU(BaseActivation):
    """x·Φ(x), Φ the normal distribution function (Hendrycks and Gimpel, 2016).

    Attributes:
      approximate: True to use 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))). It is cheaper, differs
        by at most about 5e-4, and most published models were trained with it.
    """

    approximate: bool = True

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jax.nn.gelu(self.cast(inputs), approximate=self.approximate)


class SiLU(BaseActivation):
    """x·sigmoid(beta·x) (Elfwing et al., 2017); the gate of SwiGLU.

    Attributes:
      beta: Factor inside of the sigmoid (Ramachandran et al., 2017); 1.702 in gpt-oss.
    """

    beta: float = 1.0

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        inputs = self.cast(inputs)
        if self.beta == 1.0:
            return jax.nn.silu(inputs)
        return inputs * jax.nn.sigmoid(self.beta * inputs)


# Name of the same function in Ramachandran et al. (2017).
Swish = SiLU


class Sigmoid(BaseActivation):
    """1 / (1 + exp(-x))."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jax.nn.sigmoid(self.cast(inputs))


class Tanh(BaseActivation):
    """tanh(x)."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jnp.tanh(self.cast(inputs))


class ReLU6(BaseActivation):
    """min(max(x, 0), 6) (Krizhevsky, 2010)."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jax.nn.relu6(self.cast(inputs))


class CubedReLU(BaseActivation):
    """max(x, 0)³."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jnp.power(jax.nn.relu(self.cast(inputs)), 3)


class LeakyReLU(BaseActivation):
    """x for positive x, else slope·x (Maas et al., 2013).

    Attributes:
      negative_slope: Slope for negative x.
    """

    negative_slope: float = 0.01

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jax.nn.leaky_relu(self.cast(inputs), self.negative_slope)


class ELU(BaseActivation):
    """x for positive x, else α·(exp(x) − 1) (Clevert et al., 2015).

    Attributes:
      alpha: α; the outputs are above −α.
    """

    alpha: float = 1.0

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jax.nn.elu(self.cast(inputs), self.alpha)


class Softplus(BaseActivation):
    """log(1 + exp(x))."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jax.nn.softplus(self.cast(inputs))


class Exp(BaseActivation):
    """exp(x)."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jnp.exp(self.cast(inputs))


class SineReLU(BaseActivation):
    """x for positive x, else ε·(sin(x) − cos(x)).

    Attributes:
      epsilon: ε, the amplitude of the waves for negative x, over √2.
    """

    epsilon: float = 0.0025

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        x = self.cast(inputs)
        return jnp.where(x > 0, x, self.epsilon * (jnp.sin(x) - jnp.cos(x)))


class SineOfReLU(BaseActivation):
    """sin(max(x, 0)), which Pax calls SineReLU."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Apply the activation to `[...]`."""
        return jnp.sin(jax.nn.relu(self.cast(inputs)))
