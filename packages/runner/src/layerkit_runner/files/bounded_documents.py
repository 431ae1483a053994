"""Readers of YAML, TOML and JSON documents that this package did not write itself.

They bound time and memory, since a short document can describe a huge value: an alias of YAML
repeats a part of it, and deep nesting exceeds the stack of whatever walks the value.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

# Bound of a configuration that people write.
MAX_BYTES = 1_000_000

_MAX_DEPTH = 100
# Bound of a YAML document with every alias written out.
_MAX_NODES = 20_000
# Bound of one YAML value; a longer one takes long to read as a number.
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
        document = load(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise DocumentError(str(error)) from error
    _check_depth(document)
    return document


def parse_yaml(text: str) -> Any:
    """Parse YAML without tags of Python; aliases may repeat parts up to a bound.

    Raises:
      DocumentError: It is malformed, nested too deeply, or too large with its aliases written out.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check_node(root, 1, {})
        return loader.construct_document(root)
    except RecursionError:
        raise _too_deep() from None
    except yaml.MarkedYAMLError as error:
        raise DocumentError(f"{error.problem}{_place(error.problem_mark)}") from error
    except yaml.YAMLError as error:
        raise DocumentError(" ".join(str(error).split())) from error
    except DocumentError:
        raise
    except ValueError as error:  # a date that no calendar has, or a number of too many digits
        raise DocumentError(f"a value cannot be read: {error}") from error


def _check_node(node: yaml.Node, depth: int, sizes: dict[int, int | None]) -> int:
    """Check a YAML node against the bounds before any value is made of it.

    Args:
      node: The node.
      depth: Number of nodes from the root to this one.
      sizes: Size of each node seen so far by its identity; None while the node is being counted.

    Returns:
      The number of nodes in it with aliases written out.
    """
    place = _place(node.start_mark)
    if id(node) in sizes:
        known = sizes[id(node)]
        if known is None:
            raise DocumentError(f"an alias repeats the value that it is in{place}")
        return known
    if depth > _MAX_DEPTH:
        raise DocumentError(f"{_too_deep()}{place}")
    parts = node.value
    if isinstance(parts, str):
        if len(parts) > _MAX_CHARACTERS:
            raise DocumentError(
                f"expected a value of at most {_MAX_CHARACTERS:,} characters{place}"
            )
        parts = []
    elif parts and isinstance(parts[0], tuple):  # keys and values of a mapping
        parts = [part for pair in parts for part in pair]
    sizes[id(node)] = None
    size = 1 + sum(_check_node(part, depth + 1, sizes) for part in parts)
    if size > _MAX_NODES:
        raise DocumentError(
            f"expected at most {_MAX_NODES:,} values with aliases written out{place}"
        )
    sizes[id(node)] = size
    return size


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"


def _too_deep() -> DocumentError:
    return DocumentError(f"expected values nested at most {_MAX_DEPTH} deep")


def _check_depth(value: Any, depth: int = 1) -> None:
    if depth > _MAX_DEPTH:
        raise _too_deep()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_depth(item, depth + 1)
