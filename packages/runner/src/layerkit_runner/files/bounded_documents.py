"""YAML, TOML and JSON documents from elsewhere, read with bounds on time and memory.

A short document can describe a huge value: an alias of YAML repeats a part of it, and a value that
is nested deeply exceeds the stack of whatever walks it. Every document that this package did not
write itself is read here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

# Text of a configuration that people write, in bytes.
MAX_BYTES = 1_000_000

_MAX_DEPTH = 100
# Of a YAML document with every alias written out.
_MAX_NODES = 20_000
# Of one YAML value; longer ones take long to read as a number.
_MAX_CHARACTERS = 2_000


class DocumentError(ValueError):
    """A document that is malformed, or larger than its bounds; the text says what is wrong."""


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Read a file of UTF-8 text.

    Raises:
      DocumentError: It is longer than `max_bytes`, or no UTF-8.
      OSError: It cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DocumentError(f"expected at most {max_bytes:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DocumentError(f"expected text in UTF-8, but {error}") from error


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
      DocumentError: It is malformed or nested too deeply.
    """
    return _parse(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
      DocumentError: It is malformed or nested too deeply.
    """
    document: dict[str, Any] = _parse(tomllib.loads, text)
    return document


def _parse(load: Callable[[str], Any], text: str) -> Any:
    try:
        return _checked_depth(load(text))
    except RecursionError:
        raise _too_deep() from None
    except DocumentError:
        raise
    except ValueError as error:
        raise DocumentError(str(error)) from error


def parse_yaml(text: str) -> Any:
    """Parse YAML without tags of Python; aliases may repeat parts up to a bound.

    Raises:
      DocumentError: It is malformed, nested too deeply, or too large with its aliases written out.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_bounded_loader())
    except RecursionError:
        raise _too_deep() from None
    except yaml.MarkedYAMLError as error:
        raise DocumentError(f"{error.problem}{_place(error.problem_mark)}") from error
    except yaml.YAMLError as error:
        raise DocumentError(" ".join(str(error).split())) from error
    except ValueError as error:  # of a date that no calendar has, or a number of too many digits
        raise DocumentError(f"a value cannot be read: {error}") from error


def _bounded_loader() -> type[yaml.SafeLoader]:
    """Return a safe loader that counts what it composes; PyYAML is only imported for YAML."""
    import yaml

    class BoundedLoader(yaml.SafeLoader):
        """Safe loader that fails before a value exceeds the bounds."""

        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            # Nodes below each composed node, itself included, by the identity of the node.
            self._sizes: dict[int, int] = {}
            self._depth = 0

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            is_alias = self.check_event(yaml.AliasEvent)
            mark = self.peek_event().start_mark
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise yaml.MarkedYAMLError(problem=str(_too_deep()), problem_mark=mark)
            node: yaml.Node = super().compose_node(parent, index)
            self._depth -= 1
            if is_alias:
                size = self._sizes.get(id(node))
                if size is None:
                    problem = "an alias repeats the value that it is in"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
            else:
                size = self._size(node, mark)
            if size > _MAX_NODES:
                problem = f"expected at most {_MAX_NODES:,} values with aliases written out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
            return node

        def _size(self, node: yaml.Node, mark: yaml.Mark) -> int:
            if isinstance(node, yaml.ScalarNode):
                if len(node.value) > _MAX_CHARACTERS:
                    problem = f"expected a value of at most {_MAX_CHARACTERS:,} characters"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
                parts: list[yaml.Node] = []
            elif isinstance(node, yaml.MappingNode):
                parts = [part for pair in node.value for part in pair]
            else:
                parts = list(node.value)
            size = 1 + sum(self._sizes[id(part)] for part in parts)
            self._sizes[id(node)] = size
            return size

    return BoundedLoader


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"


def _too_deep() -> DocumentError:
    return DocumentError(f"expected values nested at most {_MAX_DEPTH} deep")


def _checked_depth(document: Any) -> Any:
    """Return the document; level by level, since a walk by calls would itself exceed the stack."""
    level = [document]
    for _ in range(_MAX_DEPTH):
        dicts = [part for part in level if isinstance(part, dict)]
        lists = [part for part in level if isinstance(part, list)]
        level = [item for part in dicts for item in part.values()]
        level += [item for part in lists for item in part]
        if not level:
            return document
    raise _too_deep()
