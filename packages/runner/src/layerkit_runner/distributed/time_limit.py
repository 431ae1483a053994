"""Work that may never end, such as a write to a disk that does not answer, with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable


def finished_within(seconds: float, act: Callable[[], object]) -> bool:
    """Call `act` on a daemon thread and wait for it.

    An exception of `act` is dropped; an `act` that must report its errors catches them itself.

    Args:
      seconds: How long to wait. Afterwards the thread is left to itself.
      act: What to do.

    Returns:
      Whether `act` returned in time, without an exception.
    """
    has_returned = threading.Event()

    def run() -> None:
        try:
            act()
        except Exception:
            return
        has_returned.set()

    thread = threading.Thread(target=run, name="time-limit", daemon=True)
    thread.start()
    thread.join(seconds)
    return has_returned.is_set()
