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
from jax.tree_util import DictKey, KeyPath

from layerkit.config.checks import require
from layerkit_runner.optim.optimizer_calls import Reach, is_on_host, is_schedule_free, reach_of

FIELD = "SpmdPartitioner.offload_optimizer_state"

UpdateFn = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""Function `(gradients, state, weights, raw gradients) -> (updates, next state)`."""
UpdateArguments = tuple[Any, ...]
"""The four arguments of an `UpdateFn`."""


def check_updates_by_layer(
    transformation: Any, params: Any, *, owner: str, is_by_layer: bool
) -> None:
    """Raise `ConfigError` if layers cannot be updated one at a time with the same result.

    With `is_by_layer`, each layer has a state of its own.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = jax.eval_shape(transformation.init, shapes)
    weights = flatten_dict(shapes)
    mirrored = [
        (leaf.shape, weights[weight_path(path)].shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if weight_path(path) in weights
    ]
    is_valid = not is_schedule_free(state) and (
        is_by_layer
        or (
            reach_of(transformation, params) is Reach.ENTRY
            and not _draws_numbers(transformation, shapes, state)
            and all(mine == own for mine, own in mirrored)
        )
    )
    expected = f"one that updates each entry by itself, such as optax.adamw, with {FIELD}=True"
    require(is_valid, owner, "optimizer", type(state).__name__, expected)


def _draws_numbers(transformation: Any, shapes: Any, state: Any) -> bool:
    # Each layer would draw the same numbers.
    jaxpr = jax.make_jaxpr(transformation.update)(shapes, state, shapes)
    return any(name in str(jaxpr) for name in ("random_bits", "threefry2x32"))


def update_by_layer(
    update: UpdateFn, trees: UpdateArguments, *, select: Callable[[Any, Any], Any]
) -> tuple[Any, Any]:
    """Return `update(*trees)` for a state that is partly on the host.

    Weights whose state is on the host, `[layers, ...]`, are updated in a loop, and others at once.
    `update` is that of an optimizer that passes `check_updates_by_layer`. The state to keep is
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
    found, found_state = update(*rest)
    updates = merge(grads, found, None)
    new_state = merge(state, select(found_state, rest[1]), None)
    for size in sorted(set(layers.values())):

        def is_sliced(path: KeyPath, size: int = size) -> bool:
            return layers.get(weight_path(path)) == size

        part = tuple(only(tree, size) for tree in trees)
        found, found_state = update_stack(update, part, select=select, is_sliced=is_sliced)
        updates, new_state = merge(updates, found, size), merge(new_state, found_state, size)
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
        found, found_state = update(*parts)
        found_state = select(found_state, parts[1])
        return (
            jax.tree_util.tree_map_with_path(put, remaining, found),
            jax.tree_util.tree_map_with_path(put, held, found_state),
        )

    result: tuple[Any, Any] = jax.lax.fori_loop(0, num_layers, body, (grads, state))
    return result


def weight_path(path: KeyPath) -> tuple[str, ...]:
    """Return the dict keys that the path of an array ends with: the path of its weight."""
    keys: list[str] = []
    for entry in reversed(path):
        if not isinstance(entry, DictKey):
            break
        keys.append(entry.key)
    return tuple(reversed(keys))
