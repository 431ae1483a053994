"""The watchdog: ends a job that no longer makes progress, and says what it was doing.

A reader that never returns, a collective that one device never enters, a store that does not
answer: the process lives, and nothing moves. Whatever makes progress says so by `progress`, in
passing; a thread looks at the time of the last word.

There is one of it in a process, as there is one of what it ends.
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

# Of a process that ends itself because nothing moved: sysexits.h's "internal software error".
HUNG_EXIT_CODE = 70

# Compiling a large step takes long, and so does reading a large checkpoint: at least so many
# seconds, and so many times what anything else may take.
STARTING_SECONDS = 7200.0
STARTING_TIMES = 4

_STDERR = 2
# This thread itself did not run for so long: the whole process was stopped.
_STOOD_STILL_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class _Word:
    """What is being done, since when, and what it may wait for."""

    phase: str
    since: float
    compiles: bool
    waits_for_others: bool

    def limit(self, seconds: float) -> float:
        """For how long it may last where ordinary work may last `seconds`."""
        if self.compiles:
            return _longest(seconds)
        return 1.25 * seconds if self.waits_for_others else seconds


def _longest(seconds: float) -> float:
    return max(STARTING_SECONDS, STARTING_TIMES * seconds)


_last_word: _Word | None = None


def progress(phase: str, *, compiles: bool = False, waits_for_others: bool = False) -> None:
    """Tells the watchdog that something was done, and what is done next. Costs a microsecond.

    Args:
      phase: What is done next, such as `reading the batch of step 7`.
      compiles: Whether that may take longer: `STARTING_SECONDS`, or `STARTING_TIMES` as long.
      waits_for_others: Whether it may wait for another process. That one speaks first then, since
        it knows what keeps all waiting.
    """
    global _last_word
    if _last_word is not None:
        _last_word = _Word(phase, time.monotonic(), compiles, waits_for_others)


@contextlib.contextmanager
def watched(
    seconds: float | None,
    *,
    process: str,
    log: Callable[[], Path],
) -> Iterator[None]:
    """Ends the process, with `HUNG_EXIT_CODE`, if nothing says `progress` for long inside.

    What comes before the first word is the start of a job, and may compile.

    Args:
      seconds: How long one thing may take; None for ever.
      process: How this process is named to people.
      log: Where to append the stacks of all threads.
    """
    global _last_word
    if seconds is None:
        yield
        return
    _last_word = _Word("starting", time.monotonic(), compiles=True, waits_for_others=True)
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(seconds, ended, process, log), daemon=True)
    thread.name = "watchdog"
    thread.start()
    try:
        yield
    finally:
        _last_word = None
        ended.set()
        thread.join()


def _watch(
    seconds: float,
    ended: threading.Event,
    process: str,
    log: Callable[[], Path],
) -> None:
    global _last_word
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
            word = _last_word
            if word is not None and looked - before > pause + _STOOD_STILL_SECONDS:
                _last_word = dataclasses.replace(word, since=looked)  # Ctrl-Z, and back
            elif word is not None and time.monotonic() - word.since > word.limit(seconds):
                _end(word, process, log)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end(word: _Word, process: str, log: Callable[[], Path]) -> None:
    lasted = time.monotonic() - word.since
    hung = f"hung: {word.phase} has taken {lasted:.0f} s"
    say(
        f"runner: {process} {hung}, and nothing else was done. The same command resumes from the"
        " newest checkpoint; --hung_step_timeout_secs sets how long to wait."
    )
    tell(hung)
    written: list[Path] = []

    def write() -> None:
        path = log()
        _write_stacks(path, f"{process} {hung}; its threads stand here")
        written.append(path)

    # What hangs may be the disk of the log.
    if finished_within(SECONDS_TO_WRITE, write):
        say(f"runner: {written[0]} says where each of its threads stands.")
    else:
        finished_within(SECONDS_TO_WRITE, lambda: faulthandler.dump_traceback(_STDERR))
        say("runner: where its threads stand is above, since its log cannot be written.")
    end(HUNG_EXIT_CODE)


def _write_stacks(path: Path, title: str) -> None:
    with io.TextIOWrapper(open_append(path), encoding="utf-8") as file:
        names = ", ".join(f"0x{t.ident or 0:016x} is {t.name}" for t in threading.enumerate())
        file.write(f"{title}; of the threads, {names}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
