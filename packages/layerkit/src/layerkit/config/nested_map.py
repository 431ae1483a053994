"""NestedMap: a dict whose string keys can be read and set as attributes.

Batches, weights and per-example outputs are NestedMaps. JAX treats them as pytrees with children in
sorted key order, as a plain dict. This module does not import JAX; the class is registered when JAX
has been imported.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from layerkit.errors import ConfigError, UnknownNameError

_VALID_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
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
      ConfigError: A key that is not an identifier is set.
    """

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any):
        """Create a map as `dict` does."""
        super().__init__(*args, **kwargs)
        for key in self:
            _check_key(key)
        register_pytree()

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a key, which must be an identifier."""
        _check_key(key)
        super().__setitem__(key, value)

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

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set entries as `dict.update` does, with checked keys."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return an entry; set it to `default` first if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def __or__(self, other: Any) -> NestedMap:
        """Return a map with the keys of both; those of `other` take precedence."""
        return NestedMap({**self, **other})

    def __ior__(self, other: Any) -> NestedMap:
        """Set the keys of another map."""
        self.update(other)
        return self

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


# Readers create a map with the same few keys for each row.
@functools.lru_cache(maxsize=4096)
def _check_key(key: object) -> None:
    if not isinstance(key, str) or not _VALID_KEY.match(key):
        raise ConfigError(field="NestedMap key", value=key, expected="an identifier")
    if hasattr(dict, key):
        expected = "a name that hides no method of dict"
        raise ConfigError(field="NestedMap key", value=key, expected=expected)


register_pytree()
