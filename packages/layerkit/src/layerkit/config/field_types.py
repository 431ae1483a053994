"""Conversion of values to the types that fields are annotated with.

Both `Config` and the command line convert by this module. An annotation is usually text, whose
names are looked up in the modules of the class when a field is first set. A name that cannot be
found, such as one that is imported for type checkers only, stands for any type.

This module imports nothing that takes time, so that command lines can use it.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import contextlib
import dataclasses
import enum
import functools
import inspect
import json
import numbers
import pathlib
import re
import shlex
import sys
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerkit.errors import ConfigError

MISMATCH: Any = object()
"""Result of `fit` for a value of another type."""

_TYPING = {**vars(typing), "typing": typing}
# Annotations that wrap a type and accept the same values as the type.
_TRANSPARENT = (typing.ClassVar, typing.Final, typing.Annotated, typing.Required)


class _Names(dict[str, Any]):
    """The names of an annotation, found in modules, in `builtins` or in `typing`, or else Any."""

    def __init__(self, modules: tuple[str, ...]):
        self._scopes = [vars(sys.modules[name]) for name in modules if name in sys.modules]
        self._scopes += [vars(builtins), _TYPING]

    def __missing__(self, name: str) -> Any:
        return next((scope[name] for scope in self._scopes if name in scope), Any)


@functools.cache
def _evaluate(text: str, modules: tuple[str, ...]) -> Any:
    try:
        # The text comes from source code, as for `typing.get_type_hints`.
        return resolve(eval(text, {}, _Names(modules)), modules)
    except Exception:
        return Any


def resolve(kind: Any, modules: tuple[str, ...]) -> Any:
    """Return the type that an annotation stands for, which may be text.

    Names that are not found, and text that cannot be evaluated, become Any.
    """
    kind = getattr(kind, "__forward_arg__", kind)
    return _evaluate(kind, modules) if isinstance(kind, str) else kind


def is_union(kind: Any) -> bool:
    """Return whether a type is a union, such as `int | None`."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def fit(value: Any, kind: Any, modules: tuple[str, ...] = ()) -> Any:
    """Return a value as a field of a type holds it, or `MISMATCH` if it does not fit.

    Args:
      value: Any value.
      kind: Type, which may be text.
      modules: Names of modules in which names of the text are looked up, earlier ones first.
    """
    kind = resolve(kind, modules)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    for attribute in ("__supertype__", "__value__"):  # the type behind a NewType, a type alias
        if hasattr(kind, attribute):
            return fit(value, getattr(kind, attribute), modules)
    if origin in _TRANSPARENT or origin is typing.NotRequired:
        # `Annotated[Any, BaseModel]`: type checkers accept a config, which is built later.
        return fit(value, arguments[-1 if arguments[0] is Any else 0], modules)
    if is_union(kind):
        results = [fit(value, member, modules) for member in arguments]
        fitting = [result for result in results if result is not MISMATCH]
        # A member that keeps the type takes precedence: 3 stays an int in `float | int`.
        same = [result for result in fitting if type(result) is type(value)]
        return next(iter(same + fitting), MISMATCH)
    if kind is None or kind is type(None):
        return None if value is None else MISMATCH
    target = _target_of(value)
    if target is not None and not isinstance(target, type):
        return value  # The result of a function has an unknown type.
    base = origin or kind
    if base is typing.Literal:
        equal = (choice for choice in arguments if type(choice) is type(value) and choice == value)
        return next(equal, MISMATCH)
    if base in _SCALARS:
        return _SCALARS[base](value)
    if base in (list, tuple, collections.abc.Sequence):
        return _fit_sequence(value, base, arguments, modules)
    if base in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        return _fit_mapping(value, arguments or (Any, Any), modules)
    if base is collections.abc.Callable:
        return value if callable(value) or is_config(value) else MISMATCH
    if base is type:
        of = arguments[0] if arguments and isinstance(arguments[0], type) else object
        return value if isinstance(value, type) and issubclass(value, of) else MISMATCH
    # Arrays and dtypes have many classes, and those of NumPy are valid in place of JAX's.
    is_array = getattr(base, "__module__", "").partition(".")[0] in ("jax", "jaxlib", "numpy")
    if is_array or base is Any or not isinstance(base, type):
        return value
    return _fit_class(value, base, arguments, modules)


