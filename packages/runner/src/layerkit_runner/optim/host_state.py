"""Updates of weights whose optimizer state is in host memory, one layer at a time.

Optimizers read each array of their state once a step. In a loop over the layers of a stack, the
device holds the state of one layer. A copy of whole arrays would need device memory for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.tree_util import KeyPath
from optax.contrib import SophiaState

from layerkit_runner.optim.optimizer_updates import instances, is_on_host
from layerkit_runner.optim.optimizers import Bfloat16State
from layerkit_runner.optim.weight_selection import weight_path

FIELD = "SpmdPartitioner.offload_optimizer_state"

UpdateFn = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""Function `(gradients, state, weights, raw gradients) -> (updates, next state)`."""
UpdateArguments = tuple[Any, ...]
"""The four arguments of an `UpdateFn`."""


def has_state_by_entry(state: Any, params: Any, *, per_layer: bool | None) -> bool:
    """Return whether layers of a stack, which share a state, can be updated one at a time.

    Args:
      state: State of an optimizer.
      params: The weights that it updates.
      per_layer: What the optimizer declares; see `declare_per_layer`.
    """
    weights = flatten_dict(params)
    has_shapes_of_weights = all(
        leaf.shape == weights[weight_path(path)].shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if weight_path(path) in weights
    )
    # With bfloat16_state or sophia, each layer would draw the same numbers.
    draws_numbers = bool(instances(state, (Bfloat16State, SophiaState)))
    return per_layer is False and has_shapes_of_weights and not draws_numbers


def update_by_layer(
    update: UpdateFn, trees: UpdateArguments, *, select: Callable[[Any, Any], Any]
) -> tuple[Any, Any]:
    """Return `update(*trees)` for a state that is partly on the host.

    Weights whose state is on the host, `[layers, ...]`, are updated in a loop, and others at once.
    `update` is that of an optimizer that `has_state_by_entry` accepts. The state to keep is
    `select(next state, state)`, for steps that may be skipped.
    """
    grads, state, params, _ = trees
    layers = {
        weight_path(path): leaf.shape[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if is_on_host(leaf)
    }
    weights = set(flatten_dict(params))

    def only(tree: Any, size: int | None) -> Any:
        """Return a tree without entries of the weights that are not in stacks of this size."""

        def take(path: KeyPath, leaf: jax.Array) -> jax.Array:
            key = weight_path(path)
            is_taken = key not in weights or layers.get(key) == size
            # An optimizer may mask weights by their number of dimensions, which stays.
            return leaf if is_taken else jnp.zeros((0, *leaf.shape[1:]), leaf.dtype)

        return jax.tree_util.tree_map_with_path(take, tree)

    def merge(whole: Any, part: Any, size: int | None) -> Any:
        def pick(path: KeyPath, old: jax.Array, new: jax.Array) -> jax.Array:
            return new if layers.get(weight_path(path)) == size else old

        return jax.tree_util.tree_map_with_path(pick, whole, part)

    rest = [only(tree, None) for tree in trees]
    updates, new_state = update(*rest)
    updates = merge(grads, updates, None)
    new_state = merge(state, select(new_state, rest[1]), None)
    for size in sorted(set(layers.values())):

        def is_sliced(path: KeyPath, size: int = size) -> bool:
            return layers.get(weight_path(path)) == size

        part = tuple(only(tree, size) for tree in trees)
        changed, kept = update_stack(update, part, select=select, is_sliced=is_sliced)
        updates, new_state = merge(updates, changed, size), merge(new_state, kept, size)
    return updates, new_state


def update_stack(
    update: UpdateFn,
    trees: UpdateArguments,
    *,
    select: Callable[[Any, Any], Any],
    is_sliced: Callable[[KeyPath], bool] = lambda _: True,
) -> tuple[Any, Any]:
    """Return the result of `update_by_layer` for an `update` that treats layers separately.

    Arrays whose path `is_sliced` accepts are `[layers, ...]`; others are returned unchanged.
    """
    grads, state, params, raw_grads = trees

    def sizes(path: KeyPath, leaf: jax.Array) -> int:
        return leaf.shape[0] if is_sliced(path) else 0

    num_layers = max(jax.tree.leaves(jax.tree_util.tree_map_with_path(sizes, grads)))

    def body(index: jax.Array, carry: Any) -> Any:
        def cut(path: KeyPath, x: jax.Array) -> jax.Array:
            if not is_sliced(path):
                return x
            layer = jax.lax.dynamic_slice_in_dim(x, index, 1)
            return jax.device_put(layer, jax.memory.Space.Device) if is_on_host(x) else layer

        def put(path: KeyPath, whole: jax.Array, layer: jax.Array) -> jax.Array:
            if not is_sliced(path):
                return whole
            layer = layer.astype(whole.dtype)
            if is_on_host(whole):
                layer = jax.device_put(layer, jax.memory.Space.Host)
            return jax.lax.dynamic_update_slice_in_dim(whole, layer, index, 0)

        # Updates replace the gradients, so they need no memory of their own.
        remaining, held = carry
        whole = (remaining, held, params, raw_grads)
        parts = [jax.tree_util.tree_map_with_path(cut, tree) for tree in whole]
        updates, new_state = update(*parts)
        return (
            jax.tree_util.tree_map_with_path(put, remaining, updates),
            jax.tree_util.tree_map_with_path(put, held, select(new_state, parts[1])),
        )

    result: tuple[Any, Any] = jax.lax.fori_loop(0, num_layers, body, (grads, state))
    return result
