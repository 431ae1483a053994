"""Errors that the command line prints without a traceback, and conversion of others to them.

    UsageError          a wrong flag, name, path or value; exit code 2
    ├── FieldError      a wrong experiment field; also a TypeError, for callers from Python
    ├── ExperimentClassError   a class whose fields or methods have no effect; also a TypeError
    ├── ExitError       code of a run that called sys.exit; exit code 1
    ├── StorageError    storage that fails, such as a full disk; exit code 1
    └── NonFiniteError  loss, gradient or weights are not finite: training ends, exit code 65

The command line prints every `layerkit.errors.UserError` without a traceback. `check_method_names`
raises the error about a misspelled hook of an experiment or observer.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerkit.base.diagnostics import layer_of
from layerkit.config.field_types import FieldTypeError
from layerkit.errors import UnknownNameError, UserError, as_sentence, error_text, near_names
from layerkit_inputs.base.errors import MissingExtraError, input_of


class UsageError(UserError):
    """A request that cannot be carried out as it was written; shown without a traceback."""

    exit_code = 2


class FieldError(UsageError, TypeError):
    """An experiment field that does not exist, has no value, or has one of the wrong type."""


class ExperimentClassError(UsageError, TypeError):
    """A class of an experiment or observer with fields or methods that would have no effect."""


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

# Frames of these packages pass calls on; the code that called them is what a person can change.
_LIBRARIES = frozenset({"fiddle", "flax", "jax", "jaxlib", "numpy"})
_OURS = frozenset({"layerkit", "layerkit_inputs", "layerkit_runner"})
# Modules and functions that look up a name for the code that asks.
_LOOKUP_MODULES = frozenset(
    f"layerkit.{name}" for name in ("config", "field_checks", "field_types", "nested_map")
)
_LOOKUP_FUNCTIONS = frozenset(
    {
        *("__getattr__", "_variable", "get_var", "update_var"),
        *("create_child", "create_children", "_make_child", "<listcomp>"),
    }
)

# Similarity above which a method counts as a misspelled hook: `eval_program`, not `validator`.
_MIN_SIMILARITY = 0.86


def check_method_names(cls: type, base: type) -> None:
    """Raise an error if a method has nearly the name of a hook, such as `eval_program`.

    Args:
      cls: New class, whose bases are checked as well.
      base: Base class of `cls` whose public methods are the hooks. A similar method counts as a
        misspelled hook if it has as many parameters.
    """
    hooks = _public_methods(base)
    near = {
        (owner, name): hook
        for owner in cls.__mro__
        for name, count in ({} if owner in (base, object) else _public_methods(owner)).items()
        if name not in hooks
        for hook in difflib.get_close_matches(
            name, [hook for hook in hooks if hooks[hook] == count], n=1, cutoff=_MIN_SIMILARITY
        )
    }
    # A class that defines both the hook and the similar name intends both.
    meant = {name for (owner, name), hook in near.items() if hook in vars(owner)}
    for (owner, name), hook in near.items():
        if name not in meant:
            raise ExperimentClassError(
                "unknown method, which a run never calls",
                owner=owner.__qualname__,
                value=name,
                choices=[hook],
                hint=f"Rename another method, for example to _{name}.",
            )


def _public_methods(cls: type) -> dict[str, int]:
    """Return the public methods that a class itself defines, with their numbers of parameters."""
    return {
        name: len(inspect.signature(value).parameters)
        for name, value in vars(cls).items()
        if not name.startswith("_") and inspect.isfunction(value)
    }


def with_data(kind: type[UsageError], error: UserError, **data: Any) -> UsageError:
    """Return an error of another kind with the data of `error`, some of it replaced."""
    found = kind()
    vars(found).update(vars(error), **data)
    return found


def to_usage_error(error: Exception, *, owner: str | None = None) -> UsageError:
    """Return an error of a layer, an input or a file as one that the command line prints.

    A `UserError` keeps its data, with `owner` before its own, and its class if that is a
    `UsageError`. The error of a layer, or of the code of an experiment's input, becomes one line
    that names the layer or input and the line of code outside of the libraries. Any other error
    keeps its message.
    """
    layer, source = layer_of(error), input_of(error)
    if isinstance(error, UserError):
        names = (owner, error.owner or layer or source)
        kind = type(error) if isinstance(error, UsageError) else UsageError
        return with_data(kind, error, owner=": ".join(filter(None, names)) or None)
    found = UsageError(error_text(error), owner=owner)
    if layer is not None:
        found.problem = _first_paragraph(error)
        if not found.problem.startswith(layer):
            place = f", {origin[1]}" if (origin := _origin(error)) else ""
            found.problem = f"{found.problem.rstrip('.')}, in layer {layer}{place}"
    elif source is not None and not found.problem.startswith(source):
        origin = _origin(error)
        found.problem = f"{source}: {error_text(error)}"
        if origin is not None and origin[0] not in _OURS:
            found.problem = f"{source}: {_first_paragraph(error).rstrip('.')}, {origin[1]}"
    return found


@contextlib.contextmanager
def as_usage_error(*kinds: type[Exception], owner: str | None = None) -> Iterator[None]:
    """Convert errors of the block by `to_usage_error`.

    Args:
      *kinds: Classes of errors that are converted; by default those of reading data sets.
      owner: See `to_usage_error`.
    """
    caught = kinds or (MissingExtraError, OSError, ValueError)
    try:
        yield
    except caught as error:
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
        origin = _origin(error)
        raise ExitError(
            "the code of the run raised an exception that ends a process without a report",
            owner=None if origin is None else origin[1],
            value=error,
            expected="an exception that derives from Exception",
            hint="To end training early, set task.early_stopping or override Executor.is_over.",
        ) from error


def unknown_name_text(error: Exception) -> str | None:
    """Return one sentence with file and line, if code uses an unknown name or a wrong type.

    Return None unless the class of the object derives from one of layerkit, its inputs or its
    runner, and the code is outside of these packages.
    """
    is_unknown_name = isinstance(error, (UnknownNameError, FieldTypeError)) or (
        isinstance(error, AttributeError)
        and any(cls.__module__.partition(".")[0] in _OURS for cls in type(error.obj).__mro__)
    )
    origin = _origin(error)
    if not is_unknown_name or origin is None or origin[0] in _OURS:
        return None
    text = _first_paragraph(error)
    # The message of Python and Flax suggests no name.
    if isinstance(error, AttributeError) and "object has no attribute" in text:
        owner, names = type(error.obj).__qualname__, dir(error.obj)
        text = f"{owner} has no attribute {error.name!r}{near_names(str(error.name), names)}"
    layer, source = layer_of(error), input_of(error)
    if layer is not None and not text.startswith(layer):
        text = f"{as_sentence(text)} In layer {layer}."
    elif source is not None:
        text = f"{as_sentence(text)} In input {source}."
    return f"{origin[1]}: {text}"


def _first_paragraph(error: Exception) -> str:
    """Return the first paragraph in one line, since JAX explains some errors at length below."""
    return " ".join(error_text(error).partition("\n\n")[0].split())


def _origin(error: BaseException) -> tuple[str, str] | None:
    """Return the package and `file:line` of the innermost code that a person may have written."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        package = module.partition(".")[0]
        is_lookup = package in _OURS and code.co_name in _LOOKUP_FUNCTIONS
        if package in _LIBRARIES or module in _LOOKUP_MODULES or is_lookup:
            continue
        path = Path(code.co_filename)
        if package in _OURS:
            path = Path(path.name)
        elif path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        found = package, f"{path}:{line}"
    return found