def is_config(value: Any) -> bool:
    """Return whether a value is a config of layerkit or of Fiddle."""
    fdl = sys.modules.get("fiddle")  # without which there are no configs
    return fdl is not None and isinstance(value, fdl.Buildable)


def _target_of(value: Any) -> Any:
    """Return the class or function that a config calls; None for other values and partials."""
    fdl: Any = sys.modules.get("fiddle")
    is_call = fdl is not None and isinstance(value, fdl.Config)
    return fdl.get_callable(value) if is_call else None


def _is_scalar_array(value: Any) -> bool:
    # Only shape and dtype are read, since a traced scalar of JAX has no value yet.
    return hasattr(value, "dtype") and getattr(value, "shape", None) == ()


def _to_int(value: Any) -> Any:
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return value if is_int or (_is_scalar_array(value) and value.dtype.kind in "iu") else MISMATCH


def _to_float(value: Any) -> Any:
    if isinstance(value, int):
        return MISMATCH if isinstance(value, bool) else float(value)
    is_array = _is_scalar_array(value) and value.dtype.kind != "b"
    return value if isinstance(value, numbers.Real) or is_array else MISMATCH


def _to_bool(value: Any) -> Any:
    is_numpy = type(value).__module__ == "numpy" and _is_scalar_array(value)
    is_bool = isinstance(value, bool) or (is_numpy and value.dtype.kind == "b")
    return bool(value) if is_bool else MISMATCH


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    int: _to_int,
    float: _to_float,
    bool: _to_bool,
    str: lambda value: value if isinstance(value, str) else MISMATCH,
}


def _fit_sequence(value: Any, base: Any, kinds: tuple[Any, ...], modules: tuple[str, ...]) -> Any:
    if not isinstance(value, (list, tuple)):
        is_other = base is collections.abc.Sequence and isinstance(value, Sequence)
        return value if is_other and not isinstance(value, (str, bytes)) else MISMATCH
    if base is not tuple or not kinds or kinds[-1] is Ellipsis:
        kinds = (kinds or (Any,))[:1] * len(value)
    if len(value) != len(kinds):
        return MISMATCH
    items = [fit(item, kind, modules) for item, kind in zip(value, kinds, strict=True)]
    if any(item is MISMATCH for item in items):
        return MISMATCH
    # An unchanged list stays the same object, since its owner may still edit it.
    if any(new is not old for new, old in zip(items, value, strict=True)):
        plain = tuple if isinstance(value, tuple) else list
        value = value._make(items) if hasattr(value, "_make") else plain(items)
    return value if isinstance(value, base) else base(value)


def _fit_mapping(value: Any, kinds: tuple[Any, ...], modules: tuple[str, ...]) -> Any:
    if not isinstance(value, Mapping):
        return MISMATCH
    key, item = kinds
    items = {fit(k, key, modules): fit(v, item, modules) for k, v in value.items()}
    if MISMATCH in items or any(v is MISMATCH for v in items.values()):
        return MISMATCH
    return value if all(items.get(k) is v for k, v in value.items()) else items


def _fit_class(value: Any, base: Any, kinds: tuple[Any, ...], modules: tuple[str, ...]) -> Any:
    """Fit a value to a class, of which it may be an instance or a config."""
    if hasattr(base, "_target") and hasattr(base, "config"):
        # `SomeLayer.HParams`, as Praxis annotates templates; `BaseHParams` has no target.
        return fit(value, base._target or Any, modules)
    if issubclass(base, enum.Enum):
        return _to_member(value, base)
    fdl: Any = sys.modules.get("fiddle")
    target = _target_of(value)
    if fdl is not None and issubclass(base, fdl.Buildable):
        # A field for layerkit's configs also accepts those of Fiddle, from which they derive.
        kind = next(k for k in (fdl.Config, fdl.Partial, fdl.Buildable) if issubclass(base, k))
        described: Any = getattr(value, "__fn_or_cls__", None)
        expected = resolve((*kinds, Any)[0], modules)
        expected = typing.get_origin(expected) or expected
        is_any = expected is Any or not isinstance(expected, type)
        fits_target = is_any or not isinstance(described, type) or issubclass(described, expected)
        fits = isinstance(value, kind) and fits_target
    elif getattr(base, "_is_protocol", False):
        # Whether a config builds an instance of a protocol is known only once it is built.
        fits = is_config(value) or _is_instance(value, base)
    else:
        is_path = issubclass(base, pathlib.PurePath) and isinstance(value, str)
        fits = is_path or _is_instance(value, base)
        fits = fits or (isinstance(target, type) and issubclass(target, base))
    return value if fits else MISMATCH


