"""Errors that a user can correct, as one-line messages."""

from __future__ import annotations

import contextlib
import errno
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerkit.errors import UserError, error_text, layer_of
from layerkit_runner.config.config_tree import NOT_SET, field_value, target_name
from layerkit_runner.config.requests import ROOTS, ResolvedExperiment
from layerkit_runner.errors import (
    StorageError,
    UsageError,
    exits_as_errors,
    naming_line,
    to_usage_error,
)
from layerkit_runner.files.atomic_write import UnsafePathError, absolute, open_append
from layerkit_runner.files.text import size_text

if TYPE_CHECKING:
    from layerkit_runner.distributed.cluster import JoinedProcess

_FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# RESOURCE_EXHAUSTED also means other limits, such as the size of a message between processes.
_OUT_OF_MEMORY = (
    re.compile(r"(ran )?out of memory", re.IGNORECASE),
    re.compile(r"RESOURCE_EXHAUSTED: [^\n]*(memory|allocat)", re.IGNORECASE),
)
_BYTES = re.compile(r"\b(\d+) bytes")


class OutOfMemoryError(UsageError):
    """A run that needs more memory than its devices or hosts have; exit code 1."""

    exit_code = 1


@contextlib.contextmanager
def naming_paths(resolved: ResolvedExperiment, *, prefix: str = "--fdl.") -> Iterator[None]:
    """Complete the field of an error about a part of an experiment to its configuration path.

    A data set is known by its name, from which its path follows. `prefix` comes before each path;
    by default, the field and the settings of the error are flags.
    """
    try:
        yield
    except UserError as error:
        for root in ("datasets", "decode_datasets"):
            for index, config in enumerate(getattr(resolved, root)):
                name, kind = field_value(config, "name"), target_name(config)
                is_field = field_value(config, error.field or "") is not NOT_SET
                if is_field and error.owner in (name or kind, f"{kind} {name!r}"):
                    error.owner, error.field = None, f"{root}.{index}.{error.field}"
        if error.field and error.owner and error.owner.partition(".")[0] in ROOTS:
            error.owner, error.field = None, f"{error.owner}.{error.field}"
        if error.field and _is_path(error.field):
            error.field = prefix + error.field
        error.settings = {
            prefix + name if _is_path(name) else name: value
            for name, value in error.settings.items()
        }
        raise


def _is_path(name: str) -> bool:
    root, dot, _ = name.partition(".")
    return bool(dot) and root in ROOTS


@contextlib.contextmanager
def job_errors(
    mode: str, resolved: ResolvedExperiment, process: JoinedProcess | None = None
) -> Iterator[None]:
    """Raise `UserError` for errors of layers, storage, memory and exits that a user can correct.

    The log of `process` receives tracebacks of errors in code; None drops them.
    """
    import jax

    from layerkit_runner.checkpointing import SaveError

    try:
        # The Python interface takes paths, and the command line flags.
        prefix = "" if process is None else "--fdl."
        with naming_paths(resolved, prefix=prefix), naming_line(), exits_as_errors():
            yield
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        if layer_of(error) is None:
            raise
        usage_error = to_usage_error(error)
        usage_error.hint = _kept_traceback(error, process)
        raise usage_error from error
    except OSError as error:
        if (
            isinstance(error, (SaveError, UnsafePathError))
            or error.errno in _FULL_OR_READ_ONLY
            or _is_in_job_folder(error, process)
        ):
            raise StorageError(str(error)) from error
        raise
    except jax.errors.JaxRuntimeError as error:
        text = out_of_memory_text(error_text(error))
        if text is None:
            raise
        plan = (
            "To find settings that fit, without the devices: runner"
            f" --exp={resolved.name} --mode=plan --search, with the same --fdl flags. "
        )
        hint = (plan if mode == "train" else "") + _kept_traceback(error, process)
        raise OutOfMemoryError(f"out of memory: {text}", hint=hint.strip()) from error
    except MemoryError as error:
        # NumPy reports the requested size, Python does not.
        text = str(error).rstrip(".") or "Python could not allocate memory"
        raise OutOfMemoryError(
            f"out of memory on the host, not on a device: {text}",
            hint=_kept_traceback(error, process),
        ) from error


def _is_in_job_folder(error: OSError, process: JoinedProcess | None) -> bool:
    folder = None if process is None else process.job_log_dir
    if folder is None or not isinstance(error.filename, str):
        return False
    return absolute(error.filename).is_relative_to(absolute(folder))


def out_of_memory_text(text: str) -> str | None:
    """Return the out-of-memory message in an error's text, in one line; None if there is none."""
    matches = (pattern.search(text) for pattern in _OUT_OF_MEMORY)
    match = next(filter(None, matches), None)
    if match is None:
        return None
    line = text[match.start() :].partition("\n")[0]
    line = _BYTES.sub(lambda size: f"{size[0]} ({size_text(int(size[1]))})", line)
    return textwrap.shorten(line, 200, placeholder=" …").rstrip(".")


def _kept_traceback(error: BaseException, process: JoinedProcess | None) -> str:
    """Append the traceback to the process's log and return a sentence that names it."""
    if process is None:
        return ""
    text = "".join(traceback.format_exception(error))
    try:
        log = process.log_file()
        with open_append(log) as file:
            file.write(text.encode())
    except OSError:
        print(text, end="", file=sys.stderr)
        return ""
    return f"The traceback is in {log}."
