"""The methods of layers that Flax leaves as they are.

Flax wraps every method that a module class defines: a call sets the layer up first and opens a
named scope. That must not happen to methods which `setup` calls, or which are called on a layer
without variables. Methods of a plain base class are not wrapped, and `mark_plain_methods` extends
this to the private methods of layers and to those that override plain ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base.step_reports import (
    AUX_LOSS,
    DEFAULT_VERBOSITY,
    REPORTS,
    Kind,
    immutable_error,
    sow_aux_loss,
    sow_summary,
    warn_of_unset_train,
)
from layerkit.base.weight_formats import StoredWeight, create_stored
from layerkit.base.weights import (
    WeightHParams,
    WeightInit,
    check_declaration,
    draw_boxed,
    floating_dtype,
    shared_ids,
    unbox,
)
from layerkit.config import build, is_config, target_of
from layerkit.config.checks import require
from layerkit.config.field_types import FieldTypeError
from layerkit.config.hparams import derive_fields
from layerkit.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object

# Names of the Flax collections that layers write to.
PARAMS = "params"
NON_TRAINABLE = "non_trainable"
CACHE = "cache"
# Parts of a cache that the samples of a prompt share, which a step reads and never changes.
PROMPT_CACHE = "prompt_cache"
_CACHES = (CACHE, PROMPT_CACHE)
# Flax's name for state whose "gradient" is its next value, such as the scales of fp8 products.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

# Flax's name for the outputs of layers, which `apply(…, capture_intermediates=…)` returns.
INTERMEDIATES = "intermediates"

# Collections that layers with copies, such as `Repeat`, stack.
COLLECTIONS = (PARAMS, NON_TRAINABLE, OVERWRITE_WITH_GRADIENT, *REPORTS, *_CACHES, INTERMEDIATES)

# The random stream that layers draw from while training (dropout and the like).
RANDOM = "random"

# Fields that a child inherits from its parent if it does not set its own.
INHERITED_FIELDS = ("dtype", "fprop_dtype", "weight_format", "params_init", "train", "sharding")


def mark_plain_methods(cls: type) -> None:
    """Mark the methods of a new layer class that Flax must not wrap.

    They are private ones, and those that override a plain method of a base class.
    """
    for name, method in vars(cls).items():
        if inspect.isfunction(method) and not name.startswith("__"):
            base = getattr(super(cls, cls), name, None)
            overrides = inspect.isfunction(base) and not hasattr(base, "method_handler_wrapped")
            if name.startswith("_") or overrides:
                nn.nowrap(method)


class _Theta:
    """The weights of a layer as attributes, cast to its compute dtype."""

    def __init__(self, layer: Any):
        self._layer = layer

    def __getattr__(self, name: str) -> jax.Array:
        self._layer.run_setup()
        weights = self._layer._records("weights")
        if name not in weights:
            owner = self._layer.path_name
            raise UnknownNameError("unknown weight", owner=owner, value=name, choices=weights)
        if isinstance(weights[name], StoredWeight):
            return weights[name].restored(self._layer.compute_dtype)
        return self._layer.cast(weights[name])


class LayerMethods(_Module):
    """The plain methods of `BaseLayer`."""

    if TYPE_CHECKING:

        def run_setup(self) -> None:
            """Run `setup` if it has not run yet; `BaseLayer` defines it."""

    # Methods that a subclass calls in setup.

    def create_variable(
        self, name: str, weight: WeightHParams, *, trainable: bool = True, is_factor: bool = False
    ) -> None:
        """Create a weight, to be read as `self.theta.<name>`.

        Args:
          name: Name in the tree of weights.
          weight: Shape, logical axes, initializer and dtype.
          trainable: False for state such as moving statistics, read and written with `get_var` and
            `update_var`.
          is_factor: True for the weight of a product. `weight_format` may store it in integers.

        Raises:
          ConfigError: A size is below one, axes do not name every dimension or have no rule, or an
            inherited dtype is not floating-point.
        """
        check_declaration(self, name, weight, sharding=self.inherited("sharding"))
        init = weight.init or self.inherited("params_init") or WeightInit.Xavier()
        dtype = jnp.dtype(weight.dtype or self._inherited_dtype("dtype"))

        draw = partial(draw_boxed, weight=weight, init=init, dtype=dtype, is_factor=is_factor)
        weight_format = self.inherited("weight_format") if is_factor else None
        if weight_format is not None:
            stored = create_stored(self, name, weight, weight_format, draw)
            self._records("weights")[name] = stored
        elif trainable:
            self._records("weights")[name] = self.param(name, draw)
        else:
            variable = self.variable(NON_TRAINABLE, name, lambda: draw(self.make_rng(PARAMS)))
            self._records("variables")[name] = variable

    def create_child(self, name: str, template: Any, **overrides: Any) -> None:
        """Create a child from a template, to be used as `self.<name>`.

        Args:
          name: Attribute and path of the child.
          template: Config of a layer. Each call creates a layer with its own weights, unless the
            config has a `shared_weight_id`.
          **overrides: Fields of the child that this layer derives.

        Raises:
          TypeError: The template is not the config of a layer.
          ConfigError: An explicit value in the template contradicts an override.
        """
        setattr(self, name, self._make_child(name, template, overrides))

    def create_children(self, name: str, templates: Sequence[Any], **overrides: Any) -> None:
        """Create a list of children, `self.<name>[i]`, with paths `<name>_<i>`."""
        made = [
            self._make_child(f"{name}_{index}", template, overrides)
            for index, template in enumerate(templates)
        ]
        setattr(self, name, made)

    # Methods that a subclass calls in fprop.

    @property
    def theta(self) -> Any:
        """The weights of this layer, cast to the compute dtype: `self.theta.w`."""
        return _Theta(self)

    def get_var(self, name: str) -> jax.Array:
        """Return the value, `[...]`, of a variable that was created with `trainable=False`."""
        return unbox(self._variable(name).value)

    def update_var(self, name: str, value: jax.Array) -> None:
        """Set a variable that was created with `trainable=False`, except during initialization.

        Args:
          name: Name of the variable.
          value: Value `[...]` of the declared shape; it is cast to the declared dtype.

        Raises:
          AttributeError: There is no such variable. The message suggests similar names.
          ValueError: The shape differs, or the collection is not mutable and the update is lost.
        """
        if not self.is_mutable_collection(NON_TRAINABLE):
            raise immutable_error(self, "the update would be lost", name, NON_TRAINABLE)
        variable = self._variable(name)
        declared = unbox(variable.value)
        shape, expected = jnp.shape(value), f"{declared.shape}, as declared"
        require(shape == declared.shape, self, f"shape of {name}", shape, expected)
        if not self.is_initializing():
            variable.value = jnp.asarray(value, declared.dtype)

    def add_aux_loss(
        self, name: str, value: jax.Array, *factors: jax.Array, weight: Any = None
    ) -> None:
        """Add Σ value·factors to the training loss, the summed entries of a product of means.

        Args:
          name: Name below that of the layer.
          value: Mean over tokens or rows, a scalar or `[entries]`.
          *factors: Further means, of the same shape.
          weight: Weight of a microbatch in the means, as its tokens; None for equal weights.

        Raises:
          ValueError: The collection is not mutable in training, so that the loss would be ignored.
        """
        sow_aux_loss(self, name, (value, *factors), weight=weight)

    def add_summary(
        self,
        name: str,
        value: jax.Array,
        *,
        kind: Kind = "scalar",
        verbosity: int = DEFAULT_VERBOSITY,
    ) -> None:
        """Report a value, if summaries are collected.

        Args:
          name: Name below that of the layer.
          value: A scalar (an array counts as its mean); for `histogram` any array; for `image`
            `[rows, height, width, channels]`, uint8 or from 0 to 1, of which a few rows are kept.
          kind: `scalar`, `histogram` or `image`. The last two are computed at summary steps alone.
          verbosity: Tasks with a lower `summary_verbosity` leave it out.

        Raises:
          ValueError: The kind is unknown, or an image has the wrong shape.
        """
        sow_summary(self, name, value, kind=kind, verbosity=verbosity)

    def next_prng_key(self) -> jax.Array:
        """Return a scalar key that is unique to this layer, call and step.

        Raises:
          flax.errors.InvalidRngError: The caller gave no `rngs={"random": key}`.
        """
        return self.make_rng(RANDOM)

    def constrain(
        self,
        x: jax.Array,
        *axes: str | None,
        gradient_axes: tuple[str | None, ...] | None = None,
    ) -> jax.Array:
        """Constrain the layout of `x` `[...]` by one logical axis name per dimension, in a mesh.

        `gradient_axes` are those of its gradient if they are others; see `BoundSharding.constrain`.
        """
        sharding = self.inherited("sharding")
        if sharding is None:
            return x
        path = self.path_name
        return sharding.constrain(x, axes, gradient_axes=gradient_axes, owner=path)

    def cast(self, x: jax.Array) -> jax.Array:
        """Return `x` `[...]`, cast to the compute dtype if it is floating."""
        x = jnp.asarray(x)  # NumPy promotes bfloat16 to float32 where JAX does not
        return x.astype(self.compute_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    # Inherited values.

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of the computation; raises ValueError if it is not floating."""
        return self._inherited_dtype("fprop_dtype")

    @property
    def is_training(self) -> bool:
        """True in the training variant.

        Read it last in a condition: a model that reads it, and whose `train` nobody set, warns.
        """
        warn_of_unset_train(self, collection=AUX_LOSS)
        return bool(self.inherited("train"))

    @property
    def path_name(self) -> str:
        """Class and path of this layer for messages: `TransformerLm(lm/softmax)`."""
        # Flax tries the setup of a layer in a loop first on its own, without a path.
        path = "/".join(self.path) if self.scope is not None else ""
        return f"{type(self).__qualname__}({path or self.name or ''})"

    def inherited(self, field: str) -> Any:
        """Return the value of a field of this layer, or of its nearest parent that sets it."""
        value = getattr(self, field)
        if value is None and isinstance(self.parent, LayerMethods):
            return self.parent.inherited(field)
        return value

    # Initialization.

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Draw the weights.

        Args:
          rngs: A key, or a dict of keys by stream.
          *args: Inputs of `fprop` (or of `method=…`), which are then run too; not needed.
          **kwargs: Likewise.

        Returns:
          Variables as nested dicts of plain arrays: `{'params': …, 'non_trainable': …}`.
        """
        return unbox(self.init_boxed(rngs, *args, **kwargs))

    def init_boxed(
        self, rngs: Any, *args: Any, method: str | Callable[..., Any] | None = None, **kwargs: Any
    ) -> Any:
        """Draw the weights as `init` does, each in a box with its logical axes."""
        run = method or (type(self).__call__ if args or kwargs else None)

        def create(layer: Any, *args: Any, **kwargs: Any) -> None:
            layer.create_weights()
            if isinstance(run, str):
                getattr(layer, run)(*args, **kwargs)
            elif run is not None:
                run(layer, *args, **kwargs)

        # One key serves all streams: running `fprop` in training needs random numbers as well.
        streams = rngs if isinstance(rngs, dict) else {PARAMS: rngs, RANDOM: rngs}
        states = (NON_TRAINABLE, OVERWRITE_WITH_GRADIENT)
        _, variables = nn.Module.init_with_output(
            self, streams, *args, method=create, mutable=list(COLLECTIONS), **kwargs
        )
        kept = {name: variables[name] for name in states if name in variables}
        return {PARAMS: variables.get(PARAMS, {}), **kept}

    def _variable(self, name: str) -> Any:
        self.run_setup()
        variables = self._records("variables")
        if name not in variables:
            owner = self.path_name
            raise UnknownNameError("unknown variable", owner=owner, value=name, choices=variables)
        return variables[name]

    def _root(self) -> Any:
        root: Any = self
        while isinstance(root.parent, LayerMethods):
            root = root.parent
        return root

    def _inherited_dtype(self, field: str) -> jnp.dtype:
        return floating_dtype(self.inherited(field), field=field, owner=self.path_name)

    def _records(self, kind: str) -> Any:
        """Per-binding bookkeeping, outside Flax's frozen attributes."""
        return vars(self).setdefault(f"_layer_{kind}", {})

    def _all_children(self) -> list[Any]:
        """Return the layers in fields and those that `setup` assigned, also in lists and dicts."""
        values = [value for name, value in vars(self).items() if not name.startswith("_")]
        leaves = jax.tree.leaves(values, is_leaf=is_config)
        children = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
        for child in children:
            if not isinstance(child, LayerMethods):
                raise FieldTypeError(
                    owner=self.path_name,
                    field="child",
                    value=type(child),
                    expected="a BaseLayer",
                    hint="The weights of a plain Flax module cannot be created without inputs.",
                )
            self._refuse_contradiction(child)
        return children

    def _refuse_contradiction(self, child: Any) -> None:
        """Raise an error if a shared layer would inherit different values from its parents."""
        for field in INHERITED_FIELDS:
            value, expected = child.inherited(field), self.inherited(field)
            if getattr(child, field) is None and value != expected:
                raise ConfigError(
                    f"contradicts {self.path_name}, which shares it",
                    owner=child.path_name,
                    field=field,
                    value=value,
                    expected=repr(expected),
                    hint=f"Set {field} on the shared config.",
                )

    def _make_child(self, name: str, template: Any, overrides: dict[str, Any]) -> Any:
        where = f"{self.path_name}.{name}"
        target = target_of(template) if is_config(template) else None
        if not (isinstance(target, type) and issubclass(target, LayerMethods)):
            owner, expected = self.path_name, "the config of a layer"
            raise FieldTypeError(owner=owner, field=name, value=template, expected=expected)
        filled = derive_fields(template, where, **overrides)
        for field in INHERITED_FIELDS:
            if getattr(filled, field) is None:
                setattr(filled, field, self.inherited(field))
        if filled.shared_weight_id is None:
            return build(filled)
        first, known, layer = self._share(filled.shared_weight_id, where, filled)
        if known != filled:
            raise ConfigError(
                owner=where,
                field="shared_weight_id",
                value=filled.shared_weight_id,
                expected=f"the config that {first} has with the same id",
                hint=f"The configs differ:\n{filled}\n{known}",
            )
        return layer

    def keep_shared_weights_inside(self, template: Any) -> None:
        """Reserve the ids used in `template` for the body of this layer, which has stacked weights.

        Raises:
          ConfigError: A shared layer is also used outside, where its weights cannot be the same.
        """
        for shared_id in shared_ids(template):
            self._share(shared_id, self.path_name, None)

    def _share(self, shared_id: str, where: str, config: Any) -> tuple[str, Any, Any]:
        """Return the path, config and layer of the first user of an id, in the whole model.

        The config and the layer of ids in the body of a repeated layer are None.
        """
        shared = vars(self._root()).setdefault("_shared_by_id", {})
        if shared_id not in shared:
            shared[shared_id] = (where, config, None if config is None else build(config))
        first, known, layer = shared[shared_id]
        if (known is None) != (config is None) or (config is None and first != where):
            raise ConfigError(
                "weights cannot be shared into or out of a repeated layer",
                owner=where,
                field="shared_weight_id",
                value=shared_id,
                expected=f"an id that {first} does not use",
            )
        return first, known, layer
