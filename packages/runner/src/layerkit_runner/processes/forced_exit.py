"""Ends the process at once, whatever its main thread waits for.

The main thread may be in compiled code for minutes and cannot be interrupted there. `forced_exit`
runs on another thread. It calls what was registered by `before_forced_exit` and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from layerkit_runner.processes.time_limit import finished_within

_callbacks: list[Callable[[str], None]] = []


@contextlib.contextmanager
def before_forced_exit(callback: Callable[[str], None]) -> Iterator[None]:
    """Have `callback` called with the reason before a forced exit, while this is entered.

    The callbacks are called in reverse order of registration, on a thread that is not the main one.
    """
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


def forced_exit(code: int, reason: str, *, seconds: float = 20.0) -> NoReturn:
    """End the process with this exit code, without waiting for any of its threads.

    Args:
      code: The exit code.
      reason: Why the process ends, in a few words.
      seconds: How long the callbacks may take together.
    """
    finished_within(seconds, lambda: _call_all(reason))
    os._exit(code)


def _call_all(reason: str) -> None:
    for callback in reversed(list(_callbacks)):
        try:
            callback(reason)
        except Exception:  # the others have their turn all the same
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
