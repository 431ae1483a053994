"""Classes read from source files, without importing them.

Importing an experiment loads JAX and whatever else it needs, which takes seconds; a misspelt name
should be answered in a fraction of one. A syntax tree tells the same: which classes a module has,
what they derive from, across modules and packages, and which UPPER_CASE fields they declare. Where
a tree cannot tell (a class made by a call, a base that is not a plain name) this module says so by
`CannotTellError`, or by `Lineage.complete`, and the caller imports after all.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator

from layerkit_runner.errors import UsageError

_FIELD_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_DYNAMIC = re.compile(r"\bglobals\(\)|\bexec\(|^def __getattr__", re.MULTILINE)
_SKIPPED_FOLDERS = frozenset({"tests", "__pycache__"})


class CannotTellError(Exception):
    """What a name stands for shows only when its module is imported."""


@dataclasses.dataclass(frozen=True)
class Alias:
    """`Name = other.Name` at the top of a module."""

    target: str


# What a name at the top of a module is bound to: a class, a dotted name (by an import), another
# name of the module, or something that only running the module tells (None).
Binding = ast.ClassDef | str | Alias | None


@dataclasses.dataclass(frozen=True)
class ModuleSource:
    """One module's names."""

    name: str
    bindings: dict[str, Binding]
    # Modules that it imports everything from.
    stars: tuple[str, ...]
    # Whether it makes names in ways that no tree shows.
    is_dynamic: bool


@dataclasses.dataclass(frozen=True)
class ClassSource:
    """A class statement and the module it stands in."""

    module: str
    node: ast.ClassDef

    @property
    def dotted(self) -> str:
        """The class's full name."""
        return f"{self.module}.{self.node.name}"

    @property
    def summary(self) -> str:
        """The first line of the docstring, or nothing."""
        return (ast.get_docstring(self.node) or "").partition("\n")[0].strip()

    @property
    def is_abstract(self) -> bool:
        """Whether it is only a base for others: `abstract=True`, or a name with an underscore."""
        return self.node.name.startswith("_") or any(
            keyword.arg == "abstract" and ast.unparse(keyword.value) == "True"
            for keyword in self.node.keywords
        )

    @property
    def tags(self) -> tuple[str, ...]:
        """What the class's own body says by `tags = …`, without its bases.

        Raises:
          UsageError: not strings, or only running the class would tell which.
        """
        tags: tuple[str, ...] = ()
        for statement in self.node.body:
            if "tags" in _assigned(statement) and (value := getattr(statement, "value", None)):
                tags = self._written_tags(value)
        return tags

    def _written_tags(self, value: ast.expr) -> tuple[str, ...]:
        try:
            tags = ast.literal_eval(value)
        except (ValueError, TypeError):
            tags = None
        if isinstance(tags, (tuple, list)) and all(isinstance(tag, str) for tag in tags):
            return tuple(tags)
        example = (tags,) if isinstance(tags, str) else ("moe", "pipeline")
        raise UsageError(
            f"{self.dotted}, line {value.lineno}: tags = {ast.unparse(value)}; expected strings,"
            f" written out, such as tags = {example}"
        )


@dataclasses.dataclass(frozen=True)
class FieldSource:
    """A field as its classes write it: the text of the annotation and of the default."""

    annotation: str | None
    default: str | None


@dataclasses.dataclass(frozen=True)
class Lineage:
    """A class and what it derives from, in the order in which attributes are looked up."""

    classes: tuple[ClassSource, ...]
    # False where a base could not be read, so that there may be more fields than are known.
    complete: bool

    def fields(self) -> dict[str, FieldSource]:
        """The UPPER_CASE fields, those of the outermost base first."""
        fields: dict[str, FieldSource] = {}
        for cls in reversed(self.classes):
            for statement in cls.node.body:
                _read_field(statement, fields)
        return {name: field for name, field in fields.items() if field.annotation is not None}

    def tags(self) -> tuple[str, ...]:
        """The tags of all the classes, each once, in the order of the alphabet."""
        return tuple(sorted({tag for cls in self.classes for tag in cls.tags}))


def _read_field(statement: ast.stmt, fields: dict[str, FieldSource]) -> None:
    if isinstance(statement, ast.FunctionDef):
        # A property of that name: a derived value takes the place of the field.
        fields.pop(statement.name, None)
        return
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return
    hint = statement.annotation if isinstance(statement, ast.AnnAssign) else None
    annotation = ast.unparse(hint) if hint is not None else None
    default = ast.unparse(statement.value) if statement.value is not None else None
    for name in _assigned(statement):
        if _FIELD_NAME.fullmatch(name):
            earlier = fields.get(name, FieldSource(None, None))
            fields[name] = FieldSource(annotation or earlier.annotation, default or earlier.default)


