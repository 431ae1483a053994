"""NativeStream: batches of a traced generator, which are drained before the generator is deleted.

A finite native reader prefetches, and at its end it waits until the last batches are read, also in
its destructor, which then hangs. So a stream that was started is read to its end before it is
dropped. `reset` and `close` do so at once. A stream that is garbage collected is drained by a
thread, since garbage collection may run inside TensorFlow. Streams that are left at the exit of the
interpreter are drained then. An endless stream does not wait and needs no NativeStream.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

_abandoned: queue.SimpleQueue[NativeStream] = queue.SimpleQueue()
_running: set[NativeStream] = set()
_reader: threading.Thread | None = None


class NativeStream:
    """A callable that returns the next batch and that can be drained."""

    def __init__(self, read: Callable[[], Any], *, errors: Any, owner: object):
        """Create a stream that is drained when its owner is garbage collected.

        Args:
          read: Traced function that returns the next batch.
          errors: The module `tensorflow.errors`.
          owner: Object that reads the stream, held by a weak reference.
        """
        self._read = read
        self._errors = errors
        self._draining = threading.Lock()
        self._when_abandoned = weakref.finalize(owner, _abandoned.put, self)
        self._when_abandoned.atexit = False
        _start_reader()

    def __call__(self) -> Any:
        """Return the next batch; raise the errors of TensorFlow."""
        _running.add(self)
        try:
            return self._read()
        except self._errors.OpError:
            _running.discard(self)
            raise

    def drain(self) -> None:
        """Read the stream to its end, if it was started."""
        with self._draining:
            while self in _running:
                try:
                    self()
                except self._errors.OpError:
                    break
        self._when_abandoned.detach()


def _start_reader() -> None:
    global _reader
    if _reader is None:
        _reader = threading.Thread(target=_drain_abandoned, name="lingvo-drain", daemon=True)
        _reader.start()


def _drain_abandoned() -> None:
    while True:
        # A single expression, so that no variable keeps the stream while waiting for the next.
        _abandoned.get().drain()


@atexit.register
def _drain_running() -> None:
    for stream in list(_running):
        stream.drain()
