"""FlaxModule: any Flax Linen module as a layer.

Layers of this library create their weights without inputs and name their axes; a Flax module does
neither. This layer therefore declares example inputs, holds the module's variables and applies the
module to them. Axis names of the module (`nn.with_partitioning`) become logical axes; a weight
without axis names is replicated. A Flax module does not declare which weights decay: those of two
or more dimensions that start at random do, such as the kernels of attention, but not its biases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors as flax_errors
from flax import linen as nn
from flax.core import meta
from jax.interpreters.partial_eval import dce_jaxpr

from layerkit.base.base_layer import NON_TRAINABLE, PARAMS, BaseLayer
from layerkit.base.weights import WeightBox, is_box, unbox
from layerkit.config import Config as Config
from layerkit.config import assigned_fields, build, is_config, sub_config_field, target_of
from layerkit.config.checks import check_regexes, require
from layerkit.errors import ConfigError

_WEIGHTS = "module"


class FlaxModule(BaseLayer):
    """A Flax module that is used as a layer and holds its weights in the layer's variables.

    >>> config = FlaxModule.HParams.config(
    ...     module_tpl=Config(nn.Dense, features=3), example_shapes=((2, 4),)
    ... )
    >>> jax.tree.map(jnp.shape, config.Instantiate().init(jax.random.key(0)))
    {'params': {'module': {'bias': (3,), 'kernel': (4, 3)}}}

    Set dtypes and initializers in the config of the module.

    Attributes:
      module_tpl: Config of the module, such as `Config(nn.Dense, features=3)`.
      example_shapes: Shape of an example of each positional input. The shapes of the weights must
        not depend on sizes that differ between calls.
      example_dtypes: Dtype of each example; None for float32.
      train_argument: Name of the module's argument that is True in training; None if it has none.
      evaluation_argument: Name of the module's argument that is False in training, such as
        `deterministic`; None if it has none.
      random_streams: Names of the random streams that the module uses in training.
      undecayed: Regular expressions of weights that weight decay spares, such as `pos_embedding`;
        each has to match the whole path of at least one weight in the module.
      kernels: Regular expressions of weights `[..., out]` of products, such as `.*Conv_1/kernel`,
        whose other dimensions are contracted. Optimizers of matrices, such as Muon, update them.

    Raises:
      ConfigError: `module_tpl` is None, the numbers of dtypes and shapes differ, a pattern matches
        no weight, or inputs need weights of other shapes than the examples.
    """

    module_tpl: Any = sub_config_field(None)
    example_shapes: tuple[tuple[int, ...], ...] = ()
    example_dtypes: tuple[str, ...] | None = None
    train_argument: str | None = None
    evaluation_argument: str | None = None
    random_streams: tuple[str, ...] = ("dropout",)
    undecayed: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()

    def setup(self) -> None:
        """Create the variables of the module."""
        expected = "a config such as Config(nn.Dense, features=3)"
        require(self.module_tpl is not None, self, "module_tpl", None, expected)
        dtypes = self.example_dtypes or ("float32",) * len(self.example_shapes)
        examples = [
            jnp.zeros(shape, dtype)
            for shape, dtype in zip(self.example_shapes, dtypes, strict=True)
        ]
        module = self._module()

        def draw(key: jax.Array) -> Any:
            streams = {PARAMS: key, **dict.fromkeys(self.random_streams, key)}
            return _box(module.init(streams, *examples, **self._mode()))

        # One `init` gives all collections, so the key of the weights is used for all of them.
        traced, shapes = jax.make_jaxpr(draw, return_shape=True)(jax.random.key(0))
        paths = jax.tree_util.tree_leaves_with_path(shapes.get(PARAMS, {}), is_leaf=is_box)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
        self._check_patterns(names)
        # The number of the result of `traced` in place of each array.
        numbers = jax.tree.unflatten(jax.tree.structure(shapes), range(len(traced.jaxpr.outvars)))

        def draw_weights(key: jax.Array) -> Any:
            boxes, structure = jax.tree.flatten(draw(key)[PARAMS], is_leaf=is_box)
            marked = [
                self._declare(name, box, is_drawn=_is_drawn(traced.jaxpr, number))
                for name, box, number in zip(
                    names, boxes, jax.tree.leaves(numbers[PARAMS]), strict=True
                )
            ]
            return jax.tree.unflatten(structure, marked)

        self._weights = self.param(_WEIGHTS, draw_weights) if PARAMS in shapes else {}
        self._others = {
            name: self.variable(
                NON_TRAINABLE, name, lambda name=name: draw(self.make_rng(PARAMS))[name]
            )
            for name in shapes
            if name != PARAMS
        }

    def fprop(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; shapes of inputs and outputs `[...]` are those of the module.

        Args:
          *args: Positional inputs of the module.
          **kwargs: Keyword inputs of the module.

        Raises:
          ConfigError: The collection of non-trainable variables is not mutable in training.
        """
        variables = {PARAMS: unbox(self._weights)}
        variables |= {name: unbox(held.value) for name, held in self._others.items()}
        rngs = {}
        if self.random_streams and not self.is_initializing() and self.is_training:
            rngs = {name: self.next_prng_key() for name in self.random_streams}
        mutable = [*self._others] if self._others and self.is_training else False
        try:
            result = self._module().apply(
                variables, *args, **self._mode(), **kwargs, rngs=rngs, mutable=mutable
            )
        except flax_errors.ScopeParamShapeError as error:
            inputs = jax.tree.map(jnp.shape, args)
            expected = f"shapes that give the same weights as the inputs {inputs}"
            raise ConfigError(
                owner=self.path_name,
                field="example_shapes",
                value=self.example_shapes,
                expected=expected,
            ) from error
        if not mutable:
            return result
        outputs, updates = result
        if not self.is_mutable_collection(NON_TRAINABLE):
            raise ConfigError(
                f"the updates of {', '.join(self._others)} would be lost",
                owner=self.path_name,
                hint=f"Apply the layer with mutable=['{NON_TRAINABLE}', …].",
            )
        for name, value in updates.items():
            if not self.is_initializing():
                held = self._others[name]
                held.value = jax.tree.map(lambda _, new: new, unbox(held.value), value)
        return outputs

    def _check_patterns(self, names: Sequence[str]) -> None:
        for field in ("undecayed", "kernels"):
            check_regexes(self, **{field: getattr(self, field)})
            for pattern in getattr(self, field):
                expected = f"patterns of weights of the module, such as {names[0]}"
                matches = any(re.fullmatch(pattern, name) for name in names)
                require(matches, self, field, pattern, expected)

    def _declare(self, name: str, box: WeightBox, *, is_drawn: bool) -> WeightBox:
        """Return a box with the declaration of a weight that starts at random, or does not."""
        rank = len(box.axes)
        undecayed, kernel = (
            any(re.fullmatch(pattern, name) for pattern in patterns)
            for patterns in (self.undecayed, self.kernels)
        )
        box = box.replace(decays=is_drawn and rank > 1 and not undecayed)
        if not kernel:
            return box
        *ins, out = box.value.shape
        dims = {"fan_in_dims": tuple(range(-rank, -1)), "fan_out_dims": (-1,)}
        return box.replace(is_factor=True, fans=(math.prod(ins), out), **dims)

    def _module(self) -> nn.Module:
        # Without a parent, because the variables are passed to `apply`.
        fields = {
            name: build(value) if is_config(value) else value
            for name, value in assigned_fields(self.module_tpl).items()
        }
        module: nn.Module = target_of(self.module_tpl)(**fields, parent=None)
        return module

    def _mode(self) -> dict[str, Any]:
        arguments = {
            self.train_argument: self.is_training,
            self.evaluation_argument: not self.is_training,
        }
        return {name: value for name, value in arguments.items() if name is not None}


def _box(variables: Any) -> Any:
    """Return variables with Flax's boxes, or without boxes, in boxes of this library."""

    def box(leaf: Any) -> WeightBox:
        if isinstance(leaf, meta.Partitioned):
            return WeightBox(leaf.value, tuple(leaf.names))
        return WeightBox(leaf, (None,) * jnp.ndim(leaf))

    return jax.tree.map(
        box, dict(variables), is_leaf=lambda leaf: isinstance(leaf, meta.Partitioned)
    )


def _is_drawn(jaxpr: Any, number: int) -> bool:
    """Return whether a result of a computation depends on its only argument."""
    used = [other == number for other in range(len(jaxpr.outvars))]
    return dce_jaxpr(jaxpr, used)[1] == [True]
