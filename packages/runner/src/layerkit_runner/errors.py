"""Mistakes of the person at the keyboard, as distinct from faults of the program.

    UsageError          a wrong flag, name, path or value; the command line prints it, exit code 2
    └── FieldError      a wrong experiment field; also a TypeError, for those who call from Python

The texts say what was given, what was expected and the nearest right thing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """A request that cannot be carried out as it was written; shown without a traceback."""

    exit_code = 2


class FieldError(UsageError, TypeError):
    """An experiment field that does not exist, has no value, or has one of the wrong type."""


def did_you_mean(name: str, valid: Iterable[str], *, prefix: str = "") -> str:
    """How a sentence about an unknown name ends: `"; did you mean 'x'?"`, or `"."` if none is near.

    Upper and lower case, and dashes and underscores, count as equal. (`layerkit.config.near_names`
    is alike, but importing it loads Fiddle, which takes longer than the whole answer should.)

    Args:
      name: What was written.
      valid: The names that exist.
      prefix: Put before each suggestion, such as `--`.
    """
    folded = {_fold(candidate): candidate for candidate in valid}
    matches = difflib.get_close_matches(_fold(name), folded, n=2, cutoff=0.6)
    if not matches:
        return "."
    # A second suggestion only where it is about as near as the first.
    nearness = [difflib.SequenceMatcher(None, match, _fold(name)).ratio() for match in matches]
    matches = [m for m, near in zip(matches, nearness, strict=True) if near > nearness[0] - 0.1]
    return "; did you mean " + " or ".join(repr(prefix + folded[m]) for m in matches) + "?"


def first_names(names: Iterable[str], *, limit: int = 12) -> str:
    """Names as a list for an error message, at most `limit` of them."""
    names = list(names)
    more = f", … ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
