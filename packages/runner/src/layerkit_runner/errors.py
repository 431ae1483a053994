"""Mistakes of the person at the keyboard, as distinct from faults of the program.

    UsageError          a wrong flag, name, path or value; the command line prints it, exit code 2
    ├── FieldError      a wrong experiment field; also a TypeError, for those who call from Python
    ├── StorageError    storage refused, such as a full disk: nobody's mistake, so exit code 1
    └── NonFiniteError  loss, gradient or weights are not finite: training ends, exit code 65

The texts say what was given, what was expected and the nearest right thing.
"""

from __future__ import annotations

from collections.abc import Iterable


class UsageError(Exception):
    """A request that cannot be carried out as it was written; shown without a traceback."""

    exit_code = 2


class FieldError(UsageError, TypeError):
    """An experiment field that does not exist, has no value, or has one of the wrong type."""


class StorageError(UsageError):
    """What a run has to keep cannot be written."""

    exit_code = 1


class NonFiniteError(UsageError):
    """Training that cannot continue, because its steps or its state are not finite numbers."""

    exit_code = 65


def first_names(names: Iterable[str], *, limit: int = 12) -> str:
    """Names as a list for an error message, at most `limit` of them."""
    names = list(names)
    more = f", … ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
