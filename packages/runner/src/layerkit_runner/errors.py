"""Errors that the command line prints in one line, and conversion of others to them.

    UsageError          a wrong flag, name, path or value; exit code 2
    ├── FieldError      a wrong experiment field; also a TypeError, for callers from Python
    ├── ExitError       code of a run that called sys.exit; exit code 1
    ├── StorageError    storage that fails, such as a full disk; exit code 1
    └── NonFiniteError  loss, gradient or weights are not finite: training ends, exit code 65

The command line prints every `layerkit.errors.UserError` without a traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from layerkit.config.field_types import FieldTypeError
from layerkit.errors import UnknownNameError, UserError, error_text, layer_of
from layerkit_inputs.base.errors import MissingExtraError, input_of


class UsageError(UserError):
    """A request that cannot be carried out as it was written; shown without a traceback."""

    exit_code = 2


class FieldError(UsageError, TypeError):
    """An experiment field that does not exist, has no value, or has one of the wrong type."""


class ExitError(UsageError):
    """Code of a run that raised an exception which ends a process without a report."""

    exit_code = 1


class StorageError(UsageError):
    """A failure to write what a run has to keep."""

    exit_code = 1


class NonFiniteError(UsageError):
    """Training that cannot continue, because its steps or its state are not finite numbers."""

    exit_code = 65


UNREADABLE_DATA = 74
"""Exit code of training whose data could not be read after its first step, such as a network file
system that failed for a while."""

# The code that called these packages is what a person can change, before the experiments that come
# with them.
_LIBRARIES = sys.stdlib_module_names | {
    *("layerkit", "layerkit_inputs", "layerkit_runner"),
    *("fiddle", "flax", "jax", "jaxlib", "numpy", "optax"),
}


def recast(kind: type[UsageError], error: UserError, **data: Any) -> UsageError:
    """Return an error of another kind with the data of `error`, some of it replaced."""
    result = kind()
    vars(result).update(vars(error), **data)
    return result


def to_usage_error(error: Exception, *, owner: str | None = None) -> UsageError:
    """Return an error of a layer, an input or a file as one that the command line prints.

    A `UserError` keeps its data, with `owner` before its own, and its class if that is a
    `UsageError`. Any other error keeps its message; its owner is the layer or input that raised it
    and the line of the user's code.
    """
    place = layer_of(error) or input_of(error)
    if isinstance(error, UserError):
        kind = type(error) if isinstance(error, UsageError) else UsageError
        names = (owner, error.owner or place)
        return recast(kind, error, owner=": ".join(filter(None, names)) or None)
    text = error_text(error)
    if layer_of(error) is not None:  # JAX explains some errors at length in later paragraphs.
        text = " ".join(text.partition("\n\n")[0].split())
    if place is not None and not text.startswith(place):
        owner = ": ".join(filter(None, (owner, place, line_of(error))))
    return UsageError(text, owner=owner)


@contextlib.contextmanager
def as_usage_error(*kinds: type[Exception], owner: str | None = None) -> Iterator[None]:
    """Convert errors of the block by `to_usage_error`.

    Args:
      *kinds: Classes of errors that are converted; by default those of reading data sets.
      owner: See `to_usage_error`.
    """
    kinds = kinds or (MissingExtraError, OSError, ValueError)
    try:
        yield
    except kinds as error:
        raise to_usage_error(error, owner=owner) from error


@contextlib.contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raise `ExitError` if code of the block calls `sys.exit`, which would end the run as done.

    The same holds for every exception that does not derive from `Exception`, except Ctrl-C.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ExitError(
            "the code of the run raised an exception that ends a process without a report",
            owner=line_of(error),
            value=error,
            expected="an exception that derives from Exception",
            hint="To end training early, set task.early_stopping or override Executor.is_over.",
        ) from error


@contextlib.contextmanager
def naming_code() -> Iterator[None]:
    """Convert errors that are not `UserError`, of the user's code, to ones with its line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UsageError(f"{type(error).__name__}: {error}", owner=line_of(error)) from error


@contextlib.contextmanager
def naming_line() -> Iterator[None]:
    """Name the line of the user's code in an error about a name or value that the code uses."""
    try:
        yield
    except (UnknownNameError, FieldTypeError) as error:
        error.owner = ": ".join(filter(None, (line_of(error), error.owner or layer_of(error))))
        raise


def line_of(error: BaseException) -> str | None:
    """Return `file:line` of the innermost code outside of these packages and their libraries.

    Code that is not installed comes first, then other installed packages, then the experiments that
    come with these packages.
    """
    users, installed, shipped = None, None, None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__package__") or frame.f_globals.get("__name__", "")
        package, place = module.partition(".")[0], f"{frame.f_code.co_filename}:{line}"
        if package in _LIBRARIES:
            continue
        if package.startswith("layerkit_"):
            shipped = place
        elif f"{os.sep}site-packages{os.sep}" in place:
            installed = place
        else:
            users = place
    result = users or installed or shipped
    return result and os.path.relpath(result)


def unknown_field(experiment: str, name: str, valid: Iterable[str]) -> FieldError:
    """Return the error about a field that the experiment does not have.

    `valid` begins with the fields of the bases; the choices begin with those of the class itself.
    """
    return FieldError("unknown field", owner=experiment, value=name, choices=[*valid][::-1])
