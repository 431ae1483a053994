"""Activations: maps that treat every element alike, as layers, so that a config can choose one.

All take `[...]` of any shape and give the same shape in the compute dtype. A new one is a class
with an `fprop`; whatever has an `activation_tpl` takes any `BaseActivation`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base_layer import BaseLayer


class BaseActivation(BaseLayer):
    """What an `activation_tpl` holds; has no weights."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """`[...]` → `[...]`, element by element."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define fprop")


class Identity(BaseActivation):
    """x: no activation, where a template must name one."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return self.cast(inputs)


class ReLU(BaseActivation):
    """max(x, 0)."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jax.nn.relu(self.cast(inputs))


class SquaredReLU(BaseActivation):
    """max(x, 0)² (So et al., 2021: Primer)."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jnp.square(jax.nn.relu(self.cast(inputs)))


class GELU(BaseActivation):
    """x·Φ(x), Φ the normal distribution function (Hendrycks and Gimpel, 2016).

    Attributes:
      approximate: Uses 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), which is cheaper and at most
        about 5e-4 away; it is what most published models were trained with.
    """

    approximate: bool = True

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jax.nn.gelu(self.cast(inputs), approximate=self.approximate)


class SiLU(BaseActivation):
    """x·sigmoid(x) (Elfwing et al., 2017); the gate of SwiGLU."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jax.nn.silu(self.cast(inputs))


# The same function under the name of Ramachandran et al. (2017).
Swish = SiLU


class Sigmoid(BaseActivation):
    """1 / (1 + exp(-x))."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(self.cast(inputs))


class Tanh(BaseActivation):
    """tanh(x)."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jnp.tanh(self.cast(inputs))


class ReLU6(BaseActivation):
    """min(max(x, 0), 6) (Krizhevsky, 2010)."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jax.nn.relu6(self.cast(inputs))


class CubedReLU(BaseActivation):
    """max(x, 0)³."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jnp.power(jax.nn.relu(self.cast(inputs)), 3)


class LeakyReLU(BaseActivation):
    """x where it is positive, else slope·x (Maas et al., 2013).

    Attributes:
      negative_slope: The slope below 0.
    """

    negative_slope: float = 0.01

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jax.nn.leaky_relu(self.cast(inputs), self.negative_slope)


class ELU(BaseActivation):
    """x where it is positive, else α·(exp(x) − 1) (Clevert et al., 2015).

    Attributes:
      alpha: The bound below is −α.
    """

    alpha: float = 1.0

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jax.nn.elu(self.cast(inputs), self.alpha)


class Softplus(BaseActivation):
    """log(1 + exp(x))."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jax.nn.softplus(self.cast(inputs))


class Exp(BaseActivation):
    """exp(x)."""

    def fprop(self, inputs: jax.Array) -> jax.Array:
        return jnp.exp(self.cast(inputs))


class SineReLU(BaseActivation):
    """x where it is positive, else ε·(sin(x) − cos(x)).

    Attributes:
      epsilon: How large the waves below 0 are.
    """

    epsilon: float = 0.0025

    def fprop(self, inputs: jax.Array) -> jax.Array:
        x = self.cast(inputs)
        return jnp.where(x > 0, x, self.epsilon * (jnp.sin(x) - jnp.cos(x)))
