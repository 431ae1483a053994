"""NestedMap: a dict whose string keys can be read and set as attributes.

Batches, weights and per-example outputs are NestedMaps. JAX treats them as pytrees with children in
sorted key order, as a plain dict. This module does not import JAX; the class is registered when JAX
has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from layerkit.errors import UnknownNameError

_registered = False


def register_pytree() -> None:
    """Register NestedMap with JAX, once, if JAX has been imported."""
    global _registered
    jax_tree_util = sys.modules.get("jax.tree_util")
    if _registered or jax_tree_util is None or not hasattr(jax_tree_util, "DictKey"):
        return
    _registered = True

    def flatten_with_keys(tree: NestedMap) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        keys = tuple(sorted(tree))
        return [(jax_tree_util.DictKey(key), tree[key]) for key in keys], keys

    def flatten(tree: NestedMap) -> tuple[list[Any], tuple[str, ...]]:
        keys = tuple(sorted(tree))
        return [tree[key] for key in keys], keys

    jax_tree_util.register_pytree_with_keys(
        NestedMap,
        flatten_with_keys,
        lambda keys, values: NestedMap(zip(keys, values, strict=True)),
        flatten,
    )


class MissingKeyError(UnknownNameError, KeyError):
    """A key that a NestedMap does not have. `choices` are the keys that it has."""


class NestedMap(dict):
    """A dict with attribute access.

    >>> batch = NestedMap(ids=[1, 2])
    >>> batch.weights = [1.0, 0.5]
    >>> sorted(batch)
    ['ids', 'weights']

    Raises:
      MissingKeyError: A key that does not exist is read or deleted. The error is also a KeyError
        and an AttributeError.
    """

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any):
        """Create a map as `dict` does."""
        super().__init__(*args, **kwargs)
        register_pytree()

    def __getattr__(self, key: str) -> Any:
        """Return the value of a key."""
        return self[key]

    def __missing__(self, key: Any) -> Any:
        """Raise an error that suggests the nearest keys."""
        raise MissingKeyError("NestedMap has no such key", value=key, choices=sorted(self))

    def __setattr__(self, key: str, value: Any) -> None:
        """Set a key."""
        self[key] = value

    def __delattr__(self, key: str) -> None:
        """Delete a key."""
        if key not in self:
            self.__missing__(key)
        del self[key]

    def __or__(self, other: Any) -> NestedMap:
        """Return a map with the keys of both; those of `other` take precedence."""
        return NestedMap({**self, **other})

    def copy(self) -> NestedMap:
        """Return a shallow copy."""
        return NestedMap(self)

    def flatten_items(self) -> Iterator[tuple[str, Any]]:
        """Yield pairs of path and leaf, in sorted key order, through dicts and lists.

        Paths are as in Praxis: `a.b[0].c` is the leaf of `map.a.b[0].c`.
        """
        for key in sorted(self):
            yield from _flatten(key, self[key])

    def transform(self, fn: Callable[[Any], Any]) -> NestedMap:
        """Return a NestedMap of the same structure of dicts and lists, `fn` applied to leaves."""
        return NestedMap({key: _transform(value, fn) for key, value in self.items()})


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _flatten(f"{path}.{key}", value[key])
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flatten(f"{path}[{index}]", item)
    else:
        yield path, value


def _transform(value: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        twin = value.copy()  # of the same type
        for key, item in value.items():
            twin[key] = _transform(item, fn)
        return twin
    if isinstance(value, list):
        return [_transform(item, fn) for item in value]
    return fn(value)


register_pytree()
