"""Errors of checkpoints, and a filter that keeps tracebacks of the same errors out of the logs.

SaveError               a checkpoint could not be written: a full disk, a read-only folder
└── SaveTimeoutError    a save has not ended in time
DamagedCheckpointError  the files of a step are not as they were written
LayoutVersionError      a later version of this package wrote the step
NewerManifestError      a later version of this package wrote the manifest of the step
ProcessCountError       the input state belongs to another number of processes
"""

from __future__ import annotations

import logging
import os
import sys
from types import TracebackType
from typing import Any

# What storage raises: the file system's errors, and TensorStore's, which are ValueErrors.
STORAGE_ERRORS = (OSError, ValueError)
_ENDING = "cannot schedule new futures after"
_ORBAX = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"


class SaveError(OSError):
    """A checkpoint could not be written. The message names it, the reason, and what is left."""


class SaveTimeoutError(SaveError):
    """A save has not ended in time. Its threads may never end: leave the process by `os._exit`."""


class DamagedCheckpointError(RuntimeError):
    """The files of a step are not as they were written. The message lists them."""


class LayoutVersionError(ValueError):
    """A checkpoint was written by a later version of this package."""


class NewerManifestError(ValueError):
    """A manifest, itself undamaged, was written by a later version of this package."""


class ProcessCountError(ValueError):
    """The input state was saved by another number of processes and is not a global one."""


def save_error(
    error: BaseException, *, step: int, directory: object, newest: int | None, timeout_secs: int
) -> SaveError:
    """Return the error of a save of `step`; `newest` is the newest committed step, if any."""
    left = "it holds no checkpoint" if newest is None else f"step {newest} is the newest there"
    if isinstance(error, TimeoutError):
        return SaveTimeoutError(
            f"The checkpoint of step {step} has not been written to {directory} within "
            f"{timeout_secs} s (--async_timeout_secs); {left}."
        )
    # TensorStore appends places in its own source.
    text = str(error).strip() or type(error).__name__
    reason = text.splitlines()[0].partition(" [source locations=")[0].rstrip(".")
    return SaveError(
        f"The checkpoint of step {step} could not be written to {directory}: {reason}; {left}."
    )


def silence_tracebacks() -> None:
    """Keep tracebacks of storage errors of a save off the screen. Repeated calls change nothing.

    The manager raises the error as one sentence. Orbax logs a traceback from each thread that met
    it. Orbax also closes the event loop with the first write that fails, and TensorStore then
    prints a traceback for each other write.
    """
    logger = logging.getLogger("absl")
    if _is_logged in logger.filters:
        return
    logger.addFilter(_is_logged)
    show = sys.unraisablehook

    def show_except_closed_loops(unraisable: Any) -> None:
        is_runtime_error = isinstance(unraisable.exc_value, RuntimeError)
        if not (is_runtime_error and _is_in_asyncio_alone(unraisable.exc_traceback)):
            show(unraisable)

    sys.unraisablehook = show_except_closed_loops


def _is_logged(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    is_raised_elsewhere = isinstance(error, STORAGE_ERRORS) or (
        # A thread of the failed save still works while the process ends.
        isinstance(error, RuntimeError) and _ENDING in str(error)
    )
    return not (is_raised_elsewhere and _ORBAX in record.pathname)


def _is_in_asyncio_alone(trace: TracebackType | None) -> bool:
    """Return whether compiled code called asyncio, which failed because its loop is closed."""
    names = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if os.path.basename(os.path.dirname(code.co_filename)) != "asyncio":
            return False
        names.append(code.co_name)
        trace = trace.tb_next
    return names == ["call_soon_threadsafe", "_check_closed"]
