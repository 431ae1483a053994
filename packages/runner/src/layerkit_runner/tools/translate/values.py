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


# Beyond any size, step or rate; a larger integer need not even have a float.
_LARGEST = 2**63


def number(value: Any) -> float:
    """Return a finite number as a float."""
    if not _is_number(value) or not abs(value) < math.inf:
        raise NotTranslatedError("expected a number")
    return float(value)


def whole_number(value: Any) -> int:
    """Return a number without a fraction, such as 1e5, as an integer."""
    if not _is_number(value) or not abs(value) <= _LARGEST or value != value // 1:
        raise NotTranslatedError("expected a whole number")
    return int(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) <= _LARGEST


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
