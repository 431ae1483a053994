"""FlaxModule: any module of Flax Linen as a layer.

Layers of this library make their weights without inputs and name their axes; a plain Flax module
does neither. This layer says for it what inputs look like, keeps its variables as its own, and runs
it as a function of them. Names that the module gave its axes (`nn.with_partitioning` and the like)
become logical axes; without them a weight is replicated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta

from layerkit.base_layer import NON_TRAINABLE, PARAMS, BaseLayer
from layerkit.config import Config as Config
from layerkit.config import assigned_fields, build, is_config, sub_config_field, target_of
from layerkit.weights import WeightBox

_WEIGHTS = "module"


class FlaxModule(BaseLayer):
    """A Flax module with its weights, in the tree and in the life of this library's layers.

    >>> config = FlaxModule.HParams.config(
    ...     module_tpl=Config(nn.Dense, features=3), example_shapes=((2, 4),)
    ... )
    >>> jax.tree.map(jnp.shape, config.Instantiate().init(jax.random.key(0)))
    {'params': {'module': {'bias': (3,), 'kernel': (4, 3)}}}

    Dtypes and initialisers are the module's own: set them in its config.

    Attributes:
      module_tpl: Config of the module, such as `Config(nn.Dense, features=3)`.
      example_shapes: Shape of each positional input, float32 unless `example_dtypes` says
        otherwise; only the module's weights must not depend on what is made up here.
      example_dtypes: Dtype of each, or None.
      train_argument: Name of the module's argument that is True in training; None for none.
      evaluation_argument: Name of the module's argument that is False in training
        (`deterministic`); None for none.
      random_streams: Names of the random streams that the module draws from in training.

    Raises:
      ValueError: no module, or dtypes that are not one for each shape.
    """

    module_tpl: Any = sub_config_field(None)
    example_shapes: tuple[tuple[int, ...], ...] = ()
    example_dtypes: tuple[str, ...] | None = None
    train_argument: str | None = None
    evaluation_argument: str | None = None
    random_streams: tuple[str, ...] = ("dropout",)

    def setup(self) -> None:
        if self.module_tpl is None:
            raise ValueError(
                f"{self.path_name}: module_tpl is not set; for example Config(nn.Dense, features=3)"
            )
        dtypes = self.example_dtypes or ("float32",) * len(self.example_shapes)
        if len(dtypes) != len(self.example_shapes):
            raise ValueError(
                f"{self.path_name}: {len(dtypes)} example_dtypes for"
                f" {len(self.example_shapes)} example_shapes"
            )
        examples = [
            jnp.zeros(shape, dtype)
            for shape, dtype in zip(self.example_shapes, dtypes, strict=True)
        ]
        module = self._module()

        def draw(key: jax.Array) -> Any:
            streams = {PARAMS: key, **dict.fromkeys(self.random_streams, key)}
            return _boxed(module.init(streams, *examples, **self._mode()))

        # One draw gives all collections: what is not trained is drawn with the weights' key too.
        names = jax.eval_shape(draw, jax.random.key(0))
        has_weights = PARAMS in names
        self._weights = self.param(_WEIGHTS, lambda key: draw(key)[PARAMS]) if has_weights else {}
        self._others = {
            name: self.variable(
                NON_TRAINABLE, name, lambda name=name: draw(self.make_rng(PARAMS))[name]
            )
            for name in names
            if name != PARAMS
        }

    def fprop(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's `__call__` gives: inputs and outputs `[...]` are its own.

        Args:
          *args: Positional inputs of the module.
          **kwargs: Its other inputs.

        Raises:
          ValueError: training without a mutable collection, which would lose the module's updates.
        """
        variables = {PARAMS: _unboxed(self._weights)}
        variables |= {name: _unboxed(held.value) for name, held in self._others.items()}
        rngs = {}
        if self.random_streams and not self.is_initializing() and self.is_training:
            rngs = {name: self.next_prng_key() for name in self.random_streams}
        mutable = [*self._others] if self._others and self.is_training else False
        result = self._module().apply(
            variables, *args, **self._mode(), **kwargs, rngs=rngs, mutable=mutable
        )
        if not mutable:
            return result
        outputs, updates = result
        if not self.is_mutable_collection(NON_TRAINABLE):
            raise ValueError(
                f"{self.path_name}: the updates of {', '.join(self._others)} would be lost;"
                f" apply with mutable=['{NON_TRAINABLE}', …]"
            )
        for name, value in updates.items():
            if not self.is_initializing():
                held = self._others[name]
                held.value = jax.tree.map(lambda _, new: new, _unboxed(held.value), value)
        return outputs

    @nn.nowrap
    def _module(self) -> nn.Module:
        # Detached from this layer, since its variables are handed to it.
        fields = {
            name: build(value) if is_config(value) else value
            for name, value in assigned_fields(self.module_tpl).items()
        }
        module: nn.Module = target_of(self.module_tpl)(**fields, parent=None)
        return module

    @nn.nowrap
    def _mode(self) -> dict[str, Any]:
        arguments = {
            self.train_argument: self.is_training,
            self.evaluation_argument: not self.is_training,
        }
        return {name: value for name, value in arguments.items() if name is not None}


def _boxed(variables: Any) -> Any:
    """Flax's boxes, and weights without a box, as boxes of this library."""

    def box(leaf: Any) -> WeightBox:
        if isinstance(leaf, meta.Partitioned):
            return WeightBox(leaf.value, tuple(leaf.names))
        return WeightBox(leaf, (None,) * jnp.ndim(leaf))

    return jax.tree.map(
        box, dict(variables), is_leaf=lambda leaf: isinstance(leaf, meta.Partitioned)
    )


def _unboxed(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, WeightBox) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, WeightBox),
    )
