"""Products of activations with weights: laid out so that no backend needs copies, and replaceable.

`[batch, length, in] · [in, out]` has two axes of tokens, and its gradient for the weight contracts
both. XLA's CPU backend then transposes both operands first, which makes a feed-forward layer three
times as slow. With batch and length merged into one axis of tokens there is nothing to copy, and on
accelerators nothing changes.

A layer that multiplies by a weight has a field `dot_tpl`: None for the plain product, or the
template of a `Dot`, through which quantised products and low-rank adapters come in. It declares the
weight and its product together, and multiplies by `matmul` (or `batched_matmul`):

    self.create_variable("w", weight)
    create_dot(self, weight)
    …
    matmul(self, x, self.theta.w)

`with_dots` puts a `Dot` into all such layers of a model's config.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from layerkit.base_layer import BaseLayer
from layerkit.config import (
    Config,
    assigned_fields,
    field_names,
    is_config,
    target_of,
    walk_configs,
)
from layerkit.field_checks import unmet_conditions
from layerkit.near_names import near_names
from layerkit.weights import WeightHParams


class Dot(BaseLayer):
    """The product of activations with one weight of the layer that owns it; here the plain one.

    A subclass that has to know the weight, say to create more of the kind, has a field
    `weight: WeightHParams | None`, which the owner fills in.
    """

    def fprop(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`[..., in]` · `[in, out]` → `[..., out]`, in the dtype of both.

        With a group of weights, such as experts: `[group, tokens, in]` · `[group, in, out]` →
        `[group, tokens, out]`.
        """
        return x @ w


def create_dot(layer: BaseLayer, weight: WeightHParams, *, name: str = "w") -> None:
    """Creates the child that multiplies by a weight, if the layer's `dot_tpl` asks for one.

    The child is called `dot` for the weight `w`, and `<name>_dot` for any other.

    Args:
      layer: Whose weight it is, in its `setup`; it has a field `dot_tpl`.
      weight: The declaration of the weight.
      name: Of the weight.
    """
    dot_tpl = layer.dot_tpl
    if dot_tpl is not None:
        told = {"weight": weight} if "weight" in field_names(dot_tpl) else {}
        layer.create_child(_dot_name(name), dot_tpl, **told)


def merge_tokens(layer: BaseLayer, x: jax.Array) -> jax.Array:
    """`[batch, length, dims]` → `[tokens, dims]`, once for all products that read it.

    Where the length is split over devices `x` stays as it is, since merging would gather it.

    Args:
      layer: Whose product it is; its bound sharding decides.
      x: Activations with any leading axes.
    """
    sharding = layer.inherited("sharding")
    if sharding is not None and sharding.is_split("length"):
        return x
    # Spelt out rather than -1, which an empty batch leaves undetermined.
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def matmul(layer: BaseLayer, x: jax.Array, w: jax.Array, *, name: str = "w") -> jax.Array:
    """`[..., in]` · `[in, out]` → `[..., out]`, over one axis of tokens where possible.

    Args:
      layer: Whose product it is.
      x: Activations in the compute dtype.
      w: The weight, likewise.
      name: Of the weight, which says which `Dot` multiplies, if the layer has any.
    """
    product = _dot_of(layer, name)(merge_tokens(layer, x), w)
    return product.reshape(*x.shape[:-1], w.shape[-1])


def batched_matmul(layer: BaseLayer, x: jax.Array, w: jax.Array, *, name: str = "w") -> jax.Array:
    """`[group, tokens, in]` · `[group, in, out]` → `[group, tokens, out]`.

    Args:
      layer: Whose product it is.
      x: Activations in the compute dtype, such as those of each expert.
      w: The weights, likewise.
      name: Of the weight, which says which `Dot` multiplies, if the layer has any.
    """
    return _dot_of(layer, name)(x, w)


def constrain_tokens(layer: BaseLayer, x: jax.Array, *features: str | None) -> jax.Array:
    """Lays out `[tokens, …]` or `[batch, length, …]`, with names for what follows the tokens."""
    merged = x.ndim == 1 + len(features)
    return layer.constrain(x, *(("batch",) if merged else ("batch", "length")), *features)


def with_dots(config: Config, dot_tpl: Config | None, *, only: str = ".*") -> Config:
    """A copy of a model's config whose products are made by `dot_tpl`.

    A product that is adapted already (`LoraDot`) stays so, around the new one.

    Args:
      config: Of a layer, a model, or anything that holds one.
      dot_tpl: The config of a `Dot`; None for the plain product.
      only: Regular expression that the whole path of fields to a layer has to match, such as
        `.*(query|value)_tpl` or `lm_tpl.stack_tpl.*`.

    Raises:
      ValueError: no layer with products matches.
    """

    def put(owner: Config) -> None:
        while is_config(owner.dot_tpl) and "dot_tpl" in field_names(owner.dot_tpl):
            owner = owner.dot_tpl
        owner.dot_tpl = None if dot_tpl is None else dot_tpl.clone()

    return edit_products(config, put, only=only)


def edit_products(config: Config, edit: Callable[[Config], None], *, only: str) -> Config:
    """A copy of a config in which `edit` was applied to every layer with a field `dot_tpl`.

    Args:
      config: Of a layer, a model, or anything that holds one.
      edit: Changes the config of one such layer in place.
      only: Regular expression that the whole path of fields to the layer has to match.

    Raises:
      ValueError: no layer with products matches; names those that there are.
    """
    pattern, config = re.compile(only), config.clone()
    unused = unused_templates(config)
    owners = [
        (path, owner) for path, owner in _product_owners(config, ()) if id(owner) not in unused
    ]
    matching = {id(owner): owner for path, owner in owners if pattern.fullmatch(path)}
    if not matching:
        paths = list(dict.fromkeys(path for path, _ in owners))
        raise ValueError(
            f"only={only!r} matches no layer with products{near_names(only, paths)}"
            f" Layers with products: {', '.join(paths) or 'none'}."
        )
    for owner in matching.values():
        edit(owner)
    return config


def _product_owners(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Config]]:
    """(path of fields, config) of every layer with a field `dot_tpl`, however it is nested."""
    entries: dict[Any, Any] = {}
    if is_config(value):
        if isinstance(target_of(value), type) and issubclass(target_of(value), Dot):
            return  # what multiplies inside of a product belongs to that product
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
    """Return the ids of all configs from which nothing is made, by `BaseLayer.used_only_if`.

    Args:
      config: Of anything that may hold layers.
    """
    return {
        id(unused)
        for owner in walk_configs(config)
        for path, _ in unmet_conditions(owner)
        if "." not in path
        for unused in walk_configs(getattr(owner, path))
    }


def weight_of_dot(dot: str) -> str:
    """The name of the weight that a child created by `create_dot` multiplies by."""
    return "w" if dot == "dot" else dot.removesuffix("_dot")


def _dot_name(name: str) -> str:
    return "dot" if name == "w" else f"{name}_dot"


def _dot_of(layer: BaseLayer, name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if getattr(layer, "dot_tpl", None) is None:
        return operator.matmul
    return getattr(layer, _dot_name(name))
