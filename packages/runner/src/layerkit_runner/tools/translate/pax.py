"""Constants of Pax's experiment classes, read from their source without running it.

A class is translated with the constants that it inherits from classes of the same files and from
base classes of Pax that the table describes. Methods are not translated: each statement of a
`task()` that may set something is listed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# Bounds for hostile sources. A short expression such as 9**9**9 can exceed any memory, and so can
# the reports of many classes with many base classes. The output has fields and leftovers of all
# classes; lines and width bound the quotation of a statement.
_MAX_BITS = 128
_MAX_LINEAGE = 100
_MAX_OUTPUT = 20_000
_MAX_LINES, _MAX_WIDTH = 4, 160

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_UNKNOWN = "its value is known only when the source is run"
_TOO_LARGE = "its value is too large for any field"
_LESS_NESTED = "less deeply nested code"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class _Symbol(str):
    """The last part of a name of another module, such as `bfloat16` of `jnp.bfloat16`."""


class _Constant(NamedTuple):
    """A constant of a class or module, with its source text, file and line.

    The value is a NotTranslatedError if the source does not determine it.
    """

    value: Any
    text: str
    where: str = "Pax"


class _PaxClass(NamedTuple):
    """A class of a file.

    Attributes:
      name: Name of the class.
      bases: Last parts of the names of the base classes.
      summary: First line of the docstring.
      constants: Constants that the class defines itself.
      leftovers: Statements of its body and of its task() that are not translated.
      is_registered: True if a decorator registers the class as an experiment.
    """

    name: str
    bases: Sequence[str]
    summary: str
    constants: Mapping[str, _Constant]
    leftovers: Sequence[Leftover]
    is_registered: bool


def translate_pax(
    texts: Mapping[str, str], tables: Mapping[str, Any], names: Sequence[str] | None = None
) -> tuple[list[Translation], list[str]]:
    """Translate experiment classes of Pax.

    Args:
      texts: Contents of Python files, by file name; classes may inherit across files.
      tables: Result of `read_tables`.
      names: Names of classes; None for the registered ones, or if there are none, for classes
        without subclasses.

    Returns:
      The translations, and the names of the other classes.

    Raises:
      UsageError: A file is not valid Python, exceeds a bound, or lacks a class.
    """
    files = ", ".join(texts)
    try:
        read = [cls for file in texts for cls in _read_file(file, texts[file], tables["pax"])]
        classes = {cls.name: cls for cls in read}
        if not classes:
            raise UsageError("no class found", owner=files)
        inherited = {base for cls in classes.values() for base in cls.bases if base != cls.name}
        registered = [name for name, cls in classes.items() if cls.is_registered]
        names = names or registered or [name for name in classes if name not in inherited]
        translations: list[Translation] = []
        chosen, room = set(names), _MAX_OUTPUT
        for name in names:
            if name not in classes:
                raise UsageError("unknown class", owner=files, value=name, choices=classes)
            translations.append(_translate(classes, tables, name, room))
            room -= len(translations[-1].fields) + len(translations[-1].leftovers)
    except RecursionError:
        raise UsageError(owner=files, expected=_LESS_NESTED) from None
    return translations, [name for name in classes if name not in chosen]


def _read_file(name: str, text: str, table: Mapping[str, Any]) -> Iterator[_PaxClass]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:  # ValueError for a NUL byte
        raise UsageError(f"not valid Python: {error}", owner=name) from error
    except (RecursionError, MemoryError):  # the parser raises either one
        raise UsageError(owner=name, expected=_LESS_NESTED) from None
    lines = re.split("\r\n|\r|\n", text)  # as Python counts them

    def quote(node: ast.stmt | ast.expr) -> tuple[str, str]:
        """Return a shortened statement and its place; of a compound statement, its first line."""
        last = node.lineno if hasattr(node, "body") else node.end_lineno or node.lineno
        parts = lines[node.lineno - 1 : min(last, node.lineno + _MAX_LINES)]
        quoted = printable(" ".join(part[:_MAX_WIDTH] for part in parts))[:_MAX_WIDTH]
        return quoted, f"{name}:{node.lineno}"

    constants, _ = _read_body(tree.body, quote, {}, is_module=True)
    outermost = set(map(id, tree.body))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    # A class of the module takes precedence over one of the same name in a branch or class.
    for node in sorted(nodes, key=lambda node: id(node) in outermost):
        own, others = _read_body(node.body, quote, constants)
        unknown = [d for d in node.decorator_list if not _last_name(d).startswith("register")]
        yield _PaxClass(
            name=node.name,
            bases=[_last_name(base) for base in node.bases],
            summary=(ast.get_docstring(node) or node.name).partition("\n")[0],
            constants=own,
            leftovers=[
                Leftover(*quote(each), why) for each, why in _unmapped([*unknown, *others], table)
            ],
            is_registered=len(unknown) < len(node.decorator_list),
        )


def _last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name or of a called function; ? for other expressions."""
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else "?"


