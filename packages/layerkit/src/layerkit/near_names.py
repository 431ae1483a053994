"""The helpful end of an error about an unknown name.

In a module of its own, without any import that takes time, so that a command line can use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_names(name: str, valid: Iterable[str], *, prefix: str = "") -> str:
    """How a sentence about an unknown name ends: `"; did you mean 'x'?"`, or `"."` if none is near.

    Upper and lower case, and dashes and underscores, count as equal.

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
    return "; did you mean " + " or ".join(repr(prefix + folded[match]) for match in matches) + "?"


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
