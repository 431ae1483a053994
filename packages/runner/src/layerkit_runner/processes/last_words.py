"""The end of a process that must not wait: for a disk, a device or a process that does not answer.

Standard error and the connection to the other processes come first, each with a time limit, since
standard error may be a file on the disk that does not answer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

from layerkit_runner.processes.time_limit import finished_within

# For one thing to be said or written. All of it takes less time than the other processes have
# before they end as well, with the coordinator.
SECONDS_TO_WRITE = 2.0

_STDERR = 2
_tell_others: Callable[[str], None] | None = None


@contextlib.contextmanager
def told_to_others(tell_others: Callable[[str], None]) -> Iterator[None]:
    """Let `say_and_tell` reach the other processes of the job inside the block.

    Args:
      tell_others: Called with the reason for which this process ends.
    """
    global _tell_others
    _tell_others = tell_others
    try:
        yield
    finally:
        _tell_others = None


def say(text: str) -> None:
    """Write a line to standard error, past Python's streams, whose locks may be held."""
    line = f"{text}\n".encode()
    finished_within(SECONDS_TO_WRITE, lambda: os.write(_STDERR, line))


def say_and_tell(text: str, *, reason: str) -> None:
    """Say why this process ends: `text` here, and `reason` to the other processes."""
    say(text)
    tell = _tell_others
    if tell is not None:
        finished_within(SECONDS_TO_WRITE, lambda: tell(reason))


@contextlib.contextmanager
def leaving_at_once(*kinds: type[Exception], exit_code: int) -> Iterator[None]:
    """End the process on an error of these kinds, before anything outside the block is closed.

    Closing files would wait for the same disk.
    """
    try:
        yield
    except kinds as error:
        leave(f"runner: {error}", reason=str(error), exit_code=exit_code)


def leave(text: str, *, reason: str, exit_code: int) -> NoReturn:
    """Say why this process ends, as `say_and_tell` does, and end it."""
    say_and_tell(text, reason=reason)
    # Threads that wait for the disk would keep the interpreter alive.
    os._exit(exit_code)
