"""The watchdog: ends a process that no longer makes progress, and reports what it was doing.

A reader may never return, a collective may wait for a device that never enters it, a store may not
answer. Code that makes progress calls `progress`; a thread looks at the time of the last call.
A process has one watchdog.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from layerkit_runner.distributed.forced_exit import (
    SECONDS_TO_WRITE,
    end,
    finished_within,
    say,
    tell,
)
from layerkit_runner.files.atomic_write import open_append

# Exit code of a process that the watchdog ends: sysexits.h's "internal software error".
HUNG_EXIT_CODE = 70

# Compiling a large step and reading a large checkpoint may take so many seconds, or so many times
# the limit of anything else if that is longer.
STARTING_SECONDS = 7200.0
STARTING_TIMES = 4

_STDERR = 2
# If the watchdog's own thread did not run for so long, the whole process was stopped.
_STOOD_STILL_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class _Phase:
    """What the process is doing, since when, and what it may wait for."""

    name: str
    since: float
    compiles: bool
    waits_for_others: bool

    def limit(self, seconds: float) -> float:
        """Return how long it may last if ordinary work may last `seconds`."""
        if self.compiles:
            return _longest(seconds)
        return 1.25 * seconds if self.waits_for_others else seconds


def _longest(seconds: float) -> float:
    return max(STARTING_SECONDS, STARTING_TIMES * seconds)


_current: _Phase | None = None


def progress(phase: str, *, compiles: bool = False, waits_for_others: bool = False) -> None:
    """Report to the watchdog that the last phase has ended; takes a microsecond.

    Args:
      phase: Name of the next phase, such as `reading the batch of step 7`.
      compiles: Whether it may last longer: `STARTING_SECONDS`, or `STARTING_TIMES` the limit.
      waits_for_others: Whether it may wait for another process. It then lasts a bit longer, so that
        the process that keeps all waiting reports first.
    """
    global _current
    if _current is not None:
        _current = _Phase(phase, time.monotonic(), compiles, waits_for_others)


@contextlib.contextmanager
def watched(seconds: float | None, *, process: str, log: Callable[[], Path]) -> Iterator[None]:
    """End the process with `HUNG_EXIT_CODE` if nothing calls `progress` for long in the block.

    The time before the first call is the start of a job, and may compile.

    Args:
      seconds: Longest duration of a phase; None for no limit.
      process: Name of this process, for messages.
      log: Returns the file to which the stacks of all threads are appended.
    """
    global _current
    if seconds is None:
        yield
        return
    _current = _Phase("starting", time.monotonic(), compiles=True, waits_for_others=True)
    ended = threading.Event()
    arguments = (seconds, ended, process, log)
    thread = threading.Thread(target=_watch, args=arguments, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _current = None
        ended.set()
        thread.join()


def _watch(seconds: float, ended: threading.Event, process: str, log: Callable[[], Path]) -> None:
    global _current
    pause = min(10.0, seconds / 10)
    looked = time.monotonic()
    try:
        while not ended.wait(pause):
            looked, before = time.monotonic(), looked
            # Compiled code may hold Python's lock, and then this thread stands still as well; this
            # call sets a timer that needs no lock, and ends the process with exit code 1.
            faulthandler.dump_traceback_later(
                _longest(seconds) + pause + 60, exit=True, file=_STDERR
            )
            phase = _current
            if phase is not None and looked - before > pause + _STOOD_STILL_SECONDS:
                _current = dataclasses.replace(phase, since=looked)  # Ctrl-Z, and back
            elif phase is not None and time.monotonic() - phase.since > phase.limit(seconds):
                _end(phase, process, log)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end(phase: _Phase, process: str, log: Callable[[], Path]) -> None:
    lasted = time.monotonic() - phase.since
    hung = f"hung: {phase.name} has taken {lasted:.0f} s"
    say(
        f"runner: {process} {hung}, and nothing else was done. The same command resumes from the"
        " newest checkpoint; --hung_step_timeout_secs sets how long to wait."
    )
    tell(hung)
    written: list[Path] = []

    def write() -> None:
        path = log()
        with io.TextIOWrapper(open_append(path), encoding="utf-8") as file:
            names = ", ".join(f"0x{t.ident or 0:016x} is {t.name}" for t in threading.enumerate())
            file.write(f"{process} {hung}; its threads stand here; of the threads, {names}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        written.append(path)

    # The disk of the log may be what hangs.
    if finished_within(SECONDS_TO_WRITE, write):
        say(f"runner: {written[0]} says where each of its threads stands.")
    else:
        finished_within(SECONDS_TO_WRITE, lambda: faulthandler.dump_traceback(_STDERR))
        say("runner: where its threads stand is above, since its log cannot be written.")
    end(HUNG_EXIT_CODE)
