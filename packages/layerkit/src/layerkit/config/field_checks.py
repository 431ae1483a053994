"""Checks of the fields of every layer: no field is ignored, and values have the right type.

A layer declares by `used_only_if` the condition on its other fields under which a field has an
effect:

    class Projection(BaseLayer):
        used_only_if: ClassVar[Conditions] = {"bias_tpl": "use_bias"}

A field whose condition is not met must keep its default, since setting it would change nothing.
A field that the owner of a template derives must not be set to another value; see `derive_fields`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from layerkit.config.config import Config, was_built
from layerkit.config.field_types import convert_field, field_annotations
from layerkit.config.graphs import assigned_fields, is_config, target_of
from layerkit.errors import ConfigError, short_repr

# Field, or path into its template → field that must be set (other than None, False and 0), or
# "not " and a field that must not be set; or several of these, which must all hold.
Conditions = Mapping[str, str | tuple[str, ...]]

_NEGATION = "not "


def check_fields(layer: Any, *, owner: str) -> None:
    """Check the fields of a layer.

    Their types are checked only if the layer was made without a config, which checks them.

    Args:
      layer: An instance of a dataclass, with or without `used_only_if`.
      owner: Name of the layer for messages.

    Raises:
      FieldTypeError: A value does not have the type of its field.
      ConfigError: A field is set although another one switches it off.
    """
    cls: Any = type(layer)
    if not was_built(layer):
        for name in field_annotations(cls):
            convert_field(cls, name, getattr(layer, name), owner=owner)
    for path, condition in unmet_conditions(layer):
        for changed, value in _changes(layer, path):
            switch = condition.removeprefix(_NEGATION)
            raise ConfigError(
                owner=owner,
                field=changed,
                value=value,
                expected=f"the default, since it has no effect while {_state(layer, switch)}",
                hint=f"Leave {changed} out, or change {switch}.",
            )


def checking_fields(setup: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap the `setup` of a layer, where its path is known first, so that it checks the fields."""

    @functools.wraps(setup)
    def checked(self: Any) -> None:
        check_fields(self, owner=self.path_name)
        setup(self)

    return checked


def unmet_conditions(layer: Any) -> Iterator[tuple[str, str]]:
    """Yield (field or path, condition) of what has no effect in a layer, or in its config."""
    cls: Any = target_of(layer) if is_config(layer) else type(layer)
    for path, conditions in conditions_of(cls).items():
        for condition in (conditions,) if isinstance(conditions, str) else conditions:
            is_set = bool(getattr(layer, condition.removeprefix(_NEGATION)))
            if is_set == condition.startswith(_NEGATION):
                yield path, condition
                break


@functools.cache
def conditions_of(cls: Any) -> Conditions:
    """Return the conditions of a class and of its base classes."""
    conditions: dict[str, str | tuple[str, ...]] = {}
    for base in reversed(inspect.getmro(cls)) if isinstance(cls, type) else ():
        conditions |= vars(base).get("used_only_if", {})
    return conditions


# Cached, since every trace of every layer needs it.
@functools.cache
def _defaults(cls: Any) -> Config:
    return Config(cls)


def _changes(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of what differs from the default at or below a path."""
    parent, _, name = path.rpartition(".")
    owner = functools.reduce(getattr, parent.split("."), layer) if parent else layer
    if parent and (not is_config(owner) or not hasattr(target_of(owner), "__dataclass_fields__")):
        return
    cls: Any = target_of(owner) if is_config(owner) else type(owner)
    if name in cls.__dataclass_fields__:
        yield from _differences(getattr(owner, name), getattr(_defaults(cls), name), path)


def _differences(value: Any, default: Any, path: str) -> Iterator[tuple[str, Any]]:
    both = is_config(value) and is_config(default)
    if not both or target_of(value) is not target_of(default):
        if value != default:
            yield path, value
        return
    # Field by field, since `==` of configs takes ten times as long.
    here, there = assigned_fields(value), assigned_fields(default)
    for name in here | there:
        if isinstance(name, str):
            one = here[name] if name in here else getattr(value, name)
            other = there[name] if name in there else getattr(default, name)
            yield from _differences(one, other, f"{path}.{name}")


def _state(layer: Any, field: str) -> str:
    value = getattr(layer, field)
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return f"{field}={short_repr(value)}" if is_plain else f"{field} is set"


def derive_fields(template: Config, where: str, **derived: Any) -> Config:
    """Return a copy of a template with the fields that its owner derives.

    Args:
      template: Config of the layer.
      where: Path of the template, for error messages.
      **derived: Derived values by field; None leaves a field unchanged.

    Raises:
      ConfigError: The template sets a field to another value, even to the field's default.
    """
    config = template.clone()
    defaults = assigned_fields(_defaults(target_of(config)))
    for name, value in derived.items():
        if value is None:
            continue
        explicit = assigned_fields(config).get(name)
        is_set = explicit is not None and explicit != defaults.get(name)
        if is_set and explicit != value:
            raise ConfigError(
                owner=where,
                field=name,
                value=explicit,
                expected=f"{value!r}, which the owner derives",
                hint="Leave the field out.",
            )
        setattr(config, name, value)
    return config
