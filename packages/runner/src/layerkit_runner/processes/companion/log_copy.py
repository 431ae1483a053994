"""What a process prints, line by line: into its log with the time, and on to where people read.

People read process 0. Of the others they see only what is written to the error stream and is no
mere notice; everything is in the logs.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import threading
from typing import BinaryIO

# As Python's logging and warnings, absl and XLA begin the lines of notices.
_NOTICE = re.compile(
    rb"(INFO|WARNING|DEBUG):|[IWV]\d{4} |\d{4}-\d\d-\d\d [\d:.]+: [IW] |.*:\d+: \w*Warning: "
)
_CONTINUED = b"  "
_CHUNK = 1 << 16


class LogCopy:
    """Copies the streams of a process.

    Args:
      log: The file, open for appending; None keeps no log.
    """

    def __init__(self, log: BinaryIO | None) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def follow(self, source: int, target: int | None, *, errors_only: bool = False) -> None:
        """Copies a descriptor to its end, on a thread: to the log and to `target` (None: nowhere).

        Args:
          source: The reading end of a pipe.
          target: A descriptor; where it can no longer be written, only the log goes on.
          errors_only: Whether notices stay in the log.
        """
        thread = threading.Thread(
            target=self._copy, args=(source, target, _NOTICE if errors_only else None)
        )
        thread.daemon = True
        thread.start()
        self._threads.append(thread)

    def note(self, text: str) -> None:
        """Writes a line of the companion's own into the log."""
        self._write_log(text.encode() + b"\n")

    def wait(self, seconds: float) -> None:
        """Waits until all streams have ended, at most so long."""
        for thread in self._threads:
            thread.join(seconds)

    def _copy(self, source: int, target: int | None, notice: re.Pattern[bytes] | None) -> None:
        unfinished, in_notice = b"", False
        while True:
            data = os.read(source, _CHUNK)
            *lines, unfinished = (unfinished + data).split(b"\n")
            if unfinished and not data:  # the process ended in the middle of a line
                lines, unfinished = [*lines, unfinished], b""
            for line in lines:
                self._write_log(line + b"\n")
                if notice is not None and not (in_notice and line.startswith(_CONTINUED)):
                    in_notice = notice.match(line) is not None
                if target is not None and not in_notice:
                    target = _pass_on(target, line + b"\n")
            if not data:
                return

    def _write_log(self, line: bytes) -> None:
        if self._log is None:
            return
        now = datetime.datetime.now().isoformat(sep=" ", timespec="milliseconds")
        # A full disk must not keep the process from printing.
        with self._lock, contextlib.suppress(OSError):
            self._log.write(now.encode() + b" " + line)
            self._log.flush()


def _pass_on(target: int, data: bytes) -> int | None:
    try:
        while data:
            data = data[os.write(target, data) :]
    except OSError:
        return None
    return target