def _assigned(statement: ast.stmt) -> list[str]:
    """The names that a statement assigns to, or annotates."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Assign):
        targets = statement.targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


class ClassSources:
    """Reads modules as they are asked for, each once."""

    @functools.cache  # noqa: B019 - lives as long as one command
    def module(self, name: str) -> ModuleSource | None:
        """The module of that dotted name, or None where there is none.

        Raises:
          CannotTellError: the module exists, but not as Python source.
          UsageError: its source is not Python.
        """
        path = _find_source(name)
        if path is None:
            return None
        with open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise UsageError(f"{path}, line {error.lineno}: {error.msg}") from None
        package = name if os.path.basename(path) == "__init__.py" else name.rpartition(".")[0]
        bindings: dict[str, Binding] = {}
        stars: list[str] = []
        for statement in _top_level(tree.body):
            _bind(statement, package, bindings, stars)
        return ModuleSource(name, bindings, tuple(stars), _DYNAMIC.search(text) is not None)

    def modules_below(self, package: str) -> list[str]:
        """Names of a package and of all modules inside it, tests left out."""
        names: set[str] = set()
        for folder in _folders(package):
            for path, folders, files in os.walk(folder):
                folders[:] = sorted(
                    f for f in folders if f.isidentifier() and f not in _SKIPPED_FOLDERS
                )
                inner = os.path.relpath(path, folder).replace(os.sep, ".")
                prefix = package if inner == "." else f"{package}.{inner}"
                for file in files:
                    stem, extension = os.path.splitext(file)
                    if extension == ".py" and stem.isidentifier():
                        names.add(prefix if stem == "__init__" else f"{prefix}.{stem}")
        return sorted(names)

    def folders(self, package: str) -> list[str]:
        """Where the files of a package are; not imported."""
        return _folders(package)

    def find_class(self, dotted: str, seen: frozenset[str] = frozenset()) -> ClassSource | None:
        """The class of that full name, also by way of imports and aliases, or None.

        Raises:
          CannotTellError: only an import would show.
        """
        if dotted in seen:
            raise CannotTellError(dotted)
        seen |= {dotted}
        parts = dotted.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            module = self.module(".".join(parts[:cut]))
            if module is not None:
                return self._lookup(module, parts[cut:], seen)
        return None

    def _lookup(
        self, module: ModuleSource, names: list[str], seen: frozenset[str]
    ) -> ClassSource | None:
        name, rest = names[0], names[1:]
        if name not in module.bindings:
            for star in module.stars:
                found = self.find_class(".".join([star, *names]), seen)
                if found is not None:
                    return found
            if module.is_dynamic:
                raise CannotTellError(f"{module.name}.{name}")
            return None
        bound = module.bindings[name]
        if isinstance(bound, ast.ClassDef):
            return None if rest else ClassSource(module.name, bound)
        if isinstance(bound, str):
            return self.find_class(".".join([bound, *rest]), seen)
        if isinstance(bound, Alias):
            return self.find_class(".".join([module.name, bound.target, *rest]), seen)
        raise CannotTellError(f"{module.name}.{name}")

    def lineage(self, cls: ClassSource, below: tuple[ClassSource, ...] = ()) -> Lineage:
        """`cls` with everything that it derives from."""
        chain = [cls]
        complete = _is_plain(cls.node)
        for expression in cls.node.bases:
            try:
                base = self._find_base(cls, expression)
            except CannotTellError:
                complete = False
                continue
            if base is None:
                continue
            if base == cls or base in below:
                complete = False
                continue
            inherited = self.lineage(base, (*below, cls))
            complete = complete and inherited.complete
            # A base that two bases share is looked up after both, as Python does.
            chain = [c for c in chain if c not in inherited.classes] + list(inherited.classes)
        return Lineage(tuple(chain), complete)

    def _find_base(self, cls: ClassSource, expression: ast.expr) -> ClassSource | None:
        """The class that a base is; None for one of Python's own, which have no fields of ours."""
        if isinstance(expression, ast.Subscript):
            expression = expression.value
        dotted = ast.unparse(expression)
        if not re.fullmatch(r"[\w.]+", dotted):
            raise CannotTellError(dotted)
        module = self.module(cls.module)
        head = dotted.partition(".")[0]
        bound = module.bindings.get(head) if module is not None else None
        if bound is None and hasattr(builtins, head):
            return None
        if isinstance(bound, str) and bound.partition(".")[0] in sys.stdlib_module_names:
            return None
        found = self.find_class(f"{cls.module}.{dotted}")
        if found is None:
            raise CannotTellError(dotted)
        return found


def _is_plain(node: ast.ClassDef) -> bool:
    """Whether the class has no fields but those that its statements and bases show."""
    simple = all(
        isinstance(
            s, (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.Expr, ast.Pass, ast.ClassDef)
        )
        for s in node.body
    )
    return simple and not node.decorator_list and all(k.arg == "abstract" for k in node.keywords)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, those under `if`, `try` and `with` too."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _top_level(handler.body)
        else:
            yield statement


def _bind(
    statement: ast.stmt, package: str, bindings: dict[str, Binding], stars: list[str]
) -> None:
    if isinstance(statement, ast.ClassDef):
        bindings[statement.name] = statement
    elif isinstance(statement, ast.Import):
        for name in statement.names:
            top = name.name.partition(".")[0]
            bindings[name.asname or top] = name.name if name.asname else top
    elif isinstance(statement, ast.ImportFrom):
        source = _absolute(statement, package)
        for name in statement.names:
            if name.name == "*":
                stars.append(source)
            else:
                bindings[name.asname or name.name] = f"{source}.{name.name}"
    elif isinstance(statement, ast.Assign):
        is_name = isinstance(statement.value, (ast.Name, ast.Attribute))
        bound = Alias(ast.unparse(statement.value)) if is_name else None
        for target in statement.targets:
            if isinstance(target, ast.Name):
                bindings[target.id] = bound


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - (statement.level - 1)]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def _find_source(name: str) -> str | None:
    """Path of a module's source; unlike `find_spec` of a dotted name, this imports no parent."""
    top, *inner = name.split(".")
    if not inner:
        spec = _find_spec(top)
        if spec is None or spec.origin is None:
            return None
        if not spec.origin.endswith(".py"):
            raise CannotTellError(name)
        return spec.origin
    for folder in _folders(top):
        path = os.path.join(folder, *inner)
        for candidate in (os.path.join(path, "__init__.py"), path + ".py"):
            if os.path.isfile(candidate):
                return candidate
    return None


def _folders(package: str) -> list[str]:
    top, *inner = package.split(".")
    spec = _find_spec(top)
    if spec is None:
        return []
    return [os.path.join(path, *inner) for path in spec.submodule_search_locations or []]


def _find_spec(top: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
