"""Checks of the values that scripts, manifests and commands are made from.

A value ends up in a line of a script, an option of a program or a word of a command. Each writer
quotes for its own format. What no format can hold safely is refused here, for all of them at once.
"""

from __future__ import annotations

import argparse
import os
import unicodedata
from collections.abc import Iterator
from typing import Any

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch.request import Request

# Control characters, line and paragraph separators, and bytes that are no UTF-8: each can end a
# line where a program reads one, or cannot be written at all.
_REFUSED_CATEGORIES = ("Cc", "Zl", "Zp", "Cs")
# Options of sbatch, and variables, which hold options such as XLA_FLAGS=--xla_….
_MAY_BEGIN_WITH_DASH = ("sbatch", "env")


def check_values(request: Request, options: argparse.Namespace) -> None:
    """Raise an error if a value cannot be written into a script, a manifest or a command.

    Args:
      request: Command that is launched.
      options: Flags of the launcher.

    Raises:
      UsageError: A value holds a control character, or one of the launcher's begins with a dash,
        with which the program that receives it would take it for an option.
    """
    for name, text in _values(request, options):
        for character in text:
            if unicodedata.category(character) in _REFUSED_CATEGORIES:
                raise UsageError(
                    f"{name}={text!r}: expected text without control characters, but it holds"
                    f" {character!r}. Remove it; inside a string of --fdl write it as an escape."
                )
    for name, text in _texts(vars(options)):
        if text.startswith("-") and name not in _MAY_BEGIN_WITH_DASH:
            raise UsageError(
                f"--{name}={text}: expected a value that does not begin with a dash. Leave the dash"
                " out, or write a path as ./-NAME."
            )


def _values(request: Request, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    yield from ((f"--{name}", text) for name, text in _texts(vars(options)))
    for word in request.words:
        name, _, text = word.partition("=")
        yield name, text
    yield "working directory", os.getcwd()


def _texts(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from _texts({name: item})
