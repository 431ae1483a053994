"""Access to the arrays that attention keeps between cached steps, in the collection `CACHE`.

A cached array has one slot per position, in the compute dtype, and the sharding of the values that
are written to it. It is `[batch, max_length, …]`, or `[batch, heads, max_length, …]`: with heads
first, each step reads the slots of a head in sequence. XLA's CPU backend would otherwise transpose
the whole cache for each product.

With lazy prefix broadcast (`layerkit.decoding.lazy_prefix_broadcast`), the slots of prompts are in
the collection `PROMPT_CACHE`, and those in `CACHE` hold the last tokens of a row: the token at
position p is in slot p modulo their number.

A cache in int8 has a float32 scale for each vector of a slot, such as the key of one head, which is
the largest value of the vector / 127. It takes about half the memory of a bfloat16 cache.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import CACHE, PROMPT_CACHE, BaseLayer
from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit.ops.attention.masks import AttentionMask

Axes = tuple[str | None, ...]


def write_cache(layer: BaseLayer, name: str, value: jax.Array, axes: Axes) -> jax.Array:
    """Store an array in the cache and return it with its sharding.

    Args:
      layer: Layer that has the cache.
      name: Name of the array in the layer's part of `CACHE`.
      value: All slots, `[batch, max_length, …]`.
      axes: Logical axis of each dimension.

    Raises:
      ConfigError: The collection is not mutable.
    """
    if not layer.is_mutable_collection(CACHE):
        raise ConfigError(
            f"the collection {CACHE!r} is not mutable, so the cache would be lost",
            owner=layer.path_name,
            hint=f"Apply the model with mutable=['{CACHE}', …].",
        )
    value = layer.constrain(value, *axes)
    layer.put_variable(CACHE, name, value)
    return value


def read_cache(
    layer: BaseLayer, name: str, *, made_by: str = "init_cache(batch_size, max_length)"
) -> jax.Array:
    """Return the cached array `[batch, max_length, …]`.

    Args:
      layer: Layer that has the cache.
      name: Name of the array.
      made_by: Call that creates the cache, for the message.

    Raises:
      ConfigError: The cache is missing.
    """
    if not layer.has_variable(CACHE, name):
        raise ConfigError(
            "extend_step requires a cache",
            owner=layer.path_name,
            hint=f"Run {made_by} with mutable=['{CACHE}'] and apply the model with its result.",
        )
    cached: jax.Array = layer.get_variable(CACHE, name)
    return cached


def extend_cache(
    layer: BaseLayer,
    name: str,
    new: jax.Array,
    axes: Axes,
    *,
    time_step: jax.Array,
    slot_axis: int = 1,
) -> jax.Array:
    """Write the values of new tokens to a cached array and return the array.

    Slots of the last tokens take one new token at a time.

    Args:
      layer: Layer that has the cache.
      name: Name of the array, `[batch, max_length, …]` or `[batch, heads, max_length, …]`.
      new: Values of the new tokens, with t in the place of max_length.
      axes: Logical axis of each dimension.
      time_step: int32 scalar, the number of slots in use.
      slot_axis: Dimension of the slots.

    Raises:
      ConfigError: The cache is missing, has the wrong sizes, or is not mutable.
    """
    cache = read_cache(layer, name)
    num_rows, max_length = cache.shape[0], cache.shape[slot_axis]
    sizes = [new.shape[0], new.shape[slot_axis]]
    fits = sizes[0] == num_rows and sizes[1] <= max_length
    expected = f"[{num_rows}, at most {max_length}], the sizes of the cache"
    require(fits, layer, "shape of inputs", sizes, expected)
    if layer.has_variable(PROMPT_CACHE, name):
        time_step = time_step % max_length
    # A child with another compute dtype may have made the values.
    new = new.astype(cache.dtype)
    cache = jax.lax.dynamic_update_slice_in_dim(cache, new, time_step, axis=slot_axis)
    return write_cache(layer, name, cache, axes)


def read_prompt_cache(layer: BaseLayer, *names: str) -> list[jax.Array]:
    """Return arrays of the cache of prompts `[prompts, …]`; none if rows have all their tokens."""
    held = (name for name in names if layer.has_variable(PROMPT_CACHE, name))
    return [layer.get_variable(PROMPT_CACHE, name) for name in held]


def write_rounded_cache(
    layer: BaseLayer, name: str, shape: tuple[int, ...], axes: Axes
) -> jax.Array:
    """Store an empty cache `[batch, …, dims]` in int8 and its scales, `name_scale`.

    Return the integers; see `write_cache`.
    """
    scales = jnp.ones((*shape[:-1], 1), jnp.float32)
    write_cache(layer, f"{name}_scale", scales, (*axes[:-1], None))
    return write_cache(layer, name, jnp.zeros(shape, jnp.int8), axes)


def extend_rounded_cache(
    layer: BaseLayer,
    name: str,
    new: jax.Array,
    axes: Axes,
    *,
    time_step: jax.Array,
    slot_axis: int = 1,
) -> jax.Array:
    """Write the values of new tokens to a cache in int8; see `extend_cache`.

    Return the cache `[batch, …, dims]` in the dtype of `new`.
    """
    wide = new.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / 127
    scale = jnp.where(scale == 0, 1.0, scale)
    integers = jnp.round(wide / scale).astype(jnp.int8)
    extend = functools.partial(extend_cache, layer, time_step=time_step, slot_axis=slot_axis)
    scales = extend(f"{name}_scale", scale, (*axes[:-1], None))
    cached = extend(name, integers, axes)
    return (cached.astype(jnp.float32) * scales).astype(new.dtype)


def mask_of_step(
    batch: int,
    num_tokens: int,
    num_slots: int,
    num_prompt_slots: int | None = None,
    *,
    bias: jax.Array | None,
    time_step: jax.Array,
    query_ends: jax.Array | None,
) -> tuple[AttentionMask, jax.Array | None]:
    """Return the mask and the bias of the next tokens to the cache.

    `num_prompt_slots` is None for rows that have all slots. `bias` is `[batch or 1, heads or 1,
    num_tokens, max_length]` by position; see `AttentionMask.sample_mask` for the other arguments.
    """
    at: dict[str, Any] = {"time_step": time_step, "query_ends": query_ends}
    if num_prompt_slots is None:
        return AttentionMask.decoding_mask(batch, num_tokens, num_slots, **at), bias
    mask = AttentionMask.sample_mask(batch, num_prompt_slots, num_slots, **at)
    if bias is not None:
        bias = jnp.take(bias, mask.key_positions[0], axis=3, mode="clip")
    return mask, bias


def check_time_step(layer: BaseLayer, time_step: jax.Array) -> None:
    """Raise `ConfigError` unless the time step is a scalar, which all rows share."""
    shape = list(jnp.shape(time_step))
    require(not shape, layer, "shape of time_step", shape, "a scalar that all rows share")
