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

from layerkit.config.type_converters import MISMATCH, fit, is_union, resolve
from layerkit.errors import ConfigError

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
