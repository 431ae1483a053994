"""Products of activations and weights: efficient on all backends, and replaceable.

The weight gradient of `[batch, length, in] · [in, out]` contracts two axes, for which XLA's CPU
backend transposes both operands; a feed-forward layer is then three times slower. With batch and
length merged into one axis of tokens there are no copies. Accelerators compute both equally fast.
On a single CPU, the weight gradient multiplies a transposed copy of the inputs, which XLA's fast
kernels require.

A layer that multiplies by a weight has a field `dot_tpl`: None for the plain product, or a template
of a `Dot`, such as a quantized product or a low-rank adapter. The layer creates the weight and its
product together and multiplies by `matmul` (or `batched_matmul`):

    self.create_variable("w", weight, is_factor=True)
    create_dot(self, weight)
    …
    matmul(self, x, self.theta.w)

`replace_dots` sets a `Dot` in all such layers of a model's config.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.custom_derivatives import SymbolicZero

from layerkit.base.base_layer import BaseLayer
from layerkit.base.sharding import is_single_cpu
from layerkit.base.weights import WeightHParams
from layerkit.config import Config, assigned_fields, field_names, is_config, target_of, walk_configs
from layerkit.config.checks import check_regex, require
from layerkit.config.hparams import unmet_conditions
from layerkit.errors import ConfigError


class GroupedProduct(Protocol):
    """The product of sorted rows with one weight per group; a pytree.

    Attributes:
      group_of_row: Group of each row, int32 `[rows]`; num_groups for unused rows.
      num_groups: Number of groups.
    """

    @property
    def group_of_row(self) -> jax.Array:
        """Group of each row, int32 `[rows]`."""

    @property
    def num_groups(self) -> int:
        """Number of groups."""

    def maximum(self, values: jax.Array) -> jax.Array:
        """Return the maximum of `[...]` over the devices that hold other parts of the groups."""

    def __call__(self, rows: jax.Array, w: jax.Array) -> jax.Array:
        """Multiply `[rows, in]` by `[group, in, out]`: `[rows, out]`."""


class GroupedArray(NamedTuple):
    """An array that a grouped product reads.

    Attributes:
      value: The array `[...]`.
      axes: Logical axes of a weight; None for a state that all devices share and whose gradient is
        the maximum over devices.
    """

    value: jax.Array
    axes: tuple[str | None, ...] | None


class Dot(BaseLayer):
    """The product of activations and a weight of the owning layer; base class of other products.

    A subclass that needs the declaration of the weight has a field `weight: WeightHParams | None`,
    which the owner sets.
    """

    def fprop(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiply `[..., in]` by `[in, out]`: `[..., out]` in the dtype of both.

        For a group of weights, such as experts: `[group, tokens, in]` and `[group, in, out]` to
        `[group, tokens, out]`.
        """
        return x @ w

    @nn.nowrap
    def grouped_arrays(self) -> dict[str, GroupedArray]:
        """Return the arrays that `grouped` reads besides w, by name. None in this class."""
        return {}

    @nn.nowrap
    def grouped(
        self,
        rows: jax.Array,
        w: jax.Array,
        product: GroupedProduct,
        shards: Mapping[str, jax.Array],
    ) -> jax.Array:
        """Multiply sorted rows `[rows, in]` by the weights `[group, in, out]` of their groups.

        A subclass that overrides `fprop` overrides this method, too, to support experts without a
        capacity. It runs inside of `jax.shard_map` and reads arrays from its arguments only.

        Args:
          rows: Rows sorted by group.
          w: Weights of the groups of this device.
          product: Plain product of these rows and the weights of their groups.
          shards: Shards of the arrays of `grouped_arrays` on this device.

        Returns:
          `[rows, out]`, with arbitrary values for unused rows.

        Raises:
          ConfigError: The class does not support grouped rows.
        """
        is_plain, expected = type(self).fprop is Dot.fprop, "a product with a method `grouped`"
        expected += ", since experts have no capacity"
        require(is_plain, self, "dot_tpl", type(self).__name__, expected)
        return product(rows, w)


def create_dot(layer: BaseLayer, weight: WeightHParams, *, name: str = "w") -> None:
    """Create the child that multiplies by a weight, if the layer has a `dot_tpl`.

    The child is named `dot` for the weight `w` and `<name>_dot` for any other weight.

    Args:
      layer: Layer that owns the weight and has a field `dot_tpl`; called in its `setup`.
      weight: Declaration of the weight.
      name: Name of the weight.
    """
    dot_tpl = layer.dot_tpl
    if dot_tpl is not None:
        fields = {"weight": weight} if "weight" in field_names(dot_tpl) else {}
        layer.create_child(_dot_name(name), dot_tpl, **fields)


