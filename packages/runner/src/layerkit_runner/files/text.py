"""Texts for people: byte counts in powers of ten, times, and tables."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from layerkit_runner.errors import UsageError

# Terminals with fewer characters for each column of a table get lines without boxes.
_COLUMN_WIDTH = 10


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


def printable(text: str) -> str:
    """Return a text whose controls, marks of direction and other unseen characters are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def draw_table(
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    head: Sequence[str] = (),
    right: Collection[int] = (),
) -> list[str]:
    """Return the lines of a table, drawn by rich on a terminal; none without rows.

    In a pipe, or a terminal that is too narrow, columns are separated by spaces and each row is one
    line, as `grep` needs it. Control characters of cells are escaped.

    Args:
      rows: Cells of equal number.
      title: Line above the table, which is then indented; None for none.
      head: Headings of the columns; empty for none.
      right: Indices of the columns that are aligned at the right.

    >>> draw_table([("a", "1"), ("bcd", "23")], right=[1])
    ['a     1', 'bcd  23']
    """
    lines = [[*map(printable, cells)] for cells in rows]
    if not lines:
        return []
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or width < _COLUMN_WIDTH * len(lines[0]):
        lines = [[*head], *lines] if head else lines
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        forms = [f"{'>' if index in right else '<'}{width}" for index, width in enumerate(widths)]
        texts = ["  ".join(map(format, line, forms)).rstrip() for line in lines]
        return texts if title is None else [title, *(f"  {text}" for text in texts)]
    # Imported here because it takes some 60 ms, which output to a pipe need not wait for.
    from rich import box, table, text

    drawn = table.Table(box=box.ROUNDED, show_header=bool(head), border_style="dim")
    # Other columns are folded before the first one, which names the row, unless that is wide.
    is_whole = 2 * max(len(line[0]) for line in lines) <= width
    for index, name in enumerate(head or lines[0]):
        drawn.add_column(
            text.Text(name, overflow="fold"),
            justify="right" if index in right else "left",
            style="" if index else "cyan",
            no_wrap=is_whole and not index,
        )
    for line in lines:
        drawn.add_row(*(text.Text(cell, no_wrap=False, overflow="fold") for cell in line))
    above = [] if title is None else [color_text(title, "bold")]
    return [*above, *_render(drawn).splitlines()]


def color_text(text: str, style: str) -> str:
    """Return a text in a style of rich, such as "red", for a terminal; elsewhere as it is."""
    if not sys.stdout.isatty():
        return text
    return _render(text, style=style, soft_wrap=True, end="", markup=False, highlight=False)


def _render(drawn: Any, **options: Any) -> str:
    from rich.console import Console

    console = Console(emoji=False)
    with console.capture() as capture:
        console.print(drawn, **options)
    return capture.get()


def near_folders(folder: str) -> list[str]:
    """Return paths beside a missing local folder that have a similar name."""
    path = os.path.abspath(os.path.expanduser(folder))
    parent, name = os.path.split(path)
    if "://" in folder or os.path.isdir(path) or not os.path.isdir(parent):
        return []
    near = difflib.get_close_matches(name, os.listdir(parent), n=2)
    return [os.path.join(os.path.dirname(folder.rstrip("/")), match) for match in near]
