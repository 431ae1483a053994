"""Copies of the output of a process, line by line: to its log with the time, and to the terminal.

The terminal shows all lines of process 0, and the lines of other processes on standard error that
are no notices. A separate thread opens and writes the log, so that the terminal shows lines even
while the disk does not answer.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

# First words of the notices of Python's logging and warnings, absl and XLA.
_NOTICE = re.compile(
    rb"(INFO|WARNING|DEBUG):|[IWV]\d{4} |\d{4}-\d\d-\d\d [\d:.]+: [IW] |.*:\d+: \w*Warning: "
)
_CONTINUED = b"  "
_CHUNK = 1 << 16
# Further lines are dropped while the disk is slow.
_MAX_WAITING_LINES = 100_000


class LogTee:
    """A tee of the output of a process to its log and to other descriptors.

    Args:
      open_log: Function that opens the log, unbuffered, for appending; or reports the error and
        returns None, for no log.
    """

    def __init__(self, open_log: Callable[[], BinaryIO | None]) -> None:
        """Start the thread that opens and writes the log."""
        self._lines: queue.Queue[bytes] = queue.Queue(_MAX_WAITING_LINES)
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._write_log, args=(open_log,), daemon=True).start()

    def follow(self, source: int, target: int | None, *, errors_only: bool = False) -> None:
        """Copy a descriptor until its end, on a thread, to the log and to `target`.

        Args:
          source: Reading end of a pipe.
          target: Descriptor, ignored once it cannot be written; None for the log only.
          errors_only: True to copy notices to the log only.
        """
        thread = threading.Thread(
            target=self._copy, args=(source, target, _NOTICE if errors_only else None)
        )
        thread.daemon = True
        thread.start()
        self._threads.append(thread)

    def note(self, text: str) -> None:
        """Write a line of the peer monitor to the log."""
        self._log(text.encode() + b"\n")

    def wait(self, seconds: float) -> None:
        """Wait for at most `seconds` until all streams have ended and the log is written."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        lines = self._lines
        with lines.all_tasks_done:
            left = max(0.0, deadline - time.monotonic())
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, left)

    def _copy(self, source: int, target: int | None, notice: re.Pattern[bytes] | None) -> None:
        unfinished, in_notice = b"", False
        while True:
            data = os.read(source, _CHUNK)
            *lines, unfinished = (unfinished + data).split(b"\n")
            if unfinished and not data:  # the process ended in the middle of a line
                lines, unfinished = [*lines, unfinished], b""
            for line in lines:
                self._log(line + b"\n")
                if notice is not None and not (in_notice and line.startswith(_CONTINUED)):
                    in_notice = notice.match(line) is not None
                if target is not None and not in_notice:
                    target = _write_all(target, line + b"\n")
            if not data:
                return

    def _log(self, line: bytes) -> None:
        now = datetime.datetime.now().isoformat(sep=" ", timespec="milliseconds")
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(now.encode() + b" " + line)

    def _write_log(self, open_log: Callable[[], BinaryIO | None]) -> None:
        log = open_log()
        while True:
            line = self._lines.get()
            # A full disk must not keep the process from printing.
            with contextlib.suppress(OSError):
                if log is not None:
                    log.write(line)
            self._lines.task_done()


def _write_all(target: int, data: bytes) -> int | None:
    try:
        while data:
            data = data[os.write(target, data) :]
    except OSError:
        return None
    return target
