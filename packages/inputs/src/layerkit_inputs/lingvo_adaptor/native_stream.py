"""Batches of a traced generator, let go in the only way that does not hang.

A native reader with an end runs ahead of its consumer, and once it has met the end it waits for the
last batches to be taken: also in its destructor, where nobody takes them any more. So a stream that
was begun is read to its end before it is dropped. `reset` and `close` do that at once. The garbage
collector may come at any moment, inside TensorFlow too, so what it finds is read to the end by a
thread; and what is left when the interpreter exits is read to its end then. A stream without end
has no such wait, and is not for here.
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
    """A function that makes the next batch, and remembers whether it was called and has ended."""

    def __init__(self, read: Callable[[], Any], *, errors: Any, owner: object):
        """Makes a stream that is drained after its owner has gone.

        Args:
          read: A traced function.
          errors: The module `tensorflow.errors`.
          owner: Whoever reads; held weakly.
        """
        self._read = read
        self._errors = errors
        self._draining = threading.Lock()
        self._when_abandoned = weakref.finalize(owner, _abandoned.put, self)
        self._when_abandoned.atexit = False
        _start_reader()

    def __call__(self) -> Any:
        """The next batch; raises what TensorFlow raises."""
        _running.add(self)
        try:
            return self._read()
        except self._errors.OpError:
            _running.discard(self)
            raise

    def drain(self) -> None:
        """Reads on to the end, where it has begun."""
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
        # In a call of its own, so that no variable here keeps the stream while the next is awaited.
        _abandoned.get().drain()


@atexit.register
def _drain_running() -> None:
    for stream in list(_running):
        stream.drain()