def _read_body(
    body: Sequence[ast.stmt],
    quote: Callable[[ast.stmt | ast.expr], tuple[str, str]],
    outer: dict[str, _Constant],
    *,
    is_module: bool = False,
) -> tuple[dict[str, _Constant], list[ast.stmt]]:
    """Return the constants of a class or module, and its other statements."""
    constants: dict[str, _Constant] = {}
    others: list[ast.stmt] = []
    names = ChainMap(constants, outer)
    for node in body:
        if isinstance(node, _DEFINITIONS):
            constants.pop(node.name, None)
            others.append(node)
            continue
        assigned = _assigned(node, names)
        if not assigned and not _sets_nothing(node):
            others.append(node)
        for name, value in assigned.items():
            if is_module and name in constants:
                value = NotTranslatedError("it is assigned more than once")
            constants[name] = _Constant(value, *quote(node))
    return constants, others


def _assigned(node: ast.stmt, names: Mapping[str, _Constant]) -> dict[str, Any]:
    """Return the values of assigned names; NotTranslatedError for values that are unknown."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {each.asname or each.name: _Symbol(each.name.split(".")[-1]) for each in node.names}
    expression = getattr(node, "value", None)
    if isinstance(node, ast.AnnAssign) and expression is None:
        return {}
    stored = []
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            stored.append(part.id)
        elif isinstance(part, ast.alias):
            stored.append(part.asname or part.name)
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        expression = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
    value: Any = NotTranslatedError(_UNKNOWN)
    if isinstance(expression, ast.expr) and all(isinstance(each, ast.Name) for each in targets):
        try:
            value = _evaluate(expression, names)
        except NotTranslatedError as error:
            value = error
    return dict.fromkeys(stored, value)


def _evaluate(node: ast.expr, names: Mapping[str, _Constant]) -> Any:
    """Return the value of a literal, a name, arithmetic of numbers, or a list of numbers.

    Raises:
      NotTranslatedError: The expression is anything else, or a number exceeds the bounds.
    """
    value: Any = NotTranslatedError(_UNKNOWN)
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.Name) and node.id in names:
        value = names[node.id].value
    elif isinstance(node, (ast.Name, ast.Attribute)):
        value = _Symbol(_last_name(node))
    elif isinstance(node, (ast.List, ast.Tuple)):
        value = [_number(item, names) for item in node.elts]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_number(node.operand, names)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left, names), _number(node.right, names)
        is_power = isinstance(node.op, ast.Pow) and type(left) is type(right) is int
        if is_power and (left.bit_length() - 1) * right > _MAX_BITS:
            raise NotTranslatedError(_TOO_LARGE)
        try:
            value = _OPERATORS[type(node.op)](left, right)
        except ArithmeticError as error:
            raise NotTranslatedError(str(error)) from error
    if isinstance(value, NotTranslatedError):
        raise value
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise NotTranslatedError(_TOO_LARGE)
    return value


def _number(node: ast.expr, names: Mapping[str, _Constant]) -> Any:
    value = _evaluate(node, names)
    if type(value) not in (int, float):
        raise NotTranslatedError(_UNKNOWN)
    return value


def _translate(
    classes: Mapping[str, _PaxClass], tables: Mapping[str, Any], name: str, room: int
) -> Translation:
    table = tables["pax"]
    lineage, leftovers = _lineage(classes, table["bases"], name)
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
    if len(constants) + len(leftovers) > room:
        expected = f"at most {_MAX_OUTPUT:,} fields and statements of all classes"
        raise UsageError(owner=name, expected=expected, hint="Choose classes by --class=NAME.")
    values = {key: constant.value for key, constant in constants.items()}
    found, reasons = map_keys(table, values)
    for key, reason in reasons.items():
        leftovers.append(Leftover(constants[key].text, constants[key].where, reason))
    summary = classes[name].summary
    return make_translation(tables, table["recipes"], found, leftovers, name=name, summary=summary)


def _lineage(
    classes: Mapping[str, _PaxClass], bases: Mapping[str, Any], name: str
) -> tuple[list[tuple[_PaxClass | None, Mapping[str, Any]]], list[Leftover]]:
    """Return a class and its bases in method resolution order, and the unknown bases."""
    unknown: list[Leftover] = []
    made: dict[str, type] = {}
    found: dict[type, tuple[_PaxClass | None, Mapping[str, Any]]] = {}

    def make(cls: str, heirs: tuple[str, ...]) -> type:
        # A class may have the name of its base class in Pax.
        own = None if cls in heirs else classes.get(cls)
        key = cls if own is not None else f"{cls} of Pax"
        if key not in made:
            if len(made) + len(heirs) >= _MAX_LINEAGE:
                raise UsageError(owner=name, expected=f"at most {_MAX_LINEAGE} base classes")
            described = bases.get(cls, {})
            if own is None and cls not in bases:
                reason = "add the file that defines it, or set its fields"
                unknown.append(Leftover(f"base {cls}", "", reason))
            parents = described.get("bases", ()) if own is None else own.bases
            types = [make(each, (*heirs, cls)) for each in parents if each != "object"]
            made[key] = type(cls, tuple(types), {})
            found[made[key]] = (own, described)
        return made[key]

    try:
        order = make(name, ()).__mro__
    except TypeError as error:
        raise UsageError(f"inconsistent base classes: {error}", owner=name) from error
    return [found[cls] for cls in order if cls in found], unknown


def _unmapped(
    nodes: Sequence[ast.stmt | ast.expr], table: Mapping[str, Any]
) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield untranslated parts of a class, and statements of its task(), with the reason."""
    for node in nodes:
        if not isinstance(node, _DEFINITIONS):
            yield node, "it is no constant"
        elif node.name != "task":
            yield node, table["methods"].get(node.name, "rewrite it if it is needed")
        else:
            if not any(map(_is_super_task, ast.walk(node))):
                yield node, "it does not call super().task(); fields of its bases are translated"
            parts = [part for part in ast.walk(node) if isinstance(part, ast.stmt)]
            for part in sorted(parts[1:], key=lambda part: part.lineno):
                if not _sets_nothing(part):
                    target = part.targets[0] if isinstance(part, ast.Assign) else None
                    attribute = target.attr if isinstance(target, ast.Attribute) else None
                    field = table["fields_for_task"].get(attribute)
                    hint = "" if field is None else f", or the field {field}"
                    yield part, f"{table['methods']['task']}{hint}"


def _sets_nothing(node: ast.stmt) -> bool:
    """Return whether a statement changes no configuration."""
    if isinstance(node, (ast.Assign, ast.Return)):  # another name for a part of the task
        is_local = all(isinstance(each, ast.Name) for each in getattr(node, "targets", ()))
        part: Any = node.value
        while isinstance(part, ast.Attribute):
            part = part.value
        return is_local and (part is None or isinstance(part, ast.Name) or _is_super_task(part))
    if isinstance(node, ast.Expr):  # a docstring
        return isinstance(node.value, ast.Constant)
    return isinstance(node, (ast.Pass, ast.Import, ast.ImportFrom, ast.Break, ast.Continue))


def _is_super_task(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "task" and _last_name(node.func.value) == "super"
