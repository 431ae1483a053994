"""Parses the text with which JAX prints the structure of a tree.

Flax's format of Paxml stores a list of arrays and this text, which names them:

    PyTreeDef(CustomNode(TrainState[()], [*, {'params': {'w': *}}, [(*, *)], ()]))

The text is parsed by a grammar of its own, and nothing in it is evaluated.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_MAX_DEPTH = 100
_TOKEN = re.compile(
    r"\s*(?:(?P<leaf>\*)|(?P<none>None)|(?P<custom>CustomNode\()|(?P<open>[\[({])|(?P<close>[\])}]))"
)
_KEY = re.compile(r"\s*'((?:[^'\\])*)'\s*:")
# The class and its static data: NestedMap[('count', 'm')], namedtuple[MaskedNode], TrainState[()].
_CLASS = re.compile(r"(?P<name>\w+)\[(?P<data>[^\[\]]*)\], ")
_QUOTED = re.compile(r"'([^'\\]*)'")
_CLOSERS = {"[": "]", "(": ")", "{": "}"}

# Names of the children of classes whose text leaves them out.
_FIELDS = {
    "TrainState": ("step", "mdl_vars", "opt_states", "extra_state"),
    "ScaleByAdamState": ("count", "mu", "nu"),
    "ShardedAdafactorState": ("count", "m", "m_scale", "vr", "vc", "v"),
    "ScaleByScheduleState": ("count",),
    "TraceState": ("trace",),
    "EmaState": ("count", "ema"),
}

Path = tuple[str, ...]


def leaf_paths(text: str) -> list[Path]:
    """Return the path of each leaf, in the order of the leaves.

    Children of lists, tuples and unknown classes are named by their index.
    """
    start, end = "PyTreeDef(", ")"
    if not text.startswith(start) or not text.endswith(end):
        raise ValueError("expected a text PyTreeDef(…)")
    parser = _Parser(text[len(start) : -len(end)])
    paths = list(parser.node((), 0))
    if parser.rest().strip():
        raise ValueError(f"unexpected text {parser.rest()[:40]!r}")
    return paths


class _Parser:
    """A recursive-descent parser with its position in a text."""

    def __init__(self, text: str) -> None:
        """Start at the first character."""
        self._text, self._at = text, 0

    def rest(self) -> str:
        """Return the text that is not parsed yet."""
        return self._text[self._at :]

    def node(self, path: Path, depth: int) -> Iterator[Path]:
        """Parse a node and yield the paths of its leaves."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} levels")
        token = self._take(_TOKEN, "a node")
        if token["leaf"]:
            yield path
        elif token["custom"]:
            match = self._take(_CLASS, "the class of a node")
            names = _children_of(match["name"], match["data"])
            opener = self._take(_TOKEN, "children")["open"]
            if opener != "[":
                raise self._error("[")
            yield from self._children(path, depth, "]", names)
            self._expect(")")
        elif token["open"]:
            yield from self._children(path, depth, _CLOSERS[token["open"]], None)
        elif not token["none"]:
            raise self._error("a node")

    def _children(
        self, path: Path, depth: int, closer: str, names: Iterator[str] | None
    ) -> Iterator[Path]:
        counted = map(str, itertools.count()) if names is None else names
        while not self._skip(closer):
            if closer == "}":
                name = self._take(_KEY, "a key")[1]
            else:
                name = next(counted)
            yield from self.node((*path, name), depth + 1)
            if not self._skip(","):
                self._expect(closer)
                return

    def _take(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._error(expected)
        self._at = match.end()
        return match

    def _skip(self, character: str) -> bool:
        at = self._at
        while at < len(self._text) and self._text[at] == " ":
            at += 1
        if not self._text.startswith(character, at):
            return False
        self._at = at + 1
        return True

    def _expect(self, character: str) -> None:
        if not self._skip(character):
            raise self._error(character)

    def _error(self, expected: str) -> ValueError:
        rest = self._text[self._at : self._at + 40]
        return ValueError(f"expected {expected} at character {self._at}, found {rest!r}")


def _children_of(name: str, data: str) -> Iterator[str]:
    """Return the names of the children of a class."""
    if name == "namedtuple":
        name = data
    # A NestedMap lists its keys.
    known = tuple(_QUOTED.findall(data)) or _FIELDS.get(name, ())
    return itertools.chain(known, map(str, itertools.count(len(known))))
