"""What attention keeps between cached steps: arrays of one slot per position, in `CACHE`.

A cached array is `[batch, max_length, …]`, in the compute dtype, and laid out over a mesh as what
is written into it. These functions read and write it for a layer, and refuse what would lose it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base_layer import CACHE, BaseLayer

Axes = tuple[str | None, ...]


def write_cache(layer: BaseLayer, name: str, value: jax.Array, axes: Axes) -> jax.Array:
    """Keeps `value` `[batch, max_length, …]` as `name`; returns it as it is laid out.

    Args:
      layer: Whose cache it is.
      name: Of the array in the layer's part of `CACHE`.
      value: All slots.
      axes: A logical name for each of its dimensions.

    Raises:
      ValueError: a caller who did not make the collection mutable.
    """
    if not layer.is_mutable_collection(CACHE):
        raise ValueError(
            f"{layer.path_name}: the cache would be lost; apply with mutable=['{CACHE}', …]"
        )
    value = layer.constrain(value, *axes)
    layer.put_variable(CACHE, name, value)
    return value


def read_cache(
    layer: BaseLayer, name: str, *, made_by: str = "init_cache(batch_size, max_length)"
) -> jax.Array:
    """The cached array `[batch, max_length, …]`.

    Args:
      layer: Whose cache it is.
      name: Of the array.
      made_by: The call that creates it, for the message.

    Raises:
      ValueError: there is no cache.
    """
    if not layer.has_variable(CACHE, name):
        raise ValueError(
            f"{layer.path_name}: extend_step without a cache; run {made_by} with"
            f" mutable=['{CACHE}'] and apply with what it returns"
        )
    cached: jax.Array = layer.get_variable(CACHE, name)
    return cached


def extend_cache(
    layer: BaseLayer, name: str, new: jax.Array, axes: Axes, *, time_step: jax.Array
) -> jax.Array:
    """Writes `new` `[batch, t, …]` from slot `time_step` on; returns `[batch, max_length, …]`.

    Args:
      layer: Whose cache it is.
      name: Of the array.
      new: What the newest tokens add.
      axes: A logical name for each dimension.
      time_step: int32 scalar, how many slots are full.

    Raises:
      ValueError: no cache, one for other sizes, or one that is not mutable.
    """
    cache = read_cache(layer, name)
    num_rows, max_length = cache.shape[:2]
    if new.shape[0] != num_rows or new.shape[1] > max_length:
        raise ValueError(
            f"{layer.path_name}: the cache is for batch_size={num_rows} and"
            f" max_length={max_length}, but extend_step was given {new.shape[0]} rows of"
            f" {new.shape[1]} tokens"
        )
    cache = jax.lax.dynamic_update_slice_in_dim(cache, new, time_step, axis=1)
    return write_cache(layer, name, cache, axes)


def check_time_step(layer: BaseLayer, time_step: jax.Array) -> None:
    """Refuses a time step for each row: `[batch]` instead of a scalar."""
    if jnp.ndim(time_step) != 0:
        raise ValueError(
            f"{layer.path_name}: time_step has the shape {jnp.shape(time_step)}, expected a"
            " scalar that all rows share"
        )
