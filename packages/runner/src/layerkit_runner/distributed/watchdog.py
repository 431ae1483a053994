"""The watchdog, which ends a process without progress, and the exit of a blocked process.

Code that makes progress calls `progress`; a thread checks the time of the last call. The main
thread may be in compiled code, and standard error on a disk that does not respond. So an exit waits
for nothing, and every action before it has a time limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

_SECONDS_TO_WRITE = 2.0
_SECONDS_TO_LEAVE = 10.0
_SECONDS_TO_CLOSE = 20.0


@dataclasses.dataclass(frozen=True)
class Identity:
    """A process of the job, as messages name it."""

    process: int
    num_processes: int
    host: str
    pid: int

    def __str__(self) -> str:
        """Return the name for messages."""
        return f"process {self.process} of {self.num_processes} (host {self.host}, pid {self.pid})"


_callbacks: list[Callable[[], None]] = []
_peers: Any = None  # `Peers` of a job of several processes


def finished_within(seconds: float, act: Callable[[], object]) -> bool:
    """Return whether a function, called on a daemon thread, returns in time without an error."""
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
def run_before_forced_exit(callback: Callable[[], None]) -> Iterator[None]:
    """Register a function for the block that `forced_exit` calls, the latest first."""
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


@contextlib.contextmanager
def reporting_to(peers: Any) -> Iterator[None]:
    """Report the reason to the others of `Peers` if this process ends inside the block."""
    global _peers
    _peers = peers
    try:
        yield
    finally:
        _peers = None


def print_error(text: str) -> bool:
    """Write a line to standard error without Python's streams, whose locks may be held.

    Returns:
      Whether it was written in time.
    """
    line = f"{text}\n".encode()
    return finished_within(_SECONDS_TO_WRITE, lambda: os.write(_STDERR, line))


def exit_now(exit_code: int, reason: str = "") -> NoReturn:
    """End the process at once, after its report to the other processes."""
    peers = _peers
    if peers is not None:
        finished_within(_SECONDS_TO_LEAVE, lambda: peers.leave(exit_code, reason))
    # Threads that wait for a disk would keep the interpreter alive.
    os._exit(exit_code)


def forced_exit(exit_code: int, reason: str) -> NoReturn:
    """Call the functions of `run_before_forced_exit`, tell the other processes, and exit."""
    finished_within(_SECONDS_TO_CLOSE, _close)
    exit_now(exit_code, reason)


@contextlib.contextmanager
def forced_exit_on(*kinds: type[Exception], exit_code: int) -> Iterator[None]:
    """End the process on an error of these kinds, before contexts outside of the block close."""
    try:
        yield
    except kinds as error:
        if _peers is not None:
            _peers.confirm_all_alive()
        print_error(f"runner: {error}")
        exit_now(exit_code, str(error))


def _close() -> None:
    for callback in reversed(list(_callbacks)):
        try:
            callback()
        except Exception:  # the other functions are still called
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


# Exit code of a process that the watchdog ends: sysexits.h's "internal software error".
HUNG_EXIT_CODE = 70

# Limit of a phase that compiles or reads a large checkpoint: seconds, or a multiple of the ordinary
# limit if that is longer.
STARTING_SECONDS = 7200.0
STARTING_TIMES = 4

_STDERR = 2
# If the thread of the watchdog did not run for this time, the whole process was stopped.
_STOPPED_SECONDS = 30.0


class _Phase(NamedTuple):
    name: str
    since: float
    limit: float


# Limit of an ordinary phase; None without a watchdog.
_seconds: float | None = None
_current = _Phase("starting", 0.0, math.inf)
_is_complete = False


def progress(phase: str, *, compiles: bool = False, waits_for_others: bool = False) -> None:
    """Report the start of a phase to the watchdog; takes a microsecond.

    Args:
      phase: Name of the phase, such as `reading the batch of step 7`.
      compiles: True to extend the limit to `STARTING_SECONDS`, or `STARTING_TIMES` the limit.
      waits_for_others: True if the phase may wait for another process. Its limit is then a quarter
        longer, so that the process that causes the wait reports first.
    """
    global _current
    if _seconds is not None:
        limit = 1.25 * _seconds if waits_for_others else _seconds
        _current = _Phase(phase, time.monotonic(), _longest(_seconds) if compiles else limit)


def _longest(seconds: float) -> float:
    return max(STARTING_SECONDS, STARTING_TIMES * seconds)


class phase:  # noqa: N801
    """A context that reports a phase of this thread, and at its end that of the outer block.

    It takes the arguments of `progress`. Each step has several, so it is no generator.
    """

    def __init__(self, name: str, **about: bool) -> None:
        """Store the arguments of `progress`."""
        self._name, self._about = name, about

    def __enter__(self) -> None:
        """Report the phase."""
        self._outer = _current
        progress(self._name, **self._about)

    def __exit__(self, *error: object) -> None:
        """Report the phase of the outer block."""
        global _current
        _current = _Phase(self._outer.name, time.monotonic(), self._outer.limit)


@contextlib.contextmanager
def training_is_complete() -> Iterator[None]:
    """End a process that hangs in the block with exit code 0, since its work is saved."""
    global _is_complete
    _is_complete = True
    try:
        yield
    finally:
        _is_complete = False


@contextlib.contextmanager
def watched(seconds: float | None, *, process: str) -> Iterator[None]:
    """End the process with `HUNG_EXIT_CODE` if a phase in the block exceeds its limit.

    Inside `training_is_complete`, the exit code is 0.

    The phase before the first call of `progress` may compile.

    Args:
      seconds: Limit of a phase; None for no limit.
      process: Name of this process in the message.
    """
    global _seconds
    if seconds is None:
        yield
        return
    _seconds = seconds
    progress("starting", compiles=True)
    ended = threading.Event()
    arguments = (seconds, ended, process)
    thread = threading.Thread(target=_watch, args=arguments, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _seconds = None
        ended.set()
        thread.join()


def _watch(seconds: float, ended: threading.Event, process: str) -> None:
    global _current
    pause = min(10.0, seconds / 10)
    checked = time.monotonic()
    try:
        while not ended.wait(pause):
            checked, before = time.monotonic(), checked
            # Compiled code may hold Python's lock, which blocks this thread. This timer needs no
            # lock, and ends the process with exit code 1.
            faulthandler.dump_traceback_later(
                _longest(seconds) + pause + 60, exit=True, file=_STDERR
            )
            phase = _current
            if checked - before > pause + _STOPPED_SECONDS:
                _current = phase._replace(since=checked)  # continued after Ctrl-Z
            elif time.monotonic() - phase.since > phase.limit:
                _end(phase, process)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end(phase: _Phase, process: str) -> None:
    hung = f"hung: {phase.name} has taken {time.monotonic() - phase.since:.0f} s"
    remedy = "The same command resumes from the newest checkpoint"
    if _is_complete:
        remedy = "The training is complete; the same command repeats the rest of the report"
    names = ", ".join(f"0x{t.ident or 0:016x} is {t.name}" for t in threading.enumerate())
    is_printed = print_error(
        f"runner: {process} {hung} without progress. {remedy}; --hung_step_timeout_secs sets the"
        f" limit. Stacks of its threads, of which {names}:"
    )
    if is_printed:  # it would block the whole process where standard error blocks
        faulthandler.dump_traceback(_STDERR)
    if _is_complete:
        finished_within(_SECONDS_TO_CLOSE, _close)
    exit_now(0 if _is_complete else HUNG_EXIT_CODE, hung)
