"""Stacked weights: to whatever goes by tensors, a stack of L layers is L tensors.

Repeated and pipelined layers keep their weights stacked on leading axes, named for that. A rule
that looks at a whole tensor, such as clipping by its norm or a cap on the size of its update, has
to look at each layer by itself, or training would depend on how the layers are laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.weights import is_box

Path = tuple[str, ...]
Stacks = Mapping[Path, tuple[int, ...]]

# What `layerkit.layers.repeat` and `layerkit.layers.pipeline` call the axes that they add.
STACK_AXES = frozenset({"layers", "stage"})


def stacks_of(boxed: Any) -> dict[Path, tuple[int, ...]]:
    """The sizes of the leading stacked axes of those weights that have any, by path.

    Args:
      boxed: Weights still in their boxes, nested dicts by layer path.
    """
    stacks: dict[Path, tuple[int, ...]] = {}
    for path, box in flatten_dict(boxed, is_leaf=lambda _, leaf: is_box(leaf)).items():
        depth = 0
        while is_box(box) and depth < len(box.axes) and box.axes[depth] in STACK_AXES:
            depth += 1
        if depth:
            stacks[path] = tuple(box.value.shape[:depth])
    return stacks


def over_stack(fn: Callable[..., Any], sizes: tuple[int, ...]) -> Callable[..., Any]:
    """`fn` of one layer as a function of the stack, arrays `[*sizes, ...]` in and out."""
    for _ in sizes:
        fn = jax.vmap(fn)
    return fn


def map_tensors(fn: Callable[[jax.Array], jax.Array], tree: Any, stacks: Stacks) -> Any:
    """`fn` of every tensor of a tree of weights `[...]`, stacked ones layer by layer."""
    flat = flatten_dict(tree)
    return unflatten_dict(
        {path: over_stack(fn, stacks.get(path, ()))(leaf) for path, leaf in flat.items()}
    )
