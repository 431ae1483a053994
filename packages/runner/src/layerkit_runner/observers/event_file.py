"""EventFile: one file of TensorBoard events, written by the thread that adds to it.

The writer of tensorboardX has a thread of its own. An error, such as a full disk, ends that thread,
and whoever adds an event then waits for it for ever. Here the error is the caller's.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

_FILE_VERSION = "brain.Event:2"


class EventFile:
    """Begins a new event file in a folder, which is made.

    Args:
      folder: On a disk, or on a store that tensorboardX knows.
      flush_secs: What is added reaches the file at least so often, if more is added.
      purge_step: Tells TensorBoard to hide what earlier files say of this step and later ones.

    Raises:
      OSError: the file cannot be written; so do the methods.
    """

    def __init__(self, folder: str, *, flush_secs: float, purge_step: int | None = None) -> None:
        # Up to a second, for it imports PyTorch where there is one.
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.record_writer import RecordWriter, directory_check

        directory_check(folder)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(os.path.join(folder, name))
        self._flush_secs = flush_secs
        self._next_flush = time.monotonic()  # at once, so that TensorBoard sees the run
        self._write(file_version=_FILE_VERSION)
        if purge_step is not None:
            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, summary: Any) -> None:
        """Adds what a function of `tensorboardX.summary` made."""
        self._write(step=step, summary=summary)
        if time.monotonic() >= self._next_flush:
            self.flush()

    def flush(self) -> None:
        """Writes out what is held back."""
        self._next_flush = time.monotonic() + self._flush_secs
        self._records.flush()

    def close(self) -> None:
        """Writes out what is held back, and closes the file even if that fails."""
        self._records.close()

    def _write(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
