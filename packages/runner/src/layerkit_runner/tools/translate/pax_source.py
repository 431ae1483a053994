"""Reads the classes of a Pax file from its syntax tree: nothing of Pax is imported or run."""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from layerkit_runner.errors import UsageError

_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


# Bounds of what is computed. The values of a configuration are far below them, and an expression
# of a few characters, such as 9**9**9, can be far beyond what fits in memory.
_MAX_BITS = 128
_MAX_ITEMS = 1_000
# Of an integer as it is written, about 3,000 digits.
_MAX_LITERAL_BITS = 10_000


class Symbol(str):
    """A name of another module, by its last part: `bfloat16` for `jnp.bfloat16`."""


_PLAIN = (bool, int, float, str, list, type(None))
_COMPARISONS: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class CannotTellError(ValueError):
    """An expression whose value the source alone does not tell; its text.

    Attributes:
      reason: Why.
    """

    def __init__(self, text: str, reason: str = "the source alone does not tell its value") -> None:
        super().__init__(text)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class PaxClass:
    """A class of the file.

    Attributes:
      name: As it is called.
      bases: The last parts of the names of its bases.
      summary: The first line of its docstring.
      fields: Its own UPPER_CASE attributes; `CannotTellError` where the source does not tell.
      methods: Its own, by name.
      is_registered: Whether a decorator registers it, so that Pax can run it.
    """

    name: str
    bases: tuple[str, ...]
    summary: str
    fields: Mapping[str, Any]
    methods: Mapping[str, PaxFunction]
    is_registered: bool = False


@dataclasses.dataclass(frozen=True)
class PaxFunction:
    """A function or method, with the values of the plain names of its file."""

    node: ast.FunctionDef
    constants: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PaxSource:
    """The classes and functions of files, by name."""

    classes: Mapping[str, PaxClass]
    functions: Mapping[str, PaxFunction]

    def experiments(self) -> list[str]:
        """The classes that can run: the registered; where none is, those that none inherits."""
        registered = [name for name, found in self.classes.items() if found.is_registered]
        inherited = {
            base for name, found in self.classes.items() for base in found.bases if base != name
        }
        return registered or [name for name in self.classes if name not in inherited]


def read_source(texts: Mapping[str, str]) -> PaxSource:
    """Reads files, by their names; later ones may inherit from earlier ones and the other way.

    Raises:
      UsageError: a file is no Python.
    """
    classes: dict[str, PaxClass] = {}
    functions: dict[str, PaxFunction] = {}
    for name, text in texts.items():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:  # the latter for a byte of 0
            raise UsageError(f"{name} is no Python: {error}") from error
        except (RecursionError, MemoryError):  # the parser raises either
            raise UsageError(f"{name}: expected code that is less deeply nested.") from None
        _check_integers(name, tree)
        constants: dict[str, Any] = {}
        for node in _statements_of(tree.body):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = _read_class(node, constants)
            elif isinstance(node, ast.FunctionDef):
                functions[node.name] = PaxFunction(node, constants)
            else:
                _assign(node, constants, constants)
    return PaxSource(classes, functions)


def _check_integers(name: str, tree: ast.Module) -> None:
    """Refuse integers that Python cannot write in decimal, as a message would."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, int) and value.bit_length() > _MAX_LITERAL_BITS:
            line = getattr(node, "lineno", "?")
            raise UsageError(f"{name}: line {line} has an integer of over 3,000 digits.")


def _statements_of(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a file; of conditional ones the classes and functions, then the rest."""
    for node in body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            inner = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
            defined = (ast.ClassDef, ast.FunctionDef)
            yield from (part for part in _statements_of(inner) if isinstance(part, defined))
        yield node


def _read_class(node: ast.ClassDef, constants: Mapping[str, Any]) -> PaxClass:
    fields: dict[str, Any] = {}
    for statement in node.body:
        if not isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            _assign(statement, fields, {**constants, **fields})
    parts = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    return PaxClass(
        name=node.name,
        bases=tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases),
        summary=(ast.get_docstring(node) or node.name).partition("\n")[0].strip(),
        fields={name: value for name, value in fields.items() if name.isupper()},
        methods={part.name: PaxFunction(part, constants) for part in parts},
        is_registered=any(map(_registers, node.decorator_list)),
    )


