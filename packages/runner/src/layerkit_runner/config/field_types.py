"""Whether a value fits a field, by the text of the field's annotation.

Annotations are handled as text, since the names in them may be imported for type checkers only.
Plain types are checked (int, float, bool, str, None, lists, tuples, dicts, Optional, unions and
Literal of these); a field of any other type takes any value.
"""

from __future__ import annotations

import ast
import functools
import inspect
import numbers
import warnings
from collections.abc import Callable
from typing import Any

# Spellings of "a qualifier around the type".
_TRANSPARENT = frozenset({"ClassVar", "Final", "Annotated", "Required", "NotRequired"})


class MismatchError(ValueError):
    """The value does not fit the annotation; the text says which type was expected."""


def annotation_text(annotation: Any) -> str | None:
    """Return the source text of an annotation, or None."""
    if annotation is None or annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def convert(value: Any, annotation: str | None) -> Any:
    """Return a value as a field with this annotation holds it.

    An int becomes a float where a float is asked for, a list a tuple, and a tuple a list; nothing
    else changes. In particular True is no int, and 1.0 is no int.

    Raises:
      MismatchError: `value` is of another type.
    """
    if annotation is None:
        return value
    try:
        return _convert(value, _parse(annotation))
    except MismatchError:
        raise MismatchError(f"expected {annotation}, got {value!r}") from None


def parse_value(text: str, annotation: str | None = None) -> Any:
    """Return the value that a text on a command line has for a field with this annotation.

    `text` is a Python literal, in which bare words (`bfloat16`, also inside brackets) are strings.
    A field that takes strings takes any other text as it stands: `3` is then `"3"`.

    Raises:
      MismatchError: not a literal, or of another type than the annotation says.
    """
    expected = f"expected {annotation}, " if annotation else ""
    try:
        value = parse_literal(text)
    except MismatchError as error:
        if _takes_text(text, annotation, untyped=False):
            return text
        raise MismatchError(f"{expected}got {text!r}, which {error}") from None
    if text in ("true", "false") and not _takes_text(text, annotation, untyped=False):
        raise MismatchError(f"{expected}got {text!r}; did you mean {text.capitalize()}?")
    try:
        return convert(value, annotation)
    except MismatchError:
        # `None` stays None: a string of that name is hardly ever meant.
        if value is not None and _takes_text(text, annotation):
            return text
        raise


def parse_literal(text: str) -> Any:
    """Read a Python literal in which bare words are strings.

    Raises:
      MismatchError: `text` opens a bracket or a quote and is not a literal, or nests too deeply.
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
            raise MismatchError("is not a complete Python literal") from None
        return text
    except (RecursionError, MemoryError):  # the parser raises either
        raise MismatchError("is nested too deeply") from None


class _WordsToStrings(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Constant(ast.unparse(node))


def _takes_text(text: str, annotation: str | None, *, untyped: bool = True) -> bool:
    if annotation is None:
        return untyped
    try:
        return _convert(text, _parse(annotation)) == text and (untyped or "str" in annotation)
    except MismatchError:
        return False


@functools.cache
def _parse(annotation: str) -> ast.expr:
    try:
        return ast.parse(annotation.strip(), mode="eval").body
    except SyntaxError:
        return ast.Name("Any")


def _convert(value: Any, node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _convert(value, _parse(node.value))
    if isinstance(node, ast.Constant) and node.value is None:
        return _convert_plain(value, "None")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _convert_union(value, [node.left, node.right])
    if isinstance(node, ast.Subscript):
        arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _convert_generic(value, _last_name(node.value), arguments)
    return _convert_plain(value, _last_name(node))


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


# What fits each plain type, and what it becomes where that differs.
_FITS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: _is_number(value, numbers.Integral),
    "float": lambda value: _is_number(value, numbers.Real),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
    **dict.fromkeys(("list", "List", "tuple", "Tuple", "Sequence"), _is_sequence),
    **dict.fromkeys(("dict", "Dict", "Mapping"), _is_dict),
}
_BECOMES: dict[str, Callable[[Any], Any]] = {
    "float": lambda value: float(value) if isinstance(value, int) else value,
    **dict.fromkeys(("list", "List"), list),
    **dict.fromkeys(("tuple", "Tuple"), lambda v: v if isinstance(v, tuple) else tuple(v)),
}


def _convert_plain(value: Any, kind: str) -> Any:
    if kind not in _FITS:
        return value
    if not _FITS[kind](value):
        raise MismatchError
    return _BECOMES[kind](value) if kind in _BECOMES else value


def _convert_generic(value: Any, head: str, arguments: list[ast.expr]) -> Any:
    if head in _TRANSPARENT:
        return _convert(value, arguments[0])
    if head == "Optional":
        return _convert_union(value, [*arguments, ast.Constant(None)])
    if head == "Union":
        return _convert_union(value, arguments)
    if head == "Literal":
        # Members of enumerations cannot be told from the text; they are left unchecked.
        choices = [a.value for a in arguments if isinstance(a, ast.Constant)]
        if len(choices) == len(arguments) and (type(value), value) not in [
            (type(choice), choice) for choice in choices
        ]:
            raise MismatchError
        return value
    value = _convert_plain(value, head)
    if head not in _FITS:
        return value
    if isinstance(value, dict):
        key, item = arguments
        return {_convert(k, key): _convert(v, item) for k, v in value.items()}
    if head in ("tuple", "Tuple") and not _is_ellipsis(arguments[-1]):
        if len(value) != len(arguments):
            raise MismatchError
        return tuple(_convert(item, node) for item, node in zip(value, arguments, strict=True))
    items = [_convert(item, arguments[0]) for item in value]
    return tuple(items) if isinstance(value, tuple) else items


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _convert_union(value: Any, members: list[ast.expr]) -> Any:
    """Prefers the member that takes the value as it is: 3 stays an int in `float | int`."""
    converted = []
    for member in members:
        try:
            converted.append(_convert(value, member))
        except MismatchError:
            continue
    if not converted:
        raise MismatchError
    return next((c for c in converted if type(c) is type(value)), converted[0])
