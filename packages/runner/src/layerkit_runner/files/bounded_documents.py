"""Readers of YAML, TOML and JSON documents that this package did not write itself.

They bound the size, and the depth of nesting, which would exceed the stack of what walks the value.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_MAX_DEPTH = 100


class DocumentError(ValueError):
    """A document that is malformed, or larger than its bounds; the text says what is wrong."""


def read_text(path: Path, *, max_bytes: int = 1_000_000) -> str:
    """Read a file of UTF-8 text of at most `max_bytes`; else raise `DocumentError`.

    The default is enough for a configuration that people write.
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
    """Parse JSON; raise `DocumentError` if it is malformed or nested too deeply."""
    return _parse(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raise `DocumentError` if it is malformed or nested too deeply."""
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
    """Parse YAML without tags of Python; raise `DocumentError` as for JSON."""
    import yaml

    try:
        document = yaml.safe_load(text)
    except RecursionError:
        raise _too_deep() from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise DocumentError(f"{error.problem}{place}") from error
    except (yaml.YAMLError, ValueError) as error:  # such as a date that no calendar has
        raise DocumentError(" ".join(str(error).split())) from error
    _check_depth(document)
    return document


def _too_deep() -> DocumentError:
    return DocumentError(f"expected values nested at most {_MAX_DEPTH} deep")


def _check_depth(document: Any) -> None:
    level = {id(document): document}
    for _ in range(_MAX_DEPTH):
        # A level has each object once. Aliases of YAML may repeat it exponentially often.
        level = {id(item): item for value in level.values() for item in _items(value)}
    if level:
        raise _too_deep()


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
