"""Ctrl-C and SIGTERM: finish the step, save, leave.

The first signal only sets a flag, which the loop looks at between steps. A second Ctrl-C leaves at
once, without saving.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import types
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Catches signals while it is entered, on the main thread.

    Attributes:
      received: The signal that came first; None if none came.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that ended by the signal; 0 if none came."""
        return 0 if self.received is None else 128 + self.received

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            # Not sys.exit: threads that write checkpoints would keep the interpreter alive.
            os._exit(128 + number)
        if self.received is None:
            self.received = signal.Signals(number)
            again = "; once more leaves at once" if number == signal.SIGINT else ""
            _tell(f"\n{self.received.name}: finishing this step, saving, leaving{again}\n")


def _tell(text: str) -> None:
    """Writes past Python's streams, which cannot be entered twice if the signal came in a print."""
    with contextlib.suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
