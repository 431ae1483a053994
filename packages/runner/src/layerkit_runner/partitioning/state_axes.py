"""Which logical axes each array of a training state has.

A weight's axes come with its declaration. An optimizer keeps arrays shaped like the weights
(moments, traces) in trees of its own; each is recognised by the weight's path at the end of its
own, and has the weight's axes. What is shaped otherwise (counters, factored moments) has none and
is replicated.
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
    """From boxed variables `{collection: …}`: layer path of each weight → (axes, shape)."""
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box)
    return {
        # Without the collection, which is a field of a state and no part of the layer's path.
        _dict_keys(path)[1:]: (box.axes, box.value.shape)
        for path, box in leaves
        if is_box(box)
    }


def map_with_axes(
    fn: Callable[[str, Axes, Any], Any], state: Any, weights: dict[Path, tuple[Axes, tuple]]
) -> Any:
    """`fn(path, axes, leaf)` for every array of a state.

    Args:
      fn: What to make of a leaf; `path` is its name for messages.
      state: A tree that holds weights and what an optimizer keeps beside them.
      weights: From `axes_by_path`.
    """

    def visit(path: KeyPath, leaf: Any) -> Any:
        return fn(jax.tree_util.keystr(path), _axes_of(_dict_keys(path), leaf, weights), leaf)

    return jax.tree_util.tree_map_with_path(visit, state)


def _axes_of(keys: Path, leaf: Any, weights: dict[Path, tuple[Axes, tuple]]) -> Axes:
    # Longest first: `lm/final_norm/scale` is not the `final_norm/scale` of another model.
    for start in range(len(keys)):
        axes, shape = weights.get(keys[start:], (None, None))
        if axes is not None and shape == leaf.shape:
            return axes
    return (None,) * leaf.ndim


def _dict_keys(path: KeyPath) -> Path:
    """The dict keys that a path ends with."""
    keys: list[Any] = []
    for entry in reversed(path):
        if not isinstance(entry, DictKey):
            break
        keys.append(entry.key)
    return tuple(reversed(keys))
