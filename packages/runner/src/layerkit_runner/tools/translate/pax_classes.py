"""Constants of Pax's experiment classes, read from their source without running it.

A class is translated with the constants that it inherits from classes of the same files and from
base classes of Pax that the table describes. Methods are not translated, but listed.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.translate.tables import (
    Leftover,
    NotTranslatedError,
    Translation,
    make_translation,
    map_keys,
    printable,
)

# A chain of products such as X = X * X can exceed any memory.
_MAX_BITS = 128
_MAX_WIDTH = 160  # of a quoted statement
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_UNKNOWN = "its value is known only when the source is run"
_UNREAD = "its base classes in Pax do not read it"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class _Symbol(str):
    """The last part of a name of another module, such as `bfloat16` of `jnp.bfloat16`."""


class _Constant(NamedTuple):
    """A constant of a class or module, with its source text, file and line.

    The value is a NotTranslatedError if the source does not determine it.
    """

    value: Any
    text: str
    where: str = "Pax"  # not in a file


class _PaxClass(NamedTuple):
    """A class of a file: last parts of base names, its own constants, and other statements."""

    bases: Sequence[str]
    summary: str
    constants: Mapping[str, _Constant]
    leftovers: Sequence[Leftover]
    is_registered: bool
    has_task: bool


# A class, or None for one of Pax, and the description of a base class of Pax with its name.
_Lineage = Sequence[tuple[_PaxClass | None, Mapping[str, Any]]]


def translate_pax(
    texts: Mapping[str, str], tables: Mapping[str, Any], names: Sequence[str] | None = None
) -> tuple[list[Translation], list[str]]:
    """Translate experiment classes of Pax; return the translations, and the names of others.

    Without `names`, these are the registered classes, or else those that no other inherits.
    """
    classes: dict[str, _PaxClass] = {}
    for file, text in texts.items():
        try:
            classes |= _read_file(file, text, tables["pax"]["methods"])
        except (SyntaxError, ValueError) as error:  # ValueError for a NUL byte
            raise UsageError(f"not valid Python: {error}", owner=file) from error
        except (RecursionError, MemoryError):  # the parser raises either one
            raise UsageError(owner=file, expected="less deeply nested code") from None
    files = ", ".join(texts)
    if not classes:
        raise UsageError("no class found", owner=files)
    inherited = {base for name, cls in classes.items() for base in cls.bases if base != name}
    registered = [name for name, cls in classes.items() if cls.is_registered]
    names = names or registered or [name for name in classes if name not in inherited]
    for name in names:
        if name not in classes:
            raise UsageError("unknown class", owner=files, value=name, choices=classes)
    try:
        translations = [_translate(classes, tables, name) for name in names]
    except RecursionError:
        raise UsageError(owner=files, expected="fewer base classes") from None
    return translations, [name for name in classes if name not in names]


def _read_file(name: str, text: str, methods: Mapping[str, str]) -> dict[str, _PaxClass]:
    """Return the classes of a file, by name; `methods` has the reasons for not translating them."""
    lines = re.split("\r\n|\r|\n", text)  # as Python counts them

    def quote(node: ast.stmt | ast.expr) -> tuple[str, str]:
        """Return the first line of a statement, and its place."""
        return printable(lines[node.lineno - 1][:_MAX_WIDTH]), f"{name}:{node.lineno}"

    def read_class(node: ast.ClassDef, outer: Mapping[str, _Constant]) -> _PaxClass:
        constants: dict[str, _Constant] = {}
        unknown = [d for d in node.decorator_list if not _last_name(d).startswith("register")]
        leftovers = [Leftover(*quote(d), "it is not a constant") for d in unknown]
        for statement in node.body:
            if isinstance(statement, _DEFINITIONS):
                constants.pop(statement.name, None)
                reason = methods.get(statement.name, "rewrite it if it is needed")
                leftovers.append(Leftover(*quote(statement), reason))
            elif assigned := _assigned(statement, ChainMap(constants, dict(outer))):
                constants |= {
                    key: _Constant(value, *quote(statement)) for key, value in assigned.items()
                }
            elif not _is_inert(statement):
                leftovers.append(Leftover(*quote(statement), "it is not a constant"))
        return _PaxClass(
            bases=[_last_name(base) for base in node.bases],
            summary=(ast.get_docstring(node) or node.name).partition("\n")[0],
            constants=constants,
            leftovers=leftovers,
            is_registered=len(unknown) < len(node.decorator_list),
            has_task=any(getattr(s, "name", None) == "task" for s in node.body),
        )

    constants: dict[str, _Constant] = {}
    classes: dict[str, _PaxClass] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = read_class(node, constants)
        elif not isinstance(node, _DEFINITIONS):
            assigned = _assigned(node, constants)
            constants |= {key: _Constant(value, *quote(node)) for key, value in assigned.items()}
    return classes


def _is_inert(node: ast.stmt) -> bool:
    """Return whether a statement of a class body, such as its docstring, sets nothing."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, (ast.Pass, ast.Import, ast.ImportFrom, ast.AnnAssign))


