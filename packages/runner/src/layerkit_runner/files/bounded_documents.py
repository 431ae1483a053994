"""Readers of TOML and JSON documents that this package did not write itself.

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
        level = [document]
        for _ in range(_MAX_DEPTH):
            level = [item for value in level for item in _items(value)]
        if level:
            raise RecursionError
    except RecursionError:
        raise DocumentError(f"expected values nested at most {_MAX_DEPTH} deep") from None
    except ValueError as error:
        raise DocumentError(str(error)) from error
    return document


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
