"""What a layer says when a size is wrong: the layer's path, the field, both numbers.

Without these checks JAX answers too, but speaks of the shapes of an einsum and names neither.
"""

from __future__ import annotations

import jax

from layerkit.base_layer import BaseLayer


def check_sizes(layer: BaseLayer, **sizes: int) -> None:
    """Refuses sizes below one; for `setup`, each size under the name of its field.

    Raises:
      ValueError: names the layer, the field and its value.
    """
    for field, size in sizes.items():
        if size < 1:
            raise ValueError(f"{layer.path_name}: {field}={size}, expected at least 1")


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
