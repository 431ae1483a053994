"""Einsum: a linear map written as an equation, for projections that no other layer spells.

The equation is brought into the form of a plain product first, so that it runs as fast as one and
can be replaced by another `Dot` like any other (see `layerkit.layers.products`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, NoReturn

import jax
from flax import linen as nn

from layerkit.base_layer import BaseLayer
from layerkit.config import sub_config_field
from layerkit.layers.products import batched_matmul, create_dot, matmul
from layerkit.weights import WeightHParams, WeightInit

_EQUATION = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")


class Einsum(BaseLayer):
    """`einsum(equation, inputs, w)`, for one weight w.

    >>> import jax
    >>> layer = Einsum(equation="btd,dnh->btnh", weight_shape=(8, 2, 4), weight_axes=(None,) * 3)
    >>> x = jax.numpy.ones((3, 5, 8))
    >>> layer.apply(layer.init(jax.random.key(0)), x).shape
    (3, 5, 2, 4)

    Attributes:
      equation: Letters of the inputs, of the weight and of the outputs: `btd,dnh->btnh`. A letter
        of the inputs that is not in the outputs is contracted, and in the weight too; one that is
        in all three is a group, such as the heads of `btnh,nhd->btnd`.
      weight_shape: Shape of `w`.
      weight_axes: Logical axes of `w`.
      activation_axes: Logical axes of the outputs; None leaves their layout to the compiler.
      weight_init: How `w` starts; None inherits `params_init`. The fans are those of the equation.
      dot_tpl: What multiplies; None for the plain product.

    Raises:
      ValueError: an equation that is not of this kind, or a shape of another length.
    """

    equation: str = ""
    weight_shape: tuple[int, ...] = ()
    weight_axes: tuple[str | None, ...] = ()
    activation_axes: tuple[str | None, ...] | None = None
    weight_init: WeightInit | None = None
    dot_tpl: Any = sub_config_field(None)

    def setup(self) -> None:
        letters = self._parse()
        weight = WeightHParams(
            self.weight_shape,
            self.weight_axes,
            init=self.weight_init,
            fan_in_dims=tuple(letters.weight.index(letter) for letter in letters.contracted),
            fan_out_dims=tuple(letters.weight.index(letter) for letter in letters.outs),
        )
        self.create_variable("w", weight)
        create_dot(self, weight)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Inputs `[...]` of the equation → its outputs `[...]`.

        Raises:
          ValueError: inputs of another rank, or whose sizes contradict those of the weight.
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

    @nn.nowrap
    def _parse(self) -> _Letters:
        match = _EQUATION.fullmatch(self.equation.replace(" ", ""))
        if match is None:
            self._refuse("expected letters as in 'btd,dnh->btnh'")
        letters = _Letters(*match.groups())
        for part in dataclasses.astuple(letters):
            if len(set(part)) < len(part):
                self._refuse(f"a letter stands twice in {part!r}")
        for letter in letters.outputs:
            if letter not in letters.inputs + letters.weight:
                self._refuse(f"{letter!r} of the outputs is in neither operand")
        for one, other in ((letters.inputs, letters.weight), (letters.weight, letters.inputs)):
            for letter in one:
                if letter not in other + letters.outputs:
                    self._refuse(f"{letter!r} would be summed over within {one!r} alone")
        if len(letters.weight) != len(self.weight_shape):
            self._refuse(
                f"weight_shape={self.weight_shape} has {len(self.weight_shape)} dimensions, but"
                f" {letters.weight!r} names {len(letters.weight)}"
            )
        return letters

    @nn.nowrap
    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"{self.path_name}: equation={self.equation!r}: {reason}")

    @nn.nowrap
    def _check_inputs(self, letters: _Letters, inputs: jax.Array) -> None:
        if inputs.ndim != len(letters.inputs):
            self._refuse(f"the inputs have the shape {inputs.shape}, which is not {letters.inputs}")
        of_weight = dict(zip(letters.weight, self.weight_shape, strict=True))
        for letter, found in zip(letters.inputs, inputs.shape, strict=True):
            if of_weight.get(letter, found) != found:
                self._refuse(
                    f"{letter!r} is {found} in inputs of the shape {inputs.shape}, but"
                    f" {of_weight[letter]} in weight_shape={self.weight_shape}"
                )


@dataclasses.dataclass(frozen=True)
class _Letters:
    """The letters of an equation, by operand."""

    inputs: str
    weight: str
    outputs: str

    @property
    def contracted(self) -> str:
        return "".join(c for c in self.weight if c in self.inputs and c not in self.outputs)

    @property
    def outs(self) -> str:
        return "".join(c for c in self.weight if c not in self.inputs)

    def parts(self) -> tuple[str, str, str, str]:
        """(group, free, contracted, outs): in all three, in the inputs, summed, in the weight."""
        group = "".join(c for c in self.weight if c in self.inputs and c in self.outputs)
        free = "".join(c for c in self.inputs if c not in self.weight)
        return group, free, self.contracted, self.outs


def _permute(x: jax.Array, letters: str, wanted: str) -> jax.Array:
    return x.transpose([letters.index(letter) for letter in wanted])
