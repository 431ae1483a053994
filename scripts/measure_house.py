"""Measure the structure of the source code, and fail where a figure is above its limit.

For each package: source and test lines, the share of guards, the rooms of its top level (files and
folders) with their floors (rooms on the longest path of imports) and arrows (imports between two
rooms), import circles, and idiom in identifiers. Imports inside functions and for type checkers
count as all others.

    python scripts/measure_house.py
    python scripts/measure_house.py --files     # also the files with the most guards and idiom
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "layerkit": "layerkit",
    "inputs": "layerkit_inputs",
    "runner": "layerkit_runner",
    "experiments": "layerkit_experiments",
}
MAX_GUARD_SHARE = 0.08  # of the code lines of a package
MAX_IDIOM = 2.0  # names in 10,000 lines
IDIOM = re.compile(r"_*(found|each|own|given|wanted)")
GUARD_FUNCTION = re.compile(r"_*(check|require|validate|ensure|forbid|refuse)(_\w+)?")
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class FileMeasure:
    """Counts of one source file.

    Attributes:
      lines: all lines.
      code: lines without blank lines, comments and docstrings.
      guards: code lines that only reject a value: raise, assert, handlers that raise, checking
        functions and calls of them.
      idiom: assigned names, parameters and attributes that `IDIOM` matches.
    """

    lines: int
    code: int
    guards: int
    idiom: int


def measure_file(path: Path) -> FileMeasure:
    """Return the counts of one Python file."""
    text = path.read_text()
    tree = ast.parse(text)
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT_TOKENS
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= _lines_of(node)
    guards = {line for node in _guards(tree) for line in _lines_of(node)} & code
    idiom = sum(bool(IDIOM.fullmatch(name)) for name in _defined_names(tree))
    return FileMeasure(len(text.splitlines()), len(code), len(guards), idiom)


def _lines_of(node: ast.stmt | ast.ExceptHandler) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _guards(tree: ast.AST) -> Iterator[ast.stmt | ast.ExceptHandler]:
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler) and _is_guard(node):
            yield node


def _is_guard(node: ast.stmt | ast.ExceptHandler) -> bool:
    match node:
        case ast.Raise() | ast.Assert():
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return bool(GUARD_FUNCTION.fullmatch(name))
        case ast.FunctionDef(name=name):
            return bool(GUARD_FUNCTION.fullmatch(name))
        case ast.If(body=body, orelse=[]) | ast.ExceptHandler(body=body) | ast.For(body=body):
            return all(_is_guard(statement) for statement in body)
    return False


def _defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.FunctionDef(name=name):
                yield name


@dataclass(frozen=True)
class Rooms:
    """The files and folders at the top level of a package, and the imports between them.

    Attributes:
      names: rooms, without those that hold a version or public names only.
      arrows: pairs (importing room, imported room).
      circles: groups of modules that import one another, anywhere in the package.
    """

    names: list[str]
    arrows: set[tuple[str, str]]
    circles: list[set[str]]

    def floors(self) -> dict[str, int]:
        """Return the floor of each room: 0 for a room that imports no other one.

        Rooms that import one another stand on one floor.
        """
        circles = strong_components(self.names, self.arrows)
        group = {name: index for index, circle in enumerate(circles) for name in circle}
        floor: dict[int, int] = {}
        for index in range(len(circles)):  # imported groups come first
            below = {group[b] for a, b in self.arrows if group[a] == index} - {index}
            floor[index] = 1 + max((floor[other] for other in below), default=-1)
        return {name: floor[group[name]] for name in self.names}


def measure_rooms(package: str) -> Rooms:
    """Return the rooms of an installed package by its import graph."""
    graph = grimp.build_graph(package, cache_dir=None)
    arrows, imports = set(), set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            imports.add((module, imported))
            if (room := _room(module)) and (other := _room(imported)) and room != other:
                arrows.add((room, other))
    names = sorted({room for module in graph.modules if (room := _room(module))})
    circles = [set(group) for group in strong_components(graph.modules, imports) if len(group) > 1]
    return Rooms(names, arrows, circles)


def _room(module: str) -> str | None:
    """Return the top-level room of a module, or None for the package itself and its version."""
    parts = module.split(".")
    return None if len(parts) == 1 or parts[1] == "_version" else parts[1]


def strong_components(nodes: list[str] | set[str], arrows: set[tuple[str, str]]) -> list[list[str]]:
    """Return groups of nodes that reach one another, imported groups first (Tarjan, 1972)."""
    targets: dict[str, list[str]] = {node: [] for node in nodes}
    for source, target in sorted(arrows):
        targets[source].append(target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in targets[node]:
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            start = stack.index(node)
            groups.append(stack[start:])
            del stack[start:]

    for node in sorted(nodes):
        if node not in index:
            visit(node)
    return groups


def main() -> int:
    """Print the table and return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="name files with guards and idiom")
    show_files = parser.parse_args().files
    sys.setrecursionlimit(10_000)
    failures: list[str] = []
    total, total_tests = 0, 0
    print(f"{'package':12} {'lines':>6} {'tests':>6} {'guards':>7} {'idiom':>6}  top level")
    for folder, package in PACKAGES.items():
        files = {
            path: measure_file(path)
            for path in sorted((ROOT / "packages" / folder / "src").rglob("*.py"))
        }
        tests = (ROOT / "packages" / folder / "tests").rglob("*.py")
        test_lines = sum(len(path.read_text().splitlines()) for path in tests)
        lines = sum(file.lines for file in files.values())
        guards = sum(file.guards for file in files.values())
        share = guards / sum(file.code for file in files.values())
        idiom = 10_000 * sum(file.idiom for file in files.values()) / lines
        rooms = measure_rooms(package)
        print(
            f"{folder:12} {lines:6,} {test_lines:6,} {share:7.1%} {idiom:6.1f}  "
            f"{len(rooms.names)} rooms, {1 + max(rooms.floors().values())} floors, "
            f"{len(rooms.arrows)} arrows, {len(rooms.circles)} circles"
        )
        if show_files:
            _print_files(files)
        if share > MAX_GUARD_SHARE:
            failures.append(f"{folder}: {share:.1%} of the code lines are guards. Expected 8 %.")
        if idiom > MAX_IDIOM:
            failures.append(f"{folder}: {idiom:.1f} names match {IDIOM.pattern}. Expected 2.0.")
        for circle in rooms.circles:
            failures.append(f"{folder}: modules import one another: {', '.join(sorted(circle))}")
        total, total_tests = total + lines, total_tests + test_lines
    print(f"{'all':12} {total:6,} {total_tests:6,}")
    print(*failures, sep="\n")
    return bool(failures)


def _print_files(files: dict[Path, FileMeasure]) -> None:
    for path, file in sorted(files.items(), key=lambda item: -item[1].guards)[:25]:
        share = file.guards / max(file.code, 1)
        print(f"  {path.relative_to(ROOT)}: {file.guards} guards ({share:.0%}), {file.idiom} idiom")
    for path, file in files.items():
        if file.idiom:
            print(f"  {path.relative_to(ROOT)}: {file.idiom} idiom")


if __name__ == "__main__":
    sys.exit(main())