def _registers(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(function).rpartition(".")[2].startswith("register")


def _assign(node: ast.stmt, target: dict[str, Any], names: Mapping[str, Any]) -> None:
    """Notes what a statement assigns to plain names; of those in branches it cannot tell."""
    if isinstance(node, ast.Assign):
        pairs = [(place, node.value) for place in node.targets]
    elif isinstance(node, ast.AnnAssign):
        pairs = [] if node.value is None else [(node.target, node.value)]
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        before = ast.Name(node.target.id, ast.Load())
        pairs = [(node.target, ast.BinOp(before, node.op, node.value))]
    else:
        pairs = []
        unknown = CannotTellError(ast.unparse(node).partition("\n")[0].rstrip(":"))
        stored = (part for part in ast.walk(node) if isinstance(part, ast.Name))
        target.update({part.id: unknown for part in stored if isinstance(part.ctx, ast.Store)})
    for place, value in pairs:
        if isinstance(place, ast.Name):
            target[place.id] = told(value, names)
            continue
        parts = [part for part in ast.walk(place) if isinstance(part, ast.Name)]
        names_of = [part.id for part in parts if isinstance(part.ctx, ast.Store)]
        target.update(dict.fromkeys(names_of, CannotTellError(ast.unparse(value))))


def told(node: ast.expr, names: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> Any:
    """The value of an expression, or the `CannotTellError`; arguments as `evaluate` has them."""
    try:
        return evaluate(node, names, fields)
    except CannotTellError as error:
        return error


def evaluate(
    node: ast.expr, names: Mapping[str, Any], fields: Mapping[str, Any] | None = None
) -> Any:
    """The value of an expression of literals, arithmetic and names.

    Args:
      node: Its tree.
      names: Values of plain names.
      fields: Values of `self.X` and `cls.X`.

    Raises:
      CannotTellError: it calls something, does what is not known here, or exceeds the bounds.
    """
    return _bounded(_evaluate(node, names, fields), node)


def _evaluate(node: ast.expr, names: Mapping[str, Any], fields: Mapping[str, Any] | None) -> Any:
    def of(part: ast.expr) -> Any:
        return evaluate(part, names, fields)

    def plain(part: ast.expr) -> Any:
        value = of(part)
        if isinstance(value, Symbol) or not isinstance(value, _PLAIN):
            raise CannotTellError(ast.unparse(node))
        return value

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [of(item) for item in node.elts]
    if isinstance(node, ast.Name):
        return _sound(names.get(node.id, Symbol(node.id)))
    if isinstance(node, ast.Attribute):
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return _sound(
            (fields or {}).get(node.attr, Symbol(node.attr)) if of_self else Symbol(node.attr)
        )
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not plain(node.operand)
    try:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -_number(plain(node.operand), node)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = (_number(plain(part), node) for part in (node.left, node.right))
            _check_growth(node, left, right)
            return _OPERATORS[type(node.op)](left, right)
        if (
            isinstance(node, ast.Compare)
            and len(node.ops) == 1
            and type(node.ops[0]) in _COMPARISONS
        ):
            compare = _COMPARISONS[type(node.ops[0])]
            return compare(plain(node.left), plain(node.comparators[0]))
    except (ArithmeticError, TypeError) as error:
        raise CannotTellError(ast.unparse(node), str(error)) from error
    raise CannotTellError(ast.unparse(node))


def _sound(value: Any) -> Any:
    if isinstance(value, CannotTellError):
        raise value
    return value


def _check_growth(node: ast.BinOp, left: Any, right: Any) -> None:
    """Raise `CannotTellError` before an operation whose result alone would fill the memory."""
    if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
        items, times = (left, right) if isinstance(left, list) else (right, left)
        if isinstance(times, int) and len(items) * times > _MAX_ITEMS:
            raise _too_large(node)
    are_ints = isinstance(left, int) and isinstance(right, int)
    if isinstance(node.op, ast.Pow) and are_ints and (left.bit_length() - 1) * right > _MAX_BITS:
        raise _too_large(node)


def _bounded(value: Any, node: ast.expr) -> Any:
    """Return a value within the bounds; parts that are shared count each time, as in its text."""
    items, parts = 0, [value]
    while parts:
        part = parts.pop()
        # Text is counted by its length: the value is written out where it is not translated.
        items += 1 + (len(part) // 16 if isinstance(part, str) else 0)
        if items > _MAX_ITEMS or (isinstance(part, int) and part.bit_length() > _MAX_BITS):
            raise _too_large(node)
        if isinstance(part, list):
            parts += part
    return value


def _too_large(node: ast.expr) -> CannotTellError:
    return CannotTellError(ast.unparse(node), "its value is larger than that of any field")


def _number(value: Any, node: ast.expr) -> Any:
    if isinstance(value, str) or value is None:
        raise CannotTellError(ast.unparse(node))
    return value
