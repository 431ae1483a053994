"""Converters from values to annotated types.

A converter is a function that returns the converted value, or `MISMATCH` if the value does not fit.
This module imports only the standard library, so that command lines that use it start quickly.
"""

from __future__ import annotations

import builtins
import collections
import collections.abc
import enum
import functools
import numbers
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

Converter = Callable[[Any], Any]
MISMATCH: Any = object()


class _UnknownMeta(type):
    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Unknown(metaclass=_UnknownMeta):
    """The value of a name that cannot be found. It may be subscripted and joined by `|`."""


_WELL_KNOWN = {
    **{name: getattr(typing, name) for name in typing.__all__},
    "typing": typing,
    "collections": collections,
    "Any": Any,
}


class _Names(dict[str, Any]):
    """The names of an annotation, found in modules, in `builtins` or in `typing`."""

    def __init__(self, modules: tuple[str, ...]):
        self._scopes = [vars(sys.modules[name]) for name in modules if name in sys.modules]
        self._scopes += [vars(builtins), _WELL_KNOWN]

    def __missing__(self, name: str) -> Any:
        return next((scope[name] for scope in self._scopes if name in scope), _Unknown)


@functools.cache
def evaluate(text: str, modules: tuple[str, ...]) -> Any:
    """Return the type that the text of an annotation describes.

    Names that are not found, and text that cannot be evaluated, become `_Unknown`.
    """
    try:
        # The text comes from source code, as for `typing.get_type_hints`.
        return eval(text, {}, _Names(modules))
    except Exception:
        return _Unknown


# Converters.


def _resolve(kind: Any, modules: tuple[str, ...]) -> Any:
    """Return the type that an annotation stands for, which may be text."""
    kind = getattr(kind, "__forward_arg__", kind)
    return _resolve(evaluate(kind, modules), modules) if isinstance(kind, str) else kind


