"""Ending the process without waiting for its threads, a disk, a device or another process.

The main thread may be in compiled code for minutes and cannot be interrupted there, and standard
error may be a file on a disk that does not answer. So everything that comes before the end has a
time limit. This file imports only the standard library, since the peer monitor uses it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

# Time limit of one message or file. All of them together take less time than the other processes
# have before they end as well, with the coordinator.
SECONDS_TO_WRITE = 2.0

_SECONDS_TO_CLOSE = 20.0
_STDERR = 2

_callbacks: list[Callable[[], None]] = []
_tell_others: Callable[[str], None] | None = None
_wait_for_others: Callable[[], None] | None = None


def finished_within(seconds: float, act: Callable[[], object]) -> bool:
    """Call `act`, which may never return, on a daemon thread, and wait for it.

    An exception of `act` is dropped; an `act` that must report its errors catches them itself.

    Args:
      seconds: How long to wait. Afterwards the thread is left to itself.
      act: What to do.

    Returns:
      Whether `act` returned in time, without an exception.
    """
    has_returned = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            act()
            has_returned.set()

    thread = threading.Thread(target=run, name="time-limit", daemon=True)
    thread.start()
    thread.join(seconds)
    return has_returned.is_set()


@contextlib.contextmanager
def before_forced_exit(callback: Callable[[], None]) -> Iterator[None]:
    """Have `forced_exit` call `callback` first, while this is entered.

    The callbacks are called in reverse order of registration, on a thread that is not the main one.
    """
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


@contextlib.contextmanager
def told_to_others(
    tell_others: Callable[[str], None], wait_for_others: Callable[[], None] | None = None
) -> Iterator[None]:
    """Let the other processes of the job know why this one ends, if it does inside the block.

    Args:
      tell_others: Called with the reason.
      wait_for_others: Called last if the others need this process until they know the reason; it
        has a time limit of its own.
    """
    global _tell_others, _wait_for_others
    _tell_others, _wait_for_others = tell_others, wait_for_others
    try:
        yield
    finally:
        _tell_others = _wait_for_others = None


def say(text: str) -> None:
    """Write a line to standard error, past Python's streams, whose locks may be held."""
    line = f"{text}\n".encode()
    finished_within(SECONDS_TO_WRITE, lambda: os.write(_STDERR, line))


def tell(reason: str) -> None:
    """Tell the other processes why this one ends."""
    tell_others = _tell_others
    if tell_others is not None:
        finished_within(SECONDS_TO_WRITE, lambda: tell_others(reason))


def end(exit_code: int) -> NoReturn:
    """End the process, after the others had time to learn why if they need it for that."""
    if _wait_for_others is not None:
        _wait_for_others()
    # Threads that wait for a disk would keep the interpreter alive.
    os._exit(exit_code)


def forced_exit(exit_code: int, reason: str) -> NoReturn:
    """Call what `before_forced_exit` was given, tell the other processes, and end the process."""
    finished_within(_SECONDS_TO_CLOSE, _close)
    tell(reason)
    end(exit_code)


@contextlib.contextmanager
def forced_exit_on(*kinds: type[Exception], exit_code: int) -> Iterator[None]:
    """End the process on an error of these kinds, before anything outside the block is closed.

    Closing files would wait for the same disk.
    """
    try:
        yield
    except kinds as error:
        say(f"runner: {error}")
        tell(str(error))
        end(exit_code)


def _close() -> None:
    for callback in reversed(list(_callbacks)):
        try:
            callback()
        except Exception:  # the others have their turn all the same
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
