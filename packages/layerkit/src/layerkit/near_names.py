"""Suggestions of valid names in errors about an unknown name.

This module imports nothing that takes time, so that command lines can use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def find_near_names(name: str, valid: Iterable[str]) -> list[str]:
    """Return the valid names, at most two, that are similar to an unknown name.

    Case, leading dashes, and the difference between dashes and underscores are ignored, and so is a
    folder that all names share, which would make any two paths similar. Initials, such as `lr`, are
    similar to the whole name.

    Args:
      name: Unknown name.
      valid: Names that exist.
    """
    valid = list(valid)
    folder = name[: name.rfind("/") + 1]
    if not all(candidate.startswith(folder) for candidate in valid):
        folder = ""
    folded = {_fold(candidate.removeprefix(folder)): candidate for candidate in valid}
    wanted = _fold(name.removeprefix(folder))
    abbreviated = [c for f, c in folded.items() if "".join(w[:1] for w in f.split("_")) == wanted]
    if wanted not in folded and len(wanted) > 1 and abbreviated:
        return abbreviated[:2]
    matches = difflib.get_close_matches(wanted, folded, n=2, cutoff=0.6)
    # Suggest a second name only if it is about as similar as the first.
    ratios = [difflib.SequenceMatcher(None, match, wanted).ratio() for match in matches]
    return [folded[m] for m, ratio in zip(matches, ratios, strict=True) if ratio > ratios[0] - 0.1]


def near_names(name: str, valid: Iterable[str], *, prefix: str = "") -> str:
    """Return the end of a sentence about an unknown name: `"; did you mean 'x'?"`.

    Args:
      name: Unknown name.
      valid: Names that exist.
      prefix: Text before each suggestion, such as `--`.

    Returns:
      The end of the sentence, which is `"."` if no valid name is similar.
    """
    near = find_near_names(name, valid)
    return f"; did you mean {' or '.join(repr(prefix + each) for each in near)}?" if near else "."


def _fold(name: str) -> str:
    return name.lower().lstrip("-").replace("-", "_")