def _is_instance(value: Any, base: Any) -> bool:
    try:
        return isinstance(value, base)
    except TypeError:  # a TypedDict, or a protocol that is not runtime_checkable
        return True


def _to_member(value: Any, base: Any) -> Any:
    try:
        return base(value)
    except ValueError:
        name = value.removeprefix(f"{base.__qualname__}.") if isinstance(value, str) else None
        return base.__members__.get(name, MISMATCH)


# Fields that Flax adds to modules, which belong to no config.
_HIDDEN_FIELDS = frozenset({"parent"})


# The type at run time of a field whose value type checkers do not check.
_BUILT = re.compile(r"^Annotated\[Any, (.*)\]$")


class FieldTypeError(ConfigError, TypeError):
    """A value of another type than the annotation of its field."""


class Annotation(str):
    """The annotation of a field as text, with what is needed to convert values to it.

    Attributes:
      kind: Annotation, as text or as a type.
      modules: Names of modules in which the names of the text are looked up, earlier ones first.
      default: Default of the field, which is always valid.
    """

    kind: Any
    modules: tuple[str, ...]
    default: Any

    def __new__(cls, kind: Any, *modules: str, default: Any = MISMATCH) -> Annotation:
        """Return an annotation with the modules of its names."""
        text = "Any" if kind is inspect.Parameter.empty else kind
        text = text if isinstance(text, str) else inspect.formatannotation(text)
        self = super().__new__(cls, text)
        self.kind, self.modules, self.default = kind, modules, default
        return self

    def fit(self, value: Any) -> Any:
        """Return a value as the field holds it, or `MISMATCH`."""
        return fit(value, self.kind, self.modules)


@functools.cache
def field_annotations(target: Any) -> dict[str, Annotation]:
    """Return the annotations of the fields of a dataclass, or of the parameters of a callable."""
    if dataclasses.is_dataclass(target):
        return {
            field.name: Annotation(
                field.type, *_declaring_modules(target, field), default=field.default
            )
            for field in dataclasses.fields(target)
            if field.init and field.name not in _HIDDEN_FIELDS
        }
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # The names of classes are not looked up: what a function is annotated with may be wrong, or
    # become right when a job fills in the argument.
    return {
        parameter.name: Annotation(str(Annotation(parameter.annotation)), default=parameter.default)
        for parameter in parameters_of(target)
        if parameter.kind in named
    }


def field_choices(target: Any) -> list[str]:
    """Return the names of the fields, those that a class declares itself before inherited ones."""
    declared = getattr(target, "__annotations__", {})
    return sorted(field_annotations(target), key=lambda name: name not in declared)


def parameters_of(target: Any) -> list[inspect.Parameter]:
    """Return the parameters of a callable; only `**kwargs` if it has no signature, like dict."""
    try:
        return list(inspect.signature(target).parameters.values())
    except ValueError:
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def _declaring_modules(cls: Any, field: dataclasses.Field) -> tuple[str, ...]:
    """Return the modules of the classes that declare a field with this type, base classes first."""
    classes = [
        base
        for base in reversed(inspect.getmro(cls))
        if vars(base).get("__annotations__", {}).get(field.name) == field.type
    ]
    return tuple(dict.fromkeys(base.__module__ for base in classes))


def convert_field(target: Any, name: str, value: Any, *, owner: str | None = None) -> Any:
    """Return a value as the field `name` of a config of `target` holds it; see `convert`.

    Any value is valid for a name that is not a field.

    Raises:
      FieldTypeError: `value` is of another type. `owner`, or else `target`, owns the field.
    """
    try:
        return convert(value, field_annotations(target).get(name))
    except FieldTypeError as error:
        error.owner = owner or getattr(target, "__qualname__", repr(target))
        error.field = name
        raise


