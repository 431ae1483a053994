"""Checks of fields that hold for every layer: numbers are numbers, and no field is ignored.

A layer says by `used_only_if` under which condition on its other fields a field has an effect:

    class Projection(BaseLayer):
        used_only_if: ClassVar[Conditions] = {"bias_tpl": "use_bias"}

A field whose condition is not met has to keep its default. Otherwise somebody set it, and would
train without it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from layerkit.config import Config, assigned_fields, is_config, target_of

# Field, or path into its template → field that must be set (other than None, False and 0), or
# "not " and a field that must not be set; or several of these, which must all hold.
Conditions = Mapping[str, str | tuple[str, ...]]

_NEGATION = "not "
_NUMBERS = frozenset({"int", "float"})
_PLAIN_TYPES = _NUMBERS | {"bool", "str", "None", "Optional", "Union", "Sequence", "tuple", "list"}
_LONGEST_VALUE = 100


def check_fields(layer: Any, *, owner: str) -> None:
    """Check the fields of a layer that can be checked without knowing its class.

    Args:
      layer: An instance of a dataclass, with or without `used_only_if`.
      owner: Name of the layer for messages.

    Raises:
      ValueError: an int field that holds a bool, text or a fraction, a float field that holds text,
        NaN or infinity, or a field that is set although another one switches it off.
    """
    cls: Any = type(layer)
    for name, kinds in _number_fields(cls):
        _check_number(getattr(layer, name), kinds, f"{owner}: {name}")
    for path, condition in unmet_conditions(layer):
        for changed, value in _changes(layer, path):
            switch = condition.removeprefix(_NEGATION)
            raise ValueError(
                f"{owner}: {changed}={_shortened(value)} has no effect while"
                f" {_state(layer, switch)}. Expected the default. Leave {changed} out, or change"
                f" {switch}."
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
    found: dict[str, str | tuple[str, ...]] = {}
    for base in reversed(inspect.getmro(cls)) if isinstance(cls, type) else ():
        found |= vars(base).get("used_only_if", {})
    return found


@functools.cache
def _number_fields(cls: Any) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the fields of a class that hold numbers alone, with "int", "float", "bool" of each."""
    found = []
    for field in dataclasses.fields(cls):
        is_text = isinstance(field.type, str)
        text = str(field.type) if is_text else inspect.formatannotation(field.type)
        words = frozenset(re.findall(r"[A-Za-z_]\w*", text))
        if words & _NUMBERS and words <= _PLAIN_TYPES:
            found.append((field.name, words))
    return tuple(found)


def _check_number(value: Any, kinds: frozenset[str], where: str) -> None:
    if isinstance(value, (tuple, list)):
        for item in value:
            _check_number(item, kinds, where)
        return
    # Not None, and no array: its elements are not known while a program is traced.
    is_number = isinstance(value, numbers.Real)
    if isinstance(value, str):
        is_wrong = "str" not in kinds
        expected = "a number, not text" if "float" in kinds else "an integer, not text"
        value = repr(value)
    elif isinstance(value, bool):
        is_wrong, expected = "bool" not in kinds, "a number, not a bool"
    elif "float" in kinds:
        is_wrong, expected = is_number and not math.isfinite(value), "a finite number"
    else:
        is_wrong, expected = is_number and not isinstance(value, numbers.Integral), "an integer"
    if is_wrong:
        raise ValueError(f"{where}={value}. Expected {expected}.")


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
    return f"{field}={_shortened(value)}" if is_plain else f"{field} is set"


def _shortened(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
