"""Texts for people: byte counts in powers of ten, times, and tables."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Collection, Sequence

from layerkit_runner.errors import UsageError


def check_utf8(text: str, *, field: str) -> None:
    """Raise `UsageError` for text that cannot be written as UTF-8; `field` is for messages."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        expected = f"text in UTF-8; character {error.start} is none"
        raise UsageError(field=field, value=text[error.start], expected=expected) from None


def scaled_text(value: float, units: Sequence[str]) -> str:
    """Return a number with three digits in the unit that suits it, each 1000 of the one before.

    >>> scaled_text(959_872, ["", "K", "M"]), scaled_text(2_000_000_000, ["", "K", "M"])
    ('960 K', '2000 M')
    """
    for unit in units:
        # A value that would be rounded to 1000 of a unit is 1 of the next.
        if value < 999.5 or unit == units[-1]:
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def size_text(size: float) -> str:
    """Return bytes as a text of three digits, such as `0 B`, `12.3 kB` or `1.54 GB`."""
    return scaled_text(size, ["B", "kB", "MB", "GB", "TB"])


def seconds_text(seconds: float) -> str:
    """Return a time such as `1.23 s`, `45.6 ms` or `7.89 µs`."""
    return scaled_text(seconds * 1e6, ["µs", "ms", "s"])


def stable_repr(value: object) -> str:
    """Return the representation of a value, with all numbers of arrays and without addresses."""
    import numpy as np

    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def cut(text: str, width: int) -> str:
    """Return a text of at most `width` characters; `…` stands for the rest of a longer one."""
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table with columns of equal width; `right` are aligned at the right.

    >>> aligned([("a", "1"), ("bcd", "23")], right=[1])
    ['a     1', 'bcd  23']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = [">" if index in right else "<" for index in range(len(widths))]
    return [
        "  ".join(f"{cell:{s}{n}}" for cell, s, n in zip(row, signs, widths, strict=True)).rstrip()
        for row in rows
    ]


def near_folders(folder: str) -> list[str]:
    """Return paths beside a missing local folder that have a similar name."""
    path = os.path.abspath(os.path.expanduser(folder))
    parent, name = os.path.split(path)
    if "://" in folder or os.path.isdir(path) or not os.path.isdir(parent):
        return []
    near = difflib.get_close_matches(name, os.listdir(parent), n=2)
    return [os.path.join(os.path.dirname(folder.rstrip("/")), match) for match in near]
