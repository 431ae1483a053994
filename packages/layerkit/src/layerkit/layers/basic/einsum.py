"""Einsum: a linear map that is written as an equation.

The equation is computed as a plain matrix product, so it runs as fast as one and supports other
`Dot`s (see `layerkit.layers.basic.dots`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import jax

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit.layers.basic.dots import Dot, batched_matmul, create_dot, matmul

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
      dot_tpl: `Dot` that multiplies; None for the plain product.

    Raises:
      ConfigError: The equation is invalid, or `weight_shape` has the wrong length.
    """

    equation: str = ""
    weight_shape: tuple[int, ...] = ()
    weight_axes: tuple[str | None, ...] = ()
    activation_axes: tuple[str | None, ...] | None = None
    weight_init: WeightInit | None = None
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Create the weight."""
        letters = self._parse()
        weight = WeightHParams(
            self.weight_shape,
            self.weight_axes,
            init=self.weight_init,
            fan_in_dims=tuple(letters.weight.index(letter) for letter in letters.contracted),
            fan_out_dims=tuple(letters.weight.index(letter) for letter in letters.outs),
        )
        self.create_variable("w", weight, is_factor=True)
        create_dot(self, weight)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map inputs `[...]` of the equation to its outputs `[...]`.

        Raises:
          ConfigError: The rank or a size of the inputs differs from that of the equation or weight.
        """
        letters = self._parse()
        self._check_inputs(letters, inputs)
        sizes = dict(zip(letters.inputs, inputs.shape, strict=True))
        sizes |= dict(zip(letters.weight, self.weight_shape, strict=True))

        def size(of: str) -> int:
            return math.prod(sizes[letter] for letter in of)

        group, free, contracted, outs = letters.parts()
        x = _permute(self.cast(inputs), letters.inputs, group + free + contracted)
        w = _permute(self.theta.w, letters.weight, group + contracted + outs)
        if group:
            x = x.reshape(size(group), size(free), size(contracted))
            w = w.reshape(size(group), size(contracted), size(outs))
            product = batched_matmul(self, x, w)
        else:
            x = x.reshape(*(sizes[letter] for letter in free), size(contracted))
            product = matmul(self, x, w.reshape(size(contracted), size(outs)))
        product = product.reshape(*(sizes[letter] for letter in group + free + outs))
        outputs = _permute(product, group + free + outs, letters.outputs)
        if self.activation_axes is not None:
            outputs = self.constrain(outputs, *self.activation_axes)
        return outputs

    def _parse(self) -> _Letters:
        match = _EQUATION.fullmatch(self.equation.replace(" ", ""))
        require(match, self, "equation", self.equation, "letters as in 'btd,dnh->btnh'")
        letters = _Letters(*match.groups() if match else ())
        for problem in letters.problems():
            raise ConfigError(problem, owner=self.path_name, field="equation", value=self.equation)
        is_valid = len(letters.weight) == len(self.weight_shape)
        expected = f"one dimension for each letter of {letters.weight!r}"
        require(is_valid, self, "weight_shape", self.weight_shape, expected)
        return letters

    def _check_inputs(self, letters: _Letters, inputs: jax.Array) -> None:
        sizes = dict(zip(letters.weight, self.weight_shape, strict=True))
        expected = [sizes.get(letter, letter) for letter in letters.inputs]
        fits = inputs.ndim == len(expected) and all(
            size == n for n, size in zip(expected, inputs.shape, strict=True) if isinstance(n, int)
        )
        require(fits, self, "shape of inputs", list(inputs.shape), str(expected))


@dataclasses.dataclass(frozen=True)
class _Letters:
    """The letters of an equation by operand."""

    inputs: str
    weight: str
    outputs: str

    def problems(self) -> Iterator[str]:
        """Yield what makes the equation invalid."""
        for part in dataclasses.astuple(self):
            if len(set(part)) < len(part):
                yield f"{part!r} contains a letter twice"
        for letter in self.outputs:
            if letter not in self.inputs + self.weight:
                yield f"output {letter!r} is not in an operand"
        for one, other in ((self.inputs, self.weight), (self.weight, self.inputs)):
            for letter in one:
                if letter not in other + self.outputs:
                    yield f"{letter!r} would be summed over within {one!r} alone"

    @property
    def contracted(self) -> str:
        return "".join(c for c in self.weight if c in self.inputs and c not in self.outputs)

    @property
    def outs(self) -> str:
        return "".join(c for c in self.weight if c not in self.inputs)

    def parts(self) -> tuple[str, str, str, str]:
        """Return (group, free, contracted, outs).

        Group letters are in all three operands, free ones in the inputs but not in the weight, and
        outs in the weight but not in the inputs.
        """
        group = "".join(c for c in self.weight if c in self.inputs and c in self.outputs)
        free = "".join(c for c in self.inputs if c not in self.weight)
        return group, free, self.contracted, self.outs


def _permute(x: jax.Array, letters: str, target: str) -> jax.Array:
    return x.transpose([letters.index(letter) for letter in target])
