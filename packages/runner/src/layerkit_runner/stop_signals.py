"""Ctrl-C and SIGTERM: finish the step, save, leave.

The first signal only sets a flag, which the loop looks at between steps. A second Ctrl-C leaves at
once, without saving.
"""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Callable
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Catches signals while it is entered; `received` says which came first.

    Args:
      report: Takes a line for the person who sent the signal.
    """

    def __init__(self, report: Callable[[str], None]):
        self._report = report
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
        """What a shell expects of a process that ended by the signal."""
        return 0 if self.received is None else 128 + self.received

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            # Not sys.exit: threads that write checkpoints would keep the interpreter alive.
            os._exit(128 + number)
        if self.received is None:
            self.received = signal.Signals(number)
            again = "; once more leaves at once" if number == signal.SIGINT else ""
            self._report(f"{self.received.name}: finishing this step, saving, leaving{again}")
