"""Einsum: a linear map that is written as an equation."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config.checks import require

_EQUATION = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")


class Einsum(BaseLayer):
    """The linear map `einsum(equation, inputs, w)` with one weight w.

    >>> import jax
    >>> layer = Einsum(equation="btd,dnh->btnh", weight_shape=(8, 2, 4), weight_axes=(None,) * 3)
    >>> x = jax.numpy.ones((3, 5, 8))
    >>> layer.apply(layer.init(jax.random.key(0)), x).shape
    (3, 5, 2, 4)

    Attributes:
      equation: Letters of the inputs, of the weight and of the outputs: `btd,dnh->btnh`. A letter
        of inputs and weight that is not in the outputs is contracted; a letter in all three is a
        group, such as the heads of `btnh,nhd->btnd`.
      weight_shape: Shape of `w`.
      weight_axes: Logical axes of `w`.
      activation_axes: Logical axes of the outputs; None leaves their layout to the compiler.
      weight_init: Initializer of `w`, with the fans of the equation; None inherits `params_init`.

    Raises:
      ConfigError: The equation is invalid, or `weight_shape` has the wrong length.
    """

    equation: str = ""
    weight_shape: tuple[int, ...] = ()
    weight_axes: tuple[str | None, ...] = ()
    activation_axes: tuple[str | None, ...] | None = None
    weight_init: WeightInit | None = None

    def setup(self) -> None:
        """Create the weight."""
        inputs, weight, outputs = self._letters()
        expected = f"one dimension for each letter of {weight!r}"
        fits = len(weight) == len(self.weight_shape)
        require(fits, self, "weight_shape", self.weight_shape, expected)
        is_contracted = [letter in inputs and letter not in outputs for letter in weight]
        hparams = WeightHParams(
            self.weight_shape,
            self.weight_axes,
            init=self.weight_init,
            fan_in_dims=tuple(i for i, is_in in enumerate(is_contracted) if is_in),
            fan_out_dims=tuple(i for i, letter in enumerate(weight) if letter not in inputs),
        )
        self.create_variable("w", hparams, is_factor=True)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map inputs `[...]` of the equation to its outputs `[...]`.

        Raises:
          ConfigError: The rank or a size of the inputs differs from that of the equation or weight.
        """
        letters, weight, _ = self._letters()
        sizes = dict(zip(weight, self.weight_shape, strict=True))
        expected = [sizes.get(letter, letter) for letter in letters]
        fits = inputs.ndim == len(expected) and all(
            size == n for n, size in zip(expected, inputs.shape, strict=True) if isinstance(n, int)
        )
        # `einsum` would broadcast an axis of size 1.
        require(fits, self, "shape of inputs", list(inputs.shape), str(expected))
        outputs = jnp.einsum(self.equation, self.cast(inputs), self.theta.w)
        if self.activation_axes is not None:
            outputs = self.constrain(outputs, *self.activation_axes)
        return outputs

    def _letters(self) -> tuple[str, str, str]:
        """Return the letters of the inputs, of the weight and of the outputs."""
        match = _EQUATION.fullmatch(self.equation.replace(" ", ""))
        require(match, self, "equation", self.equation, "letters as in 'btd,dnh->btnh'")
        assert match is not None
        inputs, weight, outputs = match.groups()
        return inputs, weight, outputs
