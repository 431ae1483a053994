"""Exit of the process without waiting for its threads, a disk, a device or another process.

The main thread may be in compiled code for minutes, where it cannot be interrupted, and standard
error may be a file on a disk that does not answer. So every action before the exit has a time
limit. This module imports only the standard library, since the peer monitor uses it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

# Time limit of one message or file. Their sum is below the time after which the other processes end
# with the coordinator.
SECONDS_TO_WRITE = 2.0

_SECONDS_TO_CLOSE = 20.0
_STDERR = 2

_callbacks: list[Callable[[], None]] = []
_notify: Callable[[str], None] | None = None
_wait_for_others: Callable[[], None] | None = None


def finished_within(seconds: float, act: Callable[[], object]) -> bool:
    """Call a function that may never return on a daemon thread, and drop its exceptions.

    Args:
      seconds: Time limit, after which the thread is abandoned.
      act: Function to call.

    Returns:
      True if `act` returned in time, without an exception.
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
    """Register a function for the block that `forced_exit` calls before it ends the process.

    The functions are called in reverse order of registration, on another thread than the main one.
    """
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


@contextlib.contextmanager
def notifying_others(
    notify: Callable[[str], None], wait_for_others: Callable[[], None] | None = None
) -> Iterator[None]:
    """Report the reason to the other processes if this one ends inside the block.

    Args:
      notify: Function that sends the reason.
      wait_for_others: Function, with a time limit, that is called last if the others need this
        process until they have the reason.
    """
    global _notify, _wait_for_others
    _notify, _wait_for_others = notify, wait_for_others
    try:
        yield
    finally:
        _notify = _wait_for_others = None


def print_error(text: str) -> None:
    """Write a line to standard error without Python's streams, whose locks may be held."""
    line = f"{text}\n".encode()
    finished_within(SECONDS_TO_WRITE, lambda: os.write(_STDERR, line))


def notify_others(reason: str) -> None:
    """Send the reason of the exit to the other processes."""
    notify = _notify
    if notify is not None:
        finished_within(SECONDS_TO_WRITE, lambda: notify(reason))


def exit_now(exit_code: int) -> NoReturn:
    """End the process, after the wait for the others that `notifying_others` set."""
    if _wait_for_others is not None:
        _wait_for_others()
    # Threads that wait for a disk would keep the interpreter alive.
    os._exit(exit_code)


def forced_exit(exit_code: int, reason: str) -> NoReturn:
    """Call the functions of `before_forced_exit`, tell the other processes, and exit."""
    finished_within(_SECONDS_TO_CLOSE, _close)
    notify_others(reason)
    exit_now(exit_code)


@contextlib.contextmanager
def forced_exit_on(*kinds: type[Exception], exit_code: int) -> Iterator[None]:
    """End the process on an error of these kinds, before contexts outside the block are closed.

    Closing their files would wait for the same disk.
    """
    try:
        yield
    except kinds as error:
        print_error(f"runner: {error}")
        notify_others(str(error))
        exit_now(exit_code)


def _close() -> None:
    for callback in reversed(list(_callbacks)):
        try:
            callback()
        except Exception:  # the other functions are still called
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
