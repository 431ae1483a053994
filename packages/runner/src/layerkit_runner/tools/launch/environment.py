"""Environment variables of a launched run.

A variable is written with its value (`--env=NAME=VALUE`), or only referred to (`--env=NAME`): then
the run takes the value from where the kind of launcher keeps it, and no file holds it.
"""

from __future__ import annotations

import argparse
import os
import re

from layerkit_runner.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD)(_|$)", re.IGNORECASE)


def variable(text: str) -> tuple[str, str | None]:
    """Read `NAME=VALUE`, or `NAME` for a reference, whose value is None.

    Raises:
      argparse.ArgumentTypeError: It has another form, or gives the value of a secret.
    """
    name, equals, value = text.partition("=")
    if not _NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, nor NAME")
    if equals and _SECRET_NAME.search(name):
        # The value is not repeated: errors end up in logs.
        raise argparse.ArgumentTypeError(
            f"{name}=…: by its name this is a secret, and its value would be written into a file."
            f" Expected a reference, --env={name}; docs/launch/README.md says where each kind of"
            " launcher takes the value from."
        )
    return name, value if equals else None


def written_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that are given with their values."""
    return {name: value for name, value in options.env if value is not None}


def referenced_variables(options: argparse.Namespace) -> list[str]:
    """Return the names of the variables that are given without their values."""
    return [name for name, value in options.env if value is None]


def inherited_variables(options: argparse.Namespace) -> list[str]:
    """Return the referenced variables for a run that inherits the environment of this process.

    Raises:
      UsageError: A variable is not set.
    """
    names = referenced_variables(options)
    for name in names:
        if name not in os.environ:
            raise UsageError(
                f"--env={name}: expected a variable that is set here. Set it before the launch:"
                f" export {name}=…"
            )
    return names