def merge_tokens(layer: BaseLayer, x: jax.Array) -> jax.Array:
    """Merge `[batch, length, dims]` into `[tokens, dims]` for the products that read it.

    `x` is returned unchanged if the length is sharded, since merging would gather it, and under
    sequence parallelism, which shards the length of the product.

    Args:
      layer: Layer that multiplies; its bound sharding is read.
      x: Activations with any leading axes.
    """
    sharding = layer.inherited("sharding")
    names = ("length", "residual_length")
    if sharding is not None and any(sharding.is_split(name) for name in names):
        return x
    # Not -1, which is ambiguous for an empty batch.
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def matmul(layer: BaseLayer, x: jax.Array, w: jax.Array, *, name: str = "w") -> jax.Array:
    """Multiply `[..., in]` by `[in, out]`, with merged tokens if possible: `[..., out]`.

    Args:
      layer: Layer that owns the weight.
      x: Activations in the compute dtype.
      w: Weight in the compute dtype.
      name: Name of the weight, which selects the layer's `Dot`.
    """
    dot = _dot_of(layer, name)
    if dot is operator.matmul and is_single_cpu(layer.inherited("sharding")):
        dot = _matmul_on_cpu
    product = dot(merge_tokens(layer, x), w)
    return product.reshape(*x.shape[:-1], w.shape[-1])


