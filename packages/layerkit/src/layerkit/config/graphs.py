"""Functions of configs and of graphs of configs and containers: read, copy, walk and compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import fiddle as fdl

from layerkit.config.field_types import field_annotations

T = TypeVar("T")
_MISSING = object()


def target_of(config: fdl.Buildable) -> Any:
    """Return the class or function that `config` describes a call of."""
    return fdl.get_callable(config)


def is_config(value: Any) -> bool:
    """Return True for a `Config` or `Partial`, also a plain one of Fiddle."""
    return isinstance(value, fdl.Buildable)


def assigned_fields(config: fdl.Buildable) -> dict[str, Any]:
    """Return the fields of `config` that were assigned, and its sub-configs.

    The key of a positional argument without a name is its index.
    """
    return dict(config.__arguments__)


def field_names(target: Any) -> list[str]:
    """Return the names that a config of `target`, a class or function, may set."""
    return list(field_annotations(target_of(target) if is_config(target) else target))


def map_containers(value: Any, visit: Callable[[Any], Any]) -> Any:
    """Apply `visit` to the elements of a list, tuple or dict; return other values unchanged."""
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps attributes of subclasses, such as a default factory
        copied.update({key: visit(item) for key, item in value.items()})
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(visit(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(visit(item) for item in value)
    return value


def copy_config(config: T) -> T:
    """Copy a graph of configs and containers; other values are shared with the copy.

    The copies can be edited, even if the originals are frozen.
    """
    copies: dict[int, Any] = {}

    def visit(value: Any) -> Any:
        if not isinstance(value, fdl.Buildable):
            return map_containers(value, visit)
        if id(value) not in copies:
            copied = copies[id(value)] = value.__copy__()
            for name, item in value.__arguments__.items():
                copied.__arguments__[name] = visit(item)
        return copies[id(value)]

    return visit(config)


def walk_configs(value: Any) -> Iterator[fdl.Buildable]:
    """Yield each config in `value`, outer ones first, through fields and containers."""
    if isinstance(value, fdl.Buildable):
        yield value
        value = list(value.__arguments__.values())
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from walk_configs(item)


def equal_configs(left: Any, right: Any) -> bool:
    """Return True if two values describe the same calls, with the same configs shared in each.

    A field that is set to its default equals one that is not set. JAX compares configs whenever it
    looks up a layer in its caches; the time of Fiddle's own comparison doubles with each level of
    nesting.
    """
    rights: dict[int, int] = {}
    lefts: dict[int, int] = {}

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, fdl.Buildable):
            if id(one) in rights or id(other) in lefts:
                return rights.get(id(one)) == id(other) and lefts.get(id(other)) == id(one)
            rights[id(one)], lefts[id(other)] = id(other), id(one)
            return _same_target(one, other) and all(
                same(_field(one, key), _field(other, key))
                for key in one.__arguments__.keys() | other.__arguments__.keys()
            )
        if type(one) is type(other) and isinstance(one, (list, tuple)):
            return len(one) == len(other) and all(map(same, one, other))
        if type(one) is type(other) and isinstance(one, dict):
            return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
        return one is other or bool(one == other)

    return left is right or same(left, right)


def _same_target(one: fdl.Buildable, other: Any) -> bool:
    return type(one) is type(other) and one.__fn_or_cls__ == other.__fn_or_cls__


def _field(config: fdl.Buildable, key: int | str) -> Any:
    if key in config.__arguments__:
        return config.__arguments__[key]
    return config.__signature_info__.get_default(key, _MISSING)
