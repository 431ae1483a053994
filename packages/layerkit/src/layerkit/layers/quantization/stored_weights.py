"""Conversion of a model between floating weights and weights that are stored in integers.

    config, variables = quantize_model(config, variables, weight_format="int4:64")

The layers compute the same as with the rounded weights in floats: they multiply integers by scales
where they read a weight. See `layerkit.base.weight_formats`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.base_layer import PARAMS
from layerkit.base.weight_formats import StoredWeight, WeightFormat, quantize, scale_path
from layerkit.config import Config, build, copy_config, field_names, walk_configs
from layerkit.config.checks import require

Path = tuple[str, ...]


def quantize_model(
    config: Config, variables: Any, *, weight_format: str
) -> tuple[Config, dict[str, Any]]:
    """Return a model whose products have weights in integers.

    Embeddings, logits, norms, biases and adapters keep their dtypes.

    Args:
      config: Config of a layer or a model; it is not changed.
      variables: Variables of the model, `{collection: …}` of nested dicts of arrays `[...]`, or of
        functions that return them. These are called one after another.
      weight_format: `int8`, `int4` or `nf4`, with an optional group size: `int4:64`.

    Returns:
      (config, variables). A weight `w` has the scales `w_scale`.

    Raises:
      ConfigError: The format is unknown, the model has weights in integers already or no products,
        or the group size does not divide the inputs of a weight.
    """
    expected = "a model with floating weights, since these are integers already"
    require(not _kinds(config), None, "weight_format", weight_format, expected)
    kind, stored = WeightFormat.parse(weight_format).kind, copy_config(config)
    stored.weight_format = weight_format
    new: dict[Path, Any] = {}
    old, abstract = flatten_dict(variables), _abstract_weights(stored)
    for path, leaf in old.items():
        leaf = leaf() if callable(leaf) else leaf
        scale = abstract.get(scale_path(path))
        if scale is None or scale_path(path) in old:
            new[path] = leaf
        else:
            stored_parts = round_like(leaf, abstract[path], scale, kind=kind)
            new[path], new[scale_path(path)] = stored_parts
    expected = "a model with layers that multiply by weights"
    require(new.keys() != old.keys(), None, "weight_format", weight_format, expected)
    return stored, unflatten_dict(new)


def dequantize_model(config: Config, variables: Any) -> tuple[Config, Any]:
    """Return the model with floating weights that computes the same.

    Args:
      config: Config of a layer or a model; it is not changed.
      variables: Variables of the model, `{collection: …}` of nested dicts of arrays `[...]`.

    Returns:
      (config, variables); the arguments themselves if no weight is stored in integers.

    Raises:
      ConfigError: Layers have formats of several kinds.
    """
    kinds = _kinds(config)
    if not kinds:
        return config, variables
    expected = "one kind of format in all layers of the config"
    require(len(kinds) == 1, None, "weight_format", sorted(kinds), expected)
    plain = strip_weight_formats(config)
    new, abstract = flatten_dict(variables), _abstract_weights(plain)
    for path in [path for path in new if scale_path(path) in new]:
        if scale_path(path) not in abstract:
            scale = new.pop(scale_path(path))
            new[path] = _restore(new[path], scale, *kinds, like=abstract[path])
    return plain, unflatten_dict(new)


def strip_weight_formats(config: Config) -> Config:
    """Return a copy of a config whose weights are all floating."""
    plain = copy_config(config)
    for part in walk_configs(plain):
        if "weight_format" in field_names(part):
            part.weight_format = None
    return plain


def _kinds(config: Config) -> set[str]:
    """Return the kinds of formats in which the layers of a config store weights."""
    texts = {
        part.weight_format for part in walk_configs(config) if "weight_format" in field_names(part)
    }
    return {WeightFormat.parse(text).kind for text in texts - {None}}


def _abstract_weights(config: Config) -> dict[Path, Any]:
    """Return the shape and dtype of each weight by its path, such as `("params", "w")`."""
    variables = jax.eval_shape(build(config).init, jax.random.key(0))
    return dict(flatten_dict({PARAMS: variables[PARAMS]}))


def round_like(
    w: jax.Array, values: jax.ShapeDtypeStruct, scale: jax.ShapeDtypeStruct, *, kind: str
) -> tuple[jax.Array, jax.Array]:
    """Return the integers and the scales of a weight.

    Args:
      w: Weight `[...]`, or a stack of weights.
      values: Shape of the integers.
      scale: Shape of the scales.
      kind: `int8`, `int4` or `nf4`.

    Raises:
      ConfigError: `w` does not have the shape of the weight of the model.
    """
    sizes = zip(values.shape, w.shape, strict=True)
    halves = [axis for axis, (packed, size) in enumerate(sizes) if packed != size]
    is_packed = len(halves) == 1 and all(values.shape[a] == -(-w.shape[a] // 2) for a in halves)
    is_valid = not halves or (is_packed and kind != "int8")
    expected = f"the shape of a weight that is stored as {kind} {list(values.shape)}"
    require(is_valid, "round_like", "shape of w", list(w.shape), expected)
    return _quantize(w, kind=kind, scale_shape=scale.shape, packed_axis=next(iter(halves), None))


@partial(jax.jit, static_argnames=("kind", "scale_shape", "packed_axis"))
def _quantize(w: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    stored = quantize(w, **options)
    return stored.values, stored.scale


def _restore(
    values: jax.Array, scale: jax.Array, kind: str, *, like: jax.ShapeDtypeStruct
) -> jax.Array:
    def restore(values: jax.Array, scale: jax.Array) -> jax.Array:
        return StoredWeight(values, scale, kind, like.shape).restored(like.dtype)

    return jax.jit(restore)(values, scale)
