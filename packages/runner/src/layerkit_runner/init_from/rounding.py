"""Rounding of floating initial weights for a model that stores weights in integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base_layer import PARAMS, BaseLayer
from layerkit.layers.quantization.stored_weights import round_like, scale_path
from layerkit.weight_formats import WeightFormat
from layerkit_runner.checkpointing.structure import LeafPath
from layerkit_runner.training.train_state import TrainState


def floating_model(model: Any) -> Any:
    """Return a model that stores all its weights in floats."""
    return model if model.weight_format is None else model.clone(weight_format=None)


def floating_weights(model: BaseLayer, state: TrainState) -> TrainState:
    """Return a state that describes the weights of `floating_model`."""
    if model.weight_format is None:
        return state
    variables = jax.eval_shape(floating_model(model).init, jax.random.key(0))
    stored, plain = flatten_dict(state.params), flatten_dict(variables[PARAMS])
    params = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=stored[path].sharding)
        for path, leaf in plain.items()
    }
    return state.replace(params=unflatten_dict(params))


def has_integers(leaves: Mapping[LeafPath, Any]) -> bool:
    """Return whether stored values contain weights in integers."""
    return any(
        path[0] == PARAMS and jnp.issubdtype(leaf.dtype, jnp.integer)
        for path, leaf in leaves.items()
    )


def rounded(
    model: BaseLayer, given: Mapping[LeafPath, jax.Array], like: Mapping[LeafPath, Any]
) -> dict[LeafPath, jax.Array]:
    """Return the integers and scales of floating weights, and all other values unchanged."""
    found = dict(given)
    for path, value in given.items():
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        if path in like and is_float and jnp.issubdtype(like[path].dtype, jnp.integer):
            kind, scale = WeightFormat.parse(model.weight_format).kind, scale_path(path)
            found[path], found[scale] = round_like(value, like[path], like[scale], kind=kind)
    return found
