"""Logical axes of each array of a training state.

The declaration of a weight names its axes. An optimizer keeps arrays shaped like the weights
(moments, traces) in trees with the same paths. Such an array has the axes of the weight whose path
is the end of its path. Some of its dimensions may be reduced to size 1 (scales of integers, factors
of moments), which have no axis. Arrays of other shapes (counters, the moments of
`optax.adafactor`) have no axes and are replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import DictKey, KeyPath

from layerkit.weights import is_box

Axes = tuple[str | None, ...]
Path = tuple[Any, ...]


def axes_by_path(boxed: Any) -> dict[Path, tuple[Axes, tuple[int, ...]]]:
    """Return (axes, shape) of each weight of boxed variables `{collection: …}` by layer path."""
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box)
    return {
        # The collection is a field of a state and not part of the layer's path.
        _dict_keys(path)[1:]: (box.axes, box.value.shape)
        for path, box in leaves
        if is_box(box)
    }


def map_with_axes(
    fn: Callable[[str, Axes, Any], Any], state: Any, weights: dict[Path, tuple[Axes, tuple]]
) -> Any:
    """Map `fn(path, axes, leaf)` over every array of a state.

    Args:
      fn: Function of an array's name for messages, its axes and the array.
      state: A tree of weights and of arrays that an optimizer keeps.
      weights: Value of `axes_by_path`.
    """

    def visit(path: KeyPath, leaf: Any) -> Any:
        return fn(jax.tree_util.keystr(path), _axes_of(_dict_keys(path), leaf, weights), leaf)

    return jax.tree_util.tree_map_with_path(visit, state)


def _axes_of(keys: Path, leaf: Any, weights: dict[Path, tuple[Axes, tuple]]) -> Axes:
    # The longest end comes first, so that `lm/final_norm/scale` does not match a weight
    # `final_norm/scale`.
    for start in range(len(keys)):
        axes, shape = weights.get(keys[start:], ((), ()))
        sizes = tuple(zip(leaf.shape, shape, strict=False))
        if len(shape) == leaf.ndim > 0 and all(size in (1, full) for size, full in sizes):
            return tuple(
                axis if size == full else None
                for axis, (size, full) in zip(axes, sizes, strict=True)
            )
    return (None,) * leaf.ndim


def _dict_keys(path: KeyPath) -> Path:
    """Return the dict keys that a path ends with."""
    keys: list[Any] = []
    for entry in reversed(path):
        if not isinstance(entry, DictKey):
            break
        keys.append(entry.key)
    return tuple(reversed(keys))
