"""Reads of an input that a signal to stop can cut short.

An input may wait for storage for ever, inside compiled code where nothing interrupts it. It is
therefore read on a thread, and the main thread watches for signals.
"""

from __future__ import annotations

import concurrent.futures
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from layerkit_runner.distributed.stop_signals import StopRequestedError, active_signals

# After a signal, an evaluation waits so long for its next batch.
_SECONDS_FOR_INPUT = 5.0
_POLL_SECONDS = 0.1

T = TypeVar("T")


def read(act: Callable[[], T]) -> T:
    """Return what `act` returns, or give it up if it does not answer after a signal to stop.

    In a job of several processes `act` is called directly: the others may wait for this one inside
    of it, and would not know that it was given up.

    Args:
      act: Reads something. All calls of it come from the same thread.

    Raises:
      StopRequestedError: A signal came, and `act` took some seconds more.
    """
    signals = active_signals()
    if signals is None or jax.process_count() > 1:
        return act()
    future = _reader().submit(act)
    since: float | None = None
    while not concurrent.futures.wait([future], _POLL_SECONDS).done:
        if signals.gives_up_evaluation:
            since = since or time.monotonic()
            if time.monotonic() - since > _SECONDS_FOR_INPUT:
                raise StopRequestedError
    return future.result()


class _Reader:
    """A daemon thread that makes the calls it is given, one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="eval-input", daemon=True).start()

    def submit(self, act: Callable[[], T]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._calls.put((act, future))
        return future

    def _run(self) -> None:
        while True:
            act, future = self._calls.get()
            try:
                future.set_result(act())
            except BaseException as error:  # raised where the result is wanted
                future.set_exception(error)
            del act, future  # they may hold large arrays


@functools.cache
def _reader() -> _Reader:
    return _Reader()
