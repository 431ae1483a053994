"""States of a fixed size that layers carry between cached steps, which cannot go back.

Rows with prompts of unequal lengths are filled in one step and continued from the shortest prompt,
so that later steps repeat tokens. A cache with a slot for each token is overwritten. A state takes
in only the tokens of the first step that no later step repeats; see `set_num_prompt`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import CACHE, BaseLayer
from layerkit.layers.attention.cache import Axes, read_cache, write_cache

# Variable of the cache: number of first tokens of the rows that the first step adds to the state.
_NUM_PROMPT = "num_prompt"


def init_num_prompt(layer: BaseLayer) -> None:
    """Declare that the cache of a layer has a state, to which the first step adds all tokens."""
    layer.put_variable(CACHE, _NUM_PROMPT, jnp.int32(0))


def set_num_prompt(cache: Any, num_tokens: jax.Array) -> tuple[Any, bool]:
    """Set the number of tokens that the first step of rows adds to their states.

    Args:
      cache: Collection `CACHE` of a network.
      num_tokens: Number of tokens before the first one that a later step repeats, int32 scalar; 0
        if the next step has time step 0.

    Returns:
      (cache, True if any layer has a state).
    """
    has_state = False

    def set_one(path: Any, x: jax.Array) -> jax.Array:
        nonlocal has_state
        if not path or getattr(path[-1], "key", None) != _NUM_PROMPT:
            return x
        has_state = True
        return jnp.full_like(x, num_tokens)

    return jax.tree_util.tree_map_with_path(set_one, cache), has_state


def count_kept(layer: BaseLayer, num_tokens: int, *, time_step: jax.Array) -> jax.Array:
    """Return how many of the next `num_tokens` tokens the state takes in, an int32 scalar."""
    if num_tokens == 1:
        return jnp.int32(1)
    ends = read_cache(layer, _NUM_PROMPT) - time_step
    return jnp.where(ends > 0, jnp.minimum(ends, num_tokens), num_tokens)


def extend_last(
    layer: BaseLayer, name: str, new: jax.Array, axes: Axes, *, time_step: jax.Array, axis: int
) -> jax.Array:
    """Return the last tokens before a step and those of the step, and keep the last of them.

    Args:
      layer: Layer that has the cache.
      name: Name of the array of last tokens, `[batch, …, last, …]`, 0 before the first token.
      new: Values of the next t tokens, with t in the place of last.
      axes: Logical axis of each dimension.
      time_step: int32 scalar, number of tokens before these; a step at 0 begins a row.
      axis: Dimension of the tokens.

    Returns:
      `[batch, …, last + t, …]`.
    """
    before = read_cache(layer, name)
    before = jnp.where(time_step == 0, 0, before)
    tokens = jnp.concatenate([before, new.astype(before.dtype)], axis=axis)
    start = count_kept(layer, new.shape[axis], time_step=time_step)
    kept = jax.lax.dynamic_slice_in_dim(tokens, start, before.shape[axis], axis=axis)
    write_cache(layer, name, kept, axes)
    return tokens


def convolve_heads(
    layer: BaseLayer,
    name: str,
    heads: jax.Array,
    axes: Axes,
    *,
    segments: jax.Array | None,
    time_step: jax.Array | None,
) -> jax.Array:
    """Convolve heads `[batch, length, heads, head_dim]` by the child `NAME_conv` of a layer.

    Args:
      layer: Layer that has the cache of a step.
      name: Name of the heads, such as `query`.
      heads: The heads of whole rows, or of the tokens of a step.
      axes: Logical axis of each dimension of the cached tokens.
      segments: Documents of whole rows, int32 `[batch, length]`; None for one document.
      time_step: int32 scalar, number of tokens before a step; None for whole rows.
    """
    conv = getattr(layer, f"{name}_conv")
    history = jnp.zeros((heads.shape[0], conv.width - 1, *heads.shape[2:]), heads.dtype)
    if time_step is not None:
        tokens = extend_last(layer, f"{name}_last", heads, axes, time_step=time_step, axis=1)
        history = tokens[:, : conv.width - 1]
    convolved: jax.Array = conv(heads, history, segments=segments)[0]
    return convolved
