"""Checks of sizes, numbers, shapes and dtypes, whose errors name the layer and the field.

Without these checks JAX raises too, but its errors name neither.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base_layer import BaseLayer


def check_sizes(layer: BaseLayer, **sizes: int) -> None:
    """Refuses sizes below one; for `setup`, each size under the name of its field.

    Raises:
      ValueError: names the layer, the field and its value.
    """
    for field, size in sizes.items():
        if size < 1:
            raise ValueError(f"{layer.path_name}: {field}={size}, expected at least 1")


def check_positive(layer: BaseLayer, **numbers: float | None) -> None:
    """Refuse numbers that are not above zero; for `setup`, each under the name of its field.

    Args:
      layer: The layer whose fields they are.
      **numbers: The fields and their values; None passes, as it stands for no number.

    Raises:
      ValueError: names the layer, the field and its value.
    """
    for field, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(f"{layer.path_name}: {field}={number}, expected more than 0")


def check_not_negative(layer: BaseLayer, **numbers: float) -> None:
    """Refuse numbers below zero; for `setup`, each under the name of its field.

    Raises:
      ValueError: names the layer, the field and its value.
    """
    for field, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{layer.path_name}: {field}={number}, expected 0 or more")


def check_rates(layer: BaseLayer, **rates: float) -> None:
    """Refuse rates outside [0, 1); for `setup`, each under the name of its field.

    Raises:
      ValueError: names the layer, the field and its value.
    """
    for field, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{layer.path_name}: {field}={rate}, expected 0 <= {field} < 1")


def check_last_axis(layer: BaseLayer, inputs: jax.Array, **size: int) -> None:
    """Refuses inputs `[..., dims]` of another size than the field says; for `fprop`.

    Args:
      layer: Whose field it is.
      inputs: The array that it was given.
      **size: The one field and its value.

    Raises:
      ValueError: names the layer, the field, its value and the shape.
    """
    for field, dims in size.items():
        if inputs.ndim < 1 or inputs.shape[-1] != dims:
            raise ValueError(
                f"{layer.path_name}: {field}={dims}, but the inputs have the shape {inputs.shape};"
                " their last axis must be of that size"
            )


def check_same_shape(layer: BaseLayer, inputs: jax.Array, outputs: jax.Array) -> None:
    """Refuse outputs of a layer whose shape is not that of its inputs, to which they are added.

    Args:
      layer: The layer that was called.
      inputs: Its inputs `[batch, length, dims]`.
      outputs: What it returned.

    Raises:
      ValueError: names the layer and both shapes.
    """
    if jnp.shape(outputs) != jnp.shape(inputs):
        raise ValueError(
            f"{layer.path_name}: returned the shape {list(jnp.shape(outputs))}. Expected that of"
            f" its inputs, [batch, length, dims] = {list(jnp.shape(inputs))}."
        )


def check_integers(layer: BaseLayer, **arrays: jax.Array) -> None:
    """Refuse ids or positions `[...]` that are not integers; for `fprop`.

    Raises:
      ValueError: names the layer, the argument, its dtype and its shape.
    """
    for name, array in arrays.items():
        if not jnp.issubdtype(jnp.result_type(array), jnp.integer):
            raise ValueError(
                f"{layer.path_name}: {name} of dtype {jnp.result_type(array)} and shape"
                f" {list(jnp.shape(array))}. Expected integers, such as int32."
            )