def convert(value: Any, annotation: str | None) -> Any:
    """Return a value as a field with this annotation holds it.

    An int is converted to an expected float, a list to a tuple, a tuple to a list, and the value or
    name of an enumeration's member (`RED` or `Color.RED`) to that member. Other values are not
    converted: True and 1.0 are not valid as an int. A config is valid for the class that it builds.
    A config of a function is valid for every type except None. The default of a field is always
    valid, and so is any value without an annotation.

    Raises:
      FieldTypeError: `value` is of another type.
    """
    if annotation is None:
        return value
    converted = _as_annotation(annotation).fit(value)
    if converted is not MISMATCH:
        return converted
    if value is getattr(annotation, "default", MISMATCH):
        return value
    raise _mismatch(value, annotation)


def parse_value(text: str, annotation: str | None = None) -> Any:
    """Return the value that a text on a command line has for a field with this annotation.

    `text` is a Python literal, in which bare words (`bfloat16`, also inside brackets) are strings,
    and `inf` and `nan` are floats.
    A field that takes strings takes any other text unchanged: `3` is then `"3"`.

    Raises:
      FieldTypeError: `text` is not a literal, or of another type than the annotation.
    """
    is_text_field = functools.partial(_takes_text, text, annotation)
    try:
        value = parse_literal(text)
    except FieldTypeError as error:
        if is_text_field(untyped=False):
            return text
        raise _mismatch(text, annotation, hint=error.hint) from None
    if text in ("true", "false") and not is_text_field(untyped=False):
        raise _mismatch(text, annotation, hint=f"Did you mean {text.capitalize()}?")
    try:
        return convert(value, annotation)
    except FieldTypeError as error:
        # `None` stays None: a string of that name is hardly ever meant.
        if value is not None and is_text_field(untyped=True):
            return text
        with contextlib.suppress(FieldTypeError, TypeError):
            convert([value], annotation)
            error.hint = f"Write a list as {shlex.quote(json.dumps([value]))}."
        raise


def parse_literal(text: str) -> Any:
    """Read a Python literal in which bare words are strings, except `inf` and `nan`.

    Raises:
      FieldTypeError: `text` opens a bracket or a quote and is not a literal, or nests too deeply.
    """
    text = text.strip()
    if text in ("inf", "-inf", "nan"):
        return float(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text, mode="eval").body
        return ast.literal_eval(_WordsToStrings().visit(tree))
    except (SyntaxError, ValueError, TypeError):
        if text[:1] in tuple("[({'\""):
            raise FieldTypeError(value=text, hint="It is not a complete Python literal.") from None
        return text
    except (RecursionError, MemoryError):  # the parser raises either
        raise FieldTypeError(value=text, hint="It is nested too deeply.") from None


class _WordsToStrings(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id) if node.id in ("inf", "nan") else node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Constant(ast.unparse(node))


def _takes_text(text: str, annotation: str | None, *, untyped: bool) -> bool:
    if annotation is None:
        return untyped
    takes = _as_annotation(annotation).fit(text) == text
    return takes and (untyped or "str" in annotation)


def _as_annotation(text: str) -> Annotation:
    return text if isinstance(text, Annotation) else Annotation(text)


def _mismatch(value: Any, annotation: str | None, *, hint: str | None = None) -> FieldTypeError:
    choices = _choices(_as_annotation(annotation)) if annotation else ()
    expected = None if choices else annotation and _BUILT.sub(r"\1", annotation)
    return FieldTypeError(value=value, expected=expected, choices=choices, hint=hint)


def _choices(annotation: Annotation) -> tuple[Any, ...]:
    """Return the values of an annotation that is a choice of literals or members."""
    choices: list[Any] = []
    kind = resolve(annotation, annotation.modules)
    for member in typing.get_args(kind) if is_union(kind) else (kind,):
        if typing.get_origin(member) is typing.Literal:
            choices.extend(typing.get_args(member))
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            choices.extend(item.value for item in member)
        elif member is type(None):
            choices.append(None)
        else:
            return ()
    return tuple(choices) if choices != [None] else ()
