"""What a value of another framework must be before it becomes a field here.

Each reader takes a value as YAML or Python gave it and returns it as the field has it. A value of
another kind is left over with what was expected; none is cut or guessed: 2.5 layers are not 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Reader = Callable[[Any], Any]


class NotTranslatedError(ValueError):
    """A value that has no counterpart; the text says why, and what to do instead."""


def number(value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise NotTranslatedError("expected a number")
    return float(value)


def whole_number(value: Any) -> int:
    """A number without a fraction; 1e5 is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        raise NotTranslatedError("expected a whole number")
    return int(value)


def yes_or_no(value: Any) -> bool:
    """True or False, and no text that looks like them."""
    if not isinstance(value, bool):
        raise NotTranslatedError("expected True or False")
    return value


def text(value: Any) -> str:
    """A name."""
    if not isinstance(value, str):
        raise NotTranslatedError("expected a name")
    return value


def whole_numbers(value: Any) -> list[int]:
    """A list of whole numbers, such as the shape of a mesh."""
    if not isinstance(value, list):
        raise NotTranslatedError("expected a list of whole numbers")
    return [whole_number(item) for item in value]


def or_none(reader: Reader) -> Reader:
    """What `reader` takes, or None."""
    return lambda value: None if value is None else reader(value)


def positive_or_none(value: Any) -> float | None:
    """A number; None where it is written as 0 or less, as both frameworks write "none"."""
    if value is None:
        return None
    read = number(value)
    return read if read > 0 else None