def _last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name or of a called function; ? for other expressions."""
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else "?"


def _assigned(node: ast.stmt, names: Mapping[str, _Constant]) -> dict[str, Any]:
    """Return the values of assigned names; NotTranslatedError for values that are unknown."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    expression = getattr(node, "value", None)
    if isinstance(node, ast.AnnAssign) and expression is None:
        return {}
    stored = [
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)
    ]
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        expression = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
    value: Any = NotTranslatedError(_UNKNOWN)
    if isinstance(expression, ast.expr) and all(isinstance(target, ast.Name) for target in targets):
        try:
            value = _evaluate(expression, names)
        except NotTranslatedError as error:
            value = error
    return dict.fromkeys(stored, value)


def _evaluate(node: ast.expr, names: Mapping[str, _Constant], *, is_number: bool = False) -> Any:
    """Return the value of a literal, a name, arithmetic of numbers, or a list of numbers."""
    part = functools.partial(_evaluate, names=names, is_number=True)
    value: Any = NotTranslatedError(_UNKNOWN)
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.Name) and node.id in names:
        value = names[node.id].value
    elif isinstance(node, (ast.Name, ast.Attribute)):
        value = _Symbol(_last_name(node))
    elif isinstance(node, (ast.List, ast.Tuple)):
        value = [part(item) for item in node.elts]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -part(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        try:
            value = _OPERATORS[type(node.op)](part(node.left), part(node.right))
        except ArithmeticError as error:
            raise NotTranslatedError(str(error)) from error
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        value = NotTranslatedError("its value is too large for any field")
    if isinstance(value, NotTranslatedError):
        raise value
    if is_number and type(value) not in (int, float):
        raise NotTranslatedError(_UNKNOWN)
    return value


def _translate(
    classes: Mapping[str, _PaxClass], tables: Mapping[str, Any], name: str
) -> Translation:
    table = tables["pax"]
    lineage, leftovers = _lineage(classes, table["bases"], name)
    knows_all_bases = not leftovers
    constants = {key: _Constant(value, key) for key, value in table["defaults"].items()}
    for cls, described in reversed(lineage):
        for key, value in described.get("fields", {}).items():
            # A file may define a base class of Pax itself. Then its constants count, together with
            # the fields that the table has for its methods.
            if cls is None or not key.isidentifier():
                constants[key] = _Constant(value, f"{key} = {value!r}")
        if cls is not None:
            constants |= cls.constants
            leftovers += cls.leftovers
    unread_keys = _unread_keys(table, lineage, constants) if knows_all_bases else []
    unread = [constants.pop(key) for key in unread_keys]
    in_files = [constant for constant in unread if constant.where != "Pax"]
    mapped, reasons = map_keys(table, {key: constant.value for key, constant in constants.items()})
    for key, reason in reasons.items():
        leftovers.append(Leftover(constants[key].text, constants[key].where, reason))
    return make_translation(
        tables,
        table["recipes"],
        mapped,
        leftovers,
        [Leftover(constant.text, constant.where, _UNREAD) for constant in in_files],
        name=name,
        summary=classes[name].summary,
    )


def _unread_keys(
    table: Mapping[str, Any], lineage: _Lineage, constants: Collection[str]
) -> list[str]:
    """Return known constants without effect in Pax, where the `task` of the base classes runs.

    A class of the files that has a `task` may read any constant.
    """
    if any(cls is not None and cls.has_task for cls, _ in lineage):
        return []
    read: set[str] = set()
    for _, described in reversed(lineage):
        read |= {*described.get("fields", ()), *described.get("reads", "").split()}
        read -= set(described.get("ignores", "").split())
    if "task().model" not in read:
        return []
    read |= set(table["always_read"].split())
    known = [key for key in constants if key.isidentifier() and key in table["keys"]]
    return [key for key in known if key not in read]


def _lineage(
    classes: Mapping[str, _PaxClass], bases: Mapping[str, Any], name: str
) -> tuple[_Lineage, list[Leftover]]:
    """Return a class and its bases in method resolution order, and the unknown bases."""
    unknown: list[Leftover] = []
    made: dict[str, type] = {}
    described_classes: dict[type, tuple[_PaxClass | None, Mapping[str, Any]]] = {}

    def make(cls: str, heirs: tuple[str, ...]) -> type:
        # A class may have the name of its base class in Pax.
        source = None if cls in heirs else classes.get(cls)
        key = cls if source is not None else f"{cls} of Pax"
        if key not in made:
            described = bases.get(cls, {})
            if source is None and cls not in bases:
                reason = "add the file that defines it, or set its fields"
                unknown.append(Leftover(f"base {cls}", "", reason))
            parents = described.get("bases", ()) if source is None else source.bases
            types = [make(base, (*heirs, cls)) for base in parents if base != "object"]
            made[key] = type(cls, tuple(types), {})
            described_classes[made[key]] = (source, described)
        return made[key]

    try:
        order = make(name, ()).__mro__
    except TypeError as error:
        raise UsageError(f"inconsistent base classes: {error}", owner=name) from error
    return [described_classes[cls] for cls in order if cls in described_classes], unknown
