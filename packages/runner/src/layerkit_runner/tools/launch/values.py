"""Checks of the values that scripts, manifests and commands are made from; environment variables.

A value ends up in a line of a script, an option of a program or a word of a command. Each writer
quotes for its own format. What no format can hold safely is refused here, for all of them.

A variable is written with its value (`--env=NAME=VALUE`) or passed by reference (`--env=NAME`). The
run then takes the value from where the launcher keeps it, and no file holds it.
"""

from __future__ import annotations

import os
import re
import types
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from layerkit_runner.errors import UsageError

Options = types.SimpleNamespace
"""The flags of a kind, by name; `kind` is its name, and `env` has (name, value or None)."""

# Control characters, line and paragraph separators, and bytes that are no UTF-8: each can end a
# line where a program reads one, or cannot be written at all.
_REFUSED_CATEGORIES = ("Cc", "Zl", "Zp", "Cs")
# Options of sbatch, and variables, which hold options such as XLA_FLAGS=--xla_….
_MAY_BEGIN_WITH_DASH = ("sbatch", "env")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD)(_|$)", re.IGNORECASE)


def check_words(words: Iterable[str]) -> None:
    """Raise a UsageError if a word or the working directory holds a control character."""
    texts = [("working directory", os.getcwd())]
    for word in words:
        name, equals, text = word.partition("=")
        texts.append((name, text) if equals and name.isprintable() else ("argument", word))
    for name, text in texts:
        for character in text:
            if unicodedata.category(character) in _REFUSED_CATEGORIES:
                raise UsageError(
                    f"{name}={text!r}: expected text without control characters, but it holds"
                    f" {character!r}. Remove it; inside a string of --fdl write it as an escape."
                )


def check_dashes(options: Options) -> None:
    """Raise a UsageError if a value begins with a dash, which would make it an option."""
    for name, text in _texts(vars(options)):
        if text.startswith("-") and name not in _MAY_BEGIN_WITH_DASH:
            raise UsageError(
                f"--{name}={text}: expected a value that does not begin with a dash. Leave the dash"
                " out, or write a path as ./-NAME."
            )


def _texts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from _texts({name: item})


def read_variable(text: str) -> tuple[str, str | None]:
    """Read `NAME=VALUE`, or `NAME` for a reference, whose value is None.

    Any other form, and the value of a secret, is a UsageError. It does not repeat the value, since
    errors end up in logs.
    """
    name, equals, value = text.partition("=")
    if not _NAME.fullmatch(name):
        raise UsageError(f"--env={name}: expected NAME=VALUE or NAME.")
    if equals and _SECRET_NAME.search(name):
        raise UsageError(
            f"--env={name}=…: by its name this is a secret, and its value would be written into a"
            f" file. Expected a reference, --env={name}; docs/launch/README.md says where each kind"
            " of launcher takes the value from."
        )
    return name, value if equals else None


def written_variables(options: Options) -> dict[str, str]:
    """Return the variables that are given with their values."""
    return {name: value for name, value in options.env if value is not None}


def referenced_variables(options: Options) -> list[str]:
    """Return the names of the variables that are given without their values."""
    return [name for name, value in options.env if value is None]


def inherited_variables(options: Options) -> list[str]:
    """Return the referenced variables; one that is not set in this process is a UsageError."""
    names = referenced_variables(options)
    for name in names:
        if name not in os.environ:
            raise UsageError(
                f"--env={name}: expected a variable that is set here. Set it before the launch:"
                f" export {name}=…"
            )
    return names