@jax.custom_jvp
def _matmul_on_cpu(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply `[tokens, in]` by `[in, out]`: `[tokens, out]`."""
    return x @ w


def _matmul_on_cpu_jvp(
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array | SymbolicZero, jax.Array | SymbolicZero],
) -> tuple[jax.Array, jax.Array]:
    (x, w), (x_dot, w_dot) = primals, tangents
    product = x @ w  # plain, so that rematerialization policies recognize it
    terms = []
    if not isinstance(x_dot, SymbolicZero):
        terms.append(x_dot @ w)
    if not isinstance(w_dot, SymbolicZero):
        # The transpose of this product is the weight gradient, copy · gradient. XLA would compute
        # x.T · gradient without the copy by a kernel that takes up to 1.6 times as long.
        copy = lax.optimization_barrier(x.T)
        terms.append(jnp.einsum("it,io->to", copy, w_dot))
    return product, sum(terms[1:], terms[0])


_matmul_on_cpu.defjvp(_matmul_on_cpu_jvp, symbolic_zeros=True)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a bias, `[features...]` or `[expert, 1, features...]`, in the dtype of `x`.

    The addition is in float32, because the gradient of the bias is then the sum over all tokens in
    float32. In bfloat16, GPUs round each partial sum.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) + bias.astype(wide)).astype(x.dtype)


def batched_matmul(layer: BaseLayer, x: jax.Array, w: jax.Array, *, name: str = "w") -> jax.Array:
    """Multiply `[group, tokens, in]` by `[group, in, out]`: `[group, tokens, out]`.

    Args:
      layer: Layer that owns the weights.
      x: Activations in the compute dtype, such as those of each expert.
      w: Weights in the compute dtype.
      name: Name of the weight, which selects the layer's `Dot`.
    """
    return _dot_of(layer, name)(x, w)


def grouped_arrays(layer: BaseLayer, *, name: str = "w") -> dict[str, GroupedArray]:
    """Return the arrays that `grouped_matmul` reads besides the weight, by name.

    Args:
      layer: Layer that owns the weight.
      name: Name of the weight, which selects the layer's `Dot`.
    """
    dot_tpl = getattr(layer, "dot_tpl", None)
    return {} if dot_tpl is None else getattr(layer, _dot_name(name)).grouped_arrays()


def grouped_matmul(
    layer: BaseLayer,
    rows: jax.Array,
    w: jax.Array,
    product: GroupedProduct,
    shards: Mapping[str, jax.Array],
    *,
    name: str = "w",
    bias: jax.Array | None = None,
) -> jax.Array:
    """Multiply sorted rows by the weights of their groups, `[rows, out]`; see `Dot.grouped`.

    The name of the weight selects the layer's `Dot`; the bias is `[group, out]`. Unused rows are 0
    if the layer has a `Dot`, and arbitrary otherwise.
    """
    has_dot = getattr(layer, "dot_tpl", None) is not None
    dot = getattr(layer, _dot_name(name)) if has_dot else None
    output = product(rows, w) if dot is None else dot.grouped(rows, w, product, shards)
    if bias is not None:
        # The gradient of a product sums over the rows of each group.
        output = output + product(jnp.ones((rows.shape[0], 1), rows.dtype), bias[:, None])
    if dot is None:
        return output
    # A scale is that of the largest value, which must not be that of an unused row.
    is_used = product.group_of_row < product.num_groups
    return jnp.where(is_used[:, None], output, 0)


def constrain_tokens(layer: BaseLayer, x: jax.Array, *features: str | None) -> jax.Array:
    """Constrain `[tokens, …]` or `[batch, length, …]`, with logical axes of the features."""
    merged = x.ndim == 1 + len(features)
    return layer.constrain(x, *(("batch",) if merged else ("batch", "length")), *features)


def replace_dots(config: Config, dot_tpl: Config | None, *, only: str = ".*") -> Config:
    """Return a copy of a model's config with another `Dot`.

    An existing adapter (`LoraDot`) is kept and wraps the new product.

    Args:
      config: Config that contains the layers to change, such as that of a model.
      dot_tpl: Config of a `Dot`; None for the plain product.
      only: Regular expression that must match the whole path of fields to a layer, such as
        `.*(query|value)_tpl` or `lm_tpl.stack_tpl.*`.

    Raises:
      ConfigError: No layer with products matches.
    """

    def put(owner: Config) -> None:
        while is_config(owner.dot_tpl) and "dot_tpl" in field_names(owner.dot_tpl):
            owner = owner.dot_tpl
        owner.dot_tpl = None if dot_tpl is None else dot_tpl.clone()

    return edit_products(config, put, only=only)


def edit_products(config: Config, edit: Callable[[Config], None], *, only: str) -> Config:
    """Return a copy of a config with `edit` applied to every layer with a field `dot_tpl`.

    Args:
      config: Config that contains the layers to edit, such as that of a model.
      edit: Function that changes the config of one such layer in place.
      only: Regular expression that must match the whole path of fields to a layer.

    Raises:
      ConfigError: No layer with products matches; lists those that exist.
    """
    check_regex(None, only=only)
    pattern, config = re.compile(only), config.clone()
    unused = unused_templates(config)
    owners = [
        (path, owner) for path, owner in _product_owners(config, ()) if id(owner) not in unused
    ]
    matching = {id(owner): owner for path, owner in owners if pattern.fullmatch(path)}
    if not matching:
        paths = list(dict.fromkeys(path for path, _ in owners))
        raise ConfigError(
            field="only",
            value=only,
            expected="a pattern that matches the path of a layer with products",
            choices=filter(None, paths),
        )
    for owner in matching.values():
        edit(owner)
    return config


def _product_owners(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Config]]:
    """Yield (path of fields, config) of every nested layer with a field `dot_tpl`."""
    entries: dict[Any, Any] = {}
    if is_config(value):
        if isinstance(target_of(value), type) and issubclass(target_of(value), Dot):
            return  # a `Dot` inside of another `Dot` belongs to that one
        if "dot_tpl" in field_names(value):
            yield ".".join(path), value
        entries = assigned_fields(value)
    elif isinstance(value, dict):
        entries = value
    elif isinstance(value, (list, tuple)):
        entries = dict(enumerate(value))
    for name, entry in entries.items():
        yield from _product_owners(entry, (*path, str(name)))


def unused_templates(config: Config) -> set[int]:
    """Return the ids of all configs that `BaseLayer.used_only_if` marks as unused.

    Args:
      config: Config that may contain layers.
    """
    return {
        id(unused)
        for owner in walk_configs(config)
        for path, _ in unmet_conditions(owner)
        if "." not in path
        for unused in walk_configs(getattr(owner, path))
    }


def weight_of_dot(dot: str) -> str:
    """Return the name of the weight of a child that `create_dot` created."""
    return "w" if dot == "dot" else dot.removesuffix("_dot")


def _dot_name(name: str) -> str:
    return "dot" if name == "w" else f"{name}_dot"


def _dot_of(layer: BaseLayer, name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if getattr(layer, "dot_tpl", None) is None:
        return operator.matmul
    return getattr(layer, _dot_name(name))