def is_union(kind: Any) -> bool:
    """Return whether a type is a union, such as `int | None`."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


# Annotations that wrap a type and accept the same values as the type.
_TRANSPARENT = (typing.ClassVar, typing.Final, typing.Annotated, typing.Required)


def converter_of(kind: Any, modules: tuple[str, ...]) -> Converter | None:
    """Return the converter to a type; None if every value fits."""
    kind = _resolve(kind, modules)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    for attribute in ("__supertype__", "__value__"):  # the type behind a NewType, a type alias
        if hasattr(kind, attribute):
            return converter_of(getattr(kind, attribute), modules)
    if origin is typing.Annotated and arguments[0] is Any:
        # `Annotated[Any, BaseModel]`: type checkers accept a config, which is built later.
        return converter_of(arguments[1], modules)
    if origin in _TRANSPARENT or origin is typing.NotRequired:
        return converter_of(arguments[0], modules)
    if is_union(kind):
        return _union([converter_of(member, modules) for member in arguments])
    if kind is None or kind is type(None):
        return lambda value: None if value is None else MISMATCH
    convert = _plain_converter(origin or kind, arguments, modules)
    return None if convert is None else functools.partial(_keep_function_config, convert)


def _plain_converter(
    base: Any, arguments: tuple[Any, ...], modules: tuple[str, ...]
) -> Converter | None:
    """Return the converter to a type other than a union and None."""
    if base is typing.Literal:
        return _literal(arguments)
    if base in _SCALARS:
        return _SCALARS[base]
    if base in _SEQUENCES:
        return _sequence(base, arguments, modules)
    if base in _MAPPINGS:
        return _mapping(arguments, modules)
    if base is collections.abc.Callable:
        return lambda value: value if callable(value) or is_config(value) else MISMATCH
    if base is type:
        return _class(arguments[0] if arguments else object)
    return _instance(base, arguments, modules)


def _keep_function_config(convert: Converter, value: Any) -> Any:
    """Convert a value, except the config of a function, whose result has an unknown type."""
    target = _target_of(value)
    return convert(value) if target is None or isinstance(target, type) else value


def is_config(value: Any) -> bool:
    """Return whether a value is a config of layerkit or of Fiddle."""
    fdl = sys.modules.get("fiddle")  # without which there are no configs
    return fdl is not None and isinstance(value, fdl.Buildable)


def _target_of(value: Any) -> Any:
    """Return the class or function that a config calls; None for other values and partials."""
    fdl: Any = sys.modules.get("fiddle")
    is_call = fdl is not None and isinstance(value, fdl.Config)
    return fdl.get_callable(value) if is_call else None


def _builds(value: Any, base: Any) -> bool:
    """Return whether a value is a config of a class or of a subclass."""
    target = _target_of(value)
    return isinstance(target, type) and issubclass(target, base)


def _is_scalar_array(value: Any) -> bool:
    # Only shape and dtype are read, since a traced scalar of JAX has no value yet.
    return hasattr(value, "dtype") and getattr(value, "shape", None) == ()


def _to_int(value: Any) -> Any:
    if isinstance(value, bool):
        return MISMATCH
    if isinstance(value, numbers.Integral):
        return value
    is_array = _is_scalar_array(value) and value.dtype.kind in "iu"
    return value if is_array else MISMATCH


def _to_float(value: Any) -> Any:
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        return MISMATCH if isinstance(value, bool) else float(value)
    if isinstance(value, numbers.Real):
        return value
    return value if _is_scalar_array(value) and value.dtype.kind != "b" else MISMATCH


def _to_bool(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return bool(value) if is_numpy and value.dtype.kind == "b" else MISMATCH


def _to_str(value: Any) -> Any:
    return value if isinstance(value, str) else MISMATCH


_SCALARS: dict[Any, Converter] = {int: _to_int, float: _to_float, bool: _to_bool, str: _to_str}


def _literal(choices: tuple[Any, ...]) -> Converter:
    valid = {(type(choice), choice) for choice in choices}

    def to_literal(value: Any) -> Any:
        is_hashable = isinstance(value, collections.abc.Hashable)
        return value if is_hashable and (type(value), value) in valid else MISMATCH

    return to_literal


def _union(members: list[Converter | None]) -> Converter | None:
    """Return the converter to a union; None if every value fits.

    A member that keeps the type of the value takes precedence: 3 stays an int in `float | int`.
    Otherwise the first member that fits converts the value.
    """
    if None in members:
        return None

    def to_member(value: Any) -> Any:
        results = [member(value) for member in members]  # type: ignore[misc]
        fitting = [result for result in results if result is not MISMATCH]
        same = [result for result in fitting if type(result) is type(value)]
        return next(iter(same + fitting), MISMATCH)

    return to_member


# The class to which a list or tuple is converted, by annotated type; None keeps its class.
_SEQUENCES: dict[Any, Any] = {list: list, tuple: tuple, collections.abc.Sequence: None}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def _sequence(base: Any, arguments: tuple[Any, ...], modules: tuple[str, ...]) -> Converter:
    kind = _SEQUENCES[base]
    has_length = base is tuple and arguments and arguments[-1] is not Ellipsis
    items = [converter_of(item, modules) for item in arguments if item is not Ellipsis]

    def to_sequence(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            is_other = kind is None and isinstance(value, collections.abc.Sequence)
            return value if is_other and not isinstance(value, (str, bytes)) else MISMATCH
        if has_length and len(value) != len(items):
            return MISMATCH
        if any(item is not None for item in items):
            converters = items if has_length else items * len(value)
            converted = [item(v) if item else v for item, v in zip(converters, value, strict=True)]
            if any(item is MISMATCH for item in converted):
                return MISMATCH
            # An unchanged list stays the same object, since its owner may still edit it.
            if any(new is not old for new, old in zip(converted, value, strict=True)):
                plain = tuple if isinstance(value, tuple) else list
                value = value._make(converted) if hasattr(value, "_make") else plain(converted)
        return value if kind is None or isinstance(value, kind) else kind(value)

    return to_sequence


def _mapping(arguments: tuple[Any, ...], modules: tuple[str, ...]) -> Converter:
    key, item = [converter_of(kind, modules) for kind in arguments] or (None, None)

    def to_mapping(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return MISMATCH
        if key is None and item is None:
            return value
        converted = {key(k) if key else k: item(v) if item else v for k, v in value.items()}
        if MISMATCH in converted or any(v is MISMATCH for v in converted.values()):
            return MISMATCH
        is_same = all(converted.get(k) is v for k, v in value.items())
        return value if is_same else converted

    return to_mapping


def _class(base: Any) -> Converter:
    def to_class(value: Any) -> Any:
        fits = isinstance(value, type) and (not isinstance(base, type) or issubclass(value, base))
        return value if fits else MISMATCH

    return to_class


def _instance(base: Any, arguments: tuple[Any, ...], modules: tuple[str, ...]) -> Converter | None:
    """Return the converter to instances and configs of a class; None if every value fits."""
    if not isinstance(base, type) or base in (object, _Unknown) or not _can_be_checked(base):
        return None
    if hasattr(base, "_target") and hasattr(base, "config"):
        # `SomeLayer.HParams`, as Praxis annotates templates; `BaseHParams` has no target.
        return base._target and converter_of(base._target, modules)
    fdl: Any = sys.modules.get("fiddle")
    if fdl is not None and issubclass(base, fdl.Buildable):
        # A field for layerkit's configs also accepts those of Fiddle, from which they derive.
        kind = next(k for k in (fdl.Config, fdl.Partial, fdl.Buildable) if issubclass(base, k))
        target = _resolve(arguments[0] if arguments else object, modules)
        return functools.partial(_to_config, kind, typing.get_origin(target) or target)
    if issubclass(base, enum.Enum):
        return functools.partial(_to_member, base)
    others = (str,) if issubclass(base, pathlib.PurePath) else ()
    # Whether a config builds an instance of a protocol is known only once it is built.
    takes_configs = getattr(base, "_is_protocol", False)

    def to_instance(value: Any) -> Any:
        if isinstance(value, (base, *others)) or (takes_configs and is_config(value)):
            return value
        return value if not takes_configs and _builds(value, base) else MISMATCH

    return to_instance


def _can_be_checked(cls: type) -> bool:
    # Arrays and dtypes have many classes, and those of NumPy are valid in place of JAX's.
    if cls.__module__.partition(".")[0] in ("jax", "jaxlib", "numpy"):
        return False
    try:
        isinstance(None, cls)
    except TypeError:  # a TypedDict, or a protocol that is not runtime_checkable
        return False
    return True


def _to_member(base: Any, value: Any) -> Any:
    if isinstance(value, base):
        return value
    try:
        return base(value)
    except ValueError:
        name = value.removeprefix(f"{base.__qualname__}.") if isinstance(value, str) else None
        return base.__members__.get(name, MISMATCH)


def _to_config(kind: Any, target: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        return MISMATCH
    described = value.__fn_or_cls__
    is_any = not isinstance(target, type) or target is _Unknown or not isinstance(described, type)
    return value if is_any or issubclass(described, target) else MISMATCH
