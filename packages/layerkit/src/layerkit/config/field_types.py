"""Conversion of values to the types that fields are annotated with.

Both `Config` and the command line convert by this module. An annotation is usually text, whose
names are looked up in the modules of the class when a field is first set. A name that cannot be
found, such as one that is imported for type checkers only, stands for any type.

This module imports nothing that takes time, so that command lines can use it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import functools
import inspect
import json
import re
import shlex
import typing
import warnings
from typing import Any

from layerkit.config.type_converters import (
    MISMATCH,
    Converter,
    converter_of,
    converter_of_text,
    evaluate,
    is_union,
)
from layerkit.errors import ConfigError

# Fields that Flax adds to modules, which belong to no config.
_HIDDEN_FIELDS = frozenset({"parent"})


# The type at run time of a field whose value type checkers do not check.
_BUILT = re.compile(r"^Annotated\[Any, (.*)\]$")


class FieldTypeError(ConfigError, TypeError):
    """A value of another type than the annotation of its field."""


class Annotation(str):
    """The text of an annotation, with the modules in which its names are looked up.

    Attributes:
      modules: Names of modules; earlier ones take precedence.
    """

    modules: tuple[str, ...]

    def __new__(cls, text: str, modules: tuple[str, ...] = ()) -> Annotation:
        """Return the text of an annotation as a string with `modules`."""
        annotation = super().__new__(cls, text)
        annotation.modules = modules
        return annotation


def read_annotation(annotation: Any, *modules: str) -> Annotation | None:
    """Return an annotation as text with the modules of its names; None if there is none."""
    if annotation is None or annotation is inspect.Parameter.empty:
        return None
    is_text = isinstance(annotation, str)
    return Annotation(annotation if is_text else inspect.formatannotation(annotation), modules)


def field_annotations(target: Any) -> dict[str, Annotation | None]:
    """Return the annotations of the fields of a dataclass, or of the parameters of a callable."""
    return {name: field.annotation for name, field in typed_fields(target).items()}


def convert_field(target: Any, name: str, value: Any, *, owner: str | None = None) -> Any:
    """Return a value as the field of a config of `target` holds it; see `convert`.

    Any value is valid for a field without an annotation, and for a name that is not a field. The
    default of a field is always valid.

    Args:
      target: Class or function with the field.
      name: Name of the field.
      value: Value of the field.
      owner: Name of the target for messages.

    Raises:
      FieldTypeError: `value` is of another type.
    """
    field = typed_fields(target).get(name)
    if field is None or (converter := field.converter) is None:
        return value
    converted = converter(value)
    if converted is not MISMATCH:
        return converted
    if value is field.default:
        return value
    owner = owner or getattr(target, "__qualname__", repr(target))
    raise _mismatch(value, field.annotation, owner=owner, field=name)


def convert(value: Any, annotation: str | None) -> Any:
    """Return a value as a field with this annotation holds it.

    An int is converted to an expected float, a list to a tuple, a tuple to a list, and the value or
    name of an enumeration's member (`RED` or `Color.RED`) to that member. Other values are not
    converted: True and 1.0 are not valid as an int. A config is valid for the class that it builds.
    A config of a function is valid for every type except None.

    Raises:
      FieldTypeError: `value` is of another type.
    """
    converter = None if annotation is None else _text_converter(annotation)
    converted = value if converter is None else converter(value)
    if converted is MISMATCH:
        raise _mismatch(value, annotation)
    return converted


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
    converter = _text_converter(annotation)
    takes = converter is None or converter(text) == text
    return takes and (untyped or "str" in annotation)


def _mismatch(value: Any, annotation: str | None, **data: Any) -> FieldTypeError:
    choices = _choices(annotation) if annotation else ()
    expected = None if choices else annotation and _BUILT.sub(r"\1", annotation)
    return FieldTypeError(value=value, expected=expected, choices=choices, **data)


def _choices(annotation: str) -> tuple[Any, ...]:
    """Return the values of an annotation that is a choice of literals or members."""
    choices: list[Any] = []
    kind = evaluate(annotation, getattr(annotation, "modules", ()))
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


def _text_converter(annotation: str) -> Converter | None:
    return converter_of_text(str(annotation), getattr(annotation, "modules", ()))


# The fields of a target.


@dataclasses.dataclass
class TypedField:
    """A field of a class or a parameter of a function.

    Attributes:
      kind: Annotation, as text or as a type.
      modules: Modules in which the names of the annotation are looked up.
      default: Default value, which is always valid.
    """

    kind: Any
    modules: tuple[str, ...]
    default: Any

    @functools.cached_property
    def annotation(self) -> Annotation | None:
        """The text of the annotation."""
        return read_annotation(self.kind, *self.modules)

    @functools.cached_property
    def converter(self) -> Converter | None:
        """The function that converts values; None if every value fits."""
        return None if self.annotation is None else converter_of(self.kind, self.modules)


@functools.cache
def typed_fields(target: Any) -> dict[str, TypedField]:
    """Return the fields of a dataclass, or the named parameters of a callable."""
    if dataclasses.is_dataclass(target):
        return {
            field.name: TypedField(field.type, _declaring_modules(target, field), field.default)
            for field in dataclasses.fields(target)
            if field.init and field.name not in _HIDDEN_FIELDS
        }
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # The names of classes are not looked up: what a function is annotated with may be wrong, or
    # become right when a job fills in the argument.
    return {
        parameter.name: TypedField(read_annotation(parameter.annotation), (), parameter.default)
        for parameter in parameters_of(target)
        if parameter.kind in named
    }


def field_choices(target: Any) -> list[str]:
    """Return the names of the fields, those that a class declares itself before inherited ones."""
    declared = getattr(target, "__annotations__", {})
    return sorted(typed_fields(target), key=lambda name: name not in declared)


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
