"""Flags of launchers, and what their values may be."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any


def adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """`add(name, help, **more)`, which adds a flag to the parser."""

    def add(name: str, text: str, **more: Any) -> None:
        parser.add_argument(f"--{name}", help=text, **more)

    return add


def positive(text: str) -> int:
    """Reads a whole number above 0.

    Raises:
      argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def not_negative(text: str) -> int:
    """Reads a whole number, 0 among them.

    Raises:
      argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def slurm_seconds(text: str) -> int:
    """Reads a time as Slurm does: `minutes`, `minutes:seconds`, `hours:minutes:seconds`, or with
    days before: `days-hours`, `days-hours:minutes`, `days-hours:minutes:seconds`.

    Raises:
      ValueError: it is none of these.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r} is no time as Slurm writes it, such as 90, 12:00:00 or 2-00:00")
    days, *parts = (None if part is None else int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is not None:  # hours come first
        hours, minutes, seconds = (*given, 0, 0)[:3]
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(given) == 3:
        return (given[0] * 60 + given[1]) * 60 + given[2]
    return given[0] * 60 + (given[1] if len(given) == 2 else 0)
