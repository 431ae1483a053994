"""What Orbax and TensorStore print of a save that failed: tracebacks from many threads.

The manager raises the error as one sentence, `SaveError`, before which a user would read hundreds
of lines. Orbax logs a traceback from each thread that met the error. It also closes the event loop
with the first write that fails, and TensorStore then prints a traceback for each other write, whose
result nothing waits for any more.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

_ENDING = "cannot schedule new futures after"
_ORBAX = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"


def leave_out(errors: tuple[type[BaseException], ...]) -> None:
    """Have no tracebacks printed of errors of these kinds. Repeated calls change nothing."""
    logger = logging.getLogger("absl")
    if not any(isinstance(known, _FailedSaves) for known in logger.filters):
        logger.addFilter(_FailedSaves(errors))
        sys.unraisablehook = _ExceptClosedLoops(sys.unraisablehook)


class _FailedSaves(logging.Filter):
    def __init__(self, errors: tuple[type[BaseException], ...]) -> None:
        super().__init__()
        self._errors = errors

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        is_told = isinstance(error, self._errors) or (
            # Of a thread of the failed save that works on while the process ends.
            isinstance(error, RuntimeError) and _ENDING in str(error)
        )
        return not (is_told and _ORBAX in record.pathname)


class _ExceptClosedLoops:
    """An `unraisablehook` that leaves out results of TensorStore whose event loop is closed."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        is_left_out = isinstance(unraisable.exc_value, RuntimeError) and _is_in_asyncio_alone(
            unraisable.exc_traceback
        )
        if not is_left_out:
            self._hook(unraisable)


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
