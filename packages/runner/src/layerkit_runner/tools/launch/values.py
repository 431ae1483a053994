"""Checks of the values from which scripts, manifests and commands are made; environment variables.

Each writer quotes values for its own format. Values that no format can hold safely are errors here.

A variable is written with its value (`--env=NAME=VALUE`) or passed by reference (`--env=NAME`). The
run then takes the value from where the launcher keeps it, and no file holds it.
"""

from __future__ import annotations

import os
import re
import types
import unicodedata
from collections.abc import Iterable

from layerkit_runner.errors import UsageError

Options = types.SimpleNamespace
"""The flags of a kind, by name; `kind` is its name, and `env` has (name, value or None)."""

# Control characters, line and paragraph separators, and bytes that are no UTF-8: each can end a
# line where a program reads one, or cannot be written at all.
_INVALID_CATEGORIES = ("Cc", "Zl", "Zp", "Cs")
# Options of sbatch, and variables, which hold options such as XLA_FLAGS=--xla_….
_MAY_BEGIN_WITH_DASH = ("sbatch", "env")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD)(_|$)", re.IGNORECASE)


def check_words(words: Iterable[str]) -> None:
    """Raise UsageError if a word or the working directory holds a control character."""
    texts = [("working directory", os.getcwd())]
    for word in words:
        name, equals, text = word.partition("=")
        texts.append((name, text) if equals and name.isprintable() else ("argument", word))
    for name, text in texts:
        for character in text:
            if unicodedata.category(character) in _INVALID_CATEGORIES:
                raise UsageError(
                    field=name,
                    value=text,
                    expected="text without control characters",
                    hint=f"Remove {character!r}; inside a string of --fdl write it as an escape.",
                )


def check_dashes(options: Options) -> None:
    """Raise UsageError if a value begins with a dash, which would make it an option."""
    for name, value in vars(options).items():
        texts = value if isinstance(value, (list, tuple)) else [value]
        for text in texts:
            is_option = isinstance(text, str) and text.startswith("-")
            if is_option and name not in _MAY_BEGIN_WITH_DASH:
                raise UsageError(
                    field=f"--{name}",
                    value=text,
                    expected="a value that does not begin with a dash",
                    hint="Write a path as ./-NAME.",
                )


def read_variable(text: str) -> tuple[str, str | None]:
    """Return name and value of `NAME=VALUE`, or name and None of the reference `NAME`.

    Raises:
      UsageError: The text has another form, or is the value of a secret. The error does not repeat
        the value, since errors end up in logs.
    """
    name, equals, value = text.partition("=")
    if not _NAME.fullmatch(name):
        raise UsageError(field="--env", value=name, expected="NAME=VALUE or NAME")
    if equals and _SECRET_NAME.search(name):
        raise UsageError(
            "the value of a secret would be written to a file",
            field="--env",
            value=name,
            expected=f"a reference without the value, --env={name}",
            hint="docs/launch/README.md lists the source of the value for each kind of launcher.",
        )
    return name, value if equals else None


def written_variables(options: Options) -> dict[str, str]:
    """Return the variables that are given with their values."""
    return {name: value for name, value in options.env if value is not None}


def referenced_variables(options: Options) -> list[str]:
    """Return the names of the variables that are given without their values."""
    return [name for name, value in options.env if value is None]


def inherited_variables(options: Options) -> list[str]:
    """Return the names of the referenced variables, all of which this process must have."""
    names = referenced_variables(options)
    for name in names:
        if name not in os.environ:
            raise UsageError(
                field="--env",
                value=name,
                expected="a variable that is set in this environment",
                hint=f"Set it before the launch: export {name}=…",
            )
    return names
