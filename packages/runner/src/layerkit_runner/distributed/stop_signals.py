"""Ctrl-C, SIGTERM and SIGHUP: finish the step, save, leave. SIGUSR1: save, and continue.

The first signal only sets a flag, which the loop reads between steps and while it waits for its
input. A second Ctrl-C leaves at once, without saving. Where several processes train together, a
signal to any of them is one to all, at the same step (`stop_agreement.py`). Work that a signal may
cut off, such as the report at the end of training, is done inside `StopSignals.leaving_at_once`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from layerkit_runner.distributed.forced_exit import forced_exit, say
from layerkit_runner.distributed.process_exchange import KeyValueStore
from layerkit_runner.distributed.stop_agreement import Requests, StopAgreement

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAVE_SIGNAL = signal.SIGUSR1
_SIGNALS = (*_STOP_SIGNALS, _SAVE_SIGNAL)

_active: StopSignals | None = None


def active_signals() -> StopSignals | None:
    """Return the signals that this process catches at the moment; None if it catches none."""
    return _active


def _forget_in_child() -> None:
    global _active
    if _active is not None:
        _active.forget_in_child()
        _active = None


@functools.cache
def _register_at_fork() -> None:
    """Register once for the process, since there is no way to take it back."""
    os.register_at_fork(after_in_child=_forget_in_child)


class StopRequestedError(Exception):
    """The work under way was given up because of a signal; what was completed can be saved."""


class StopSignals:
    """Catches signals while it is entered, on the main thread.

    Args:
      leaving: What the job does once it is asked to stop, for the message.
      saving: What it does once it is asked to save.

    Attributes:
      received: The signal to stop that came first; None if none came.
      save_received: Whether a signal to save came that is not agreed on yet.
    """

    def __init__(
        self,
        *,
        leaving: str = "finishing this step, saving, leaving",
        saving: str = "saving after this step",
    ) -> None:
        self._leaving = leaving
        self._saving = saving
        self._stop = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self._agreed: signal.Signals | None = None
        self._save_agreed = False
        self._at_once: str | None = None
        self._agreement: StopAgreement | None = None
        self._is_taken = False
        self._terminals: list[int] = []
        self.received: signal.Signals | None = None
        self.save_received = False

    def __enter__(self) -> StopSignals:
        # Python runs a handler in the main thread, which may wait in compiled code for long. What
        # is written to this pipe comes from the C level, at once, and a thread reads it.
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # as `nohup` has it
            self._previous[number] = signal.signal(number, lambda *_: None)
        global _active
        _active = self
        _register_at_fork()
        self._watcher = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        global _active
        _active = None
        if self._agreement is not None:
            self._agreement.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._writer)
        self._watcher.join()
        os.close(self._reader)

    def agree_by(self, store: KeyValueStore, process: int, num_processes: int) -> None:
        """Agree with the other processes of a training job on the step for each signal.

        Args:
          store: Shared by the processes.
          process: Number of this process.
          num_processes: Number of processes.
        """
        self._agreement = StopAgreement(
            store,
            process,
            num_processes,
            take_requests=self._take_requests,
            has_requests=lambda: self.save_received or self._has_untaken_stop(),
        )

    def agreed(self, step: int) -> bool:
        """Whether all processes stop after `step` steps; to be asked between all steps."""
        if self._agreement is None:
            self._agreed = self.received
            self._save_agreed |= self._take_received_save()
        elif (requests := self._agreement.reached(step)) is not None:
            self._agreed = signal.Signals(requests.stop) if requests.stop else None
            self._save_agreed |= requests.saves
        return self._agreed is not None

    def agreed_now(self) -> bool:
        """Whether all processes stop now; all must ask, in the same order as all else they do."""
        if jax.process_count() == 1:
            return self.agreed(0)
        from jax.experimental import multihost_utils

        stop = 0 if self.received is None else int(self.received)
        latest = int(multihost_utils.process_allgather(np.int32(stop)).max())
        self._agreed = signal.Signals(latest) if latest else None
        return self._agreed is not None

    def gives_up_waiting(self) -> bool:
        """Whether to stop waiting for the input of the next step, and to ask `agreed` again."""
        if self._agreement is None:
            return self.received is not None
        return self._agreement.is_open

    def may_start(self, step: int) -> bool:
        """Whether to start a step whose batch is there; if not, `agreed` is to be asked again."""
        return self._agreement is None or self._agreement.may_start(step)

    def finish(self) -> bool:
        """Leave the loop of steps; returns False if a signal came, and `agreed` is to be asked."""
        return self._agreement is None or self._agreement.finish()

    @property
    def gives_up_evaluation(self) -> bool:
        """Whether an evaluation may end without its result, so that the process can leave."""
        return self.received is not None and self._at_once is None

    def _has_untaken_stop(self) -> bool:
        return self.received is not None and not self._is_taken

    def _take_requests(self) -> Requests:
        stop = 0
        if self.received is not None and not self._is_taken:
            stop, self._is_taken = int(self.received), True
        return Requests(stop=stop, saves=self._take_received_save())

    @contextlib.contextmanager
    def leaving_at_once(self, what: str) -> Iterator[None]:
        """End the process on a signal to stop, while this is entered, without waiting for anything.

        It is for work that a signal may cut off at any point. A signal that came before and was not
        acted on ends the process, too.

        Args:
          what: What the process leaves out and what to do about it, for the message.
        """
        self._at_once = what
        if self.received is not None:
            say(f"\n{self.received.name}: leaving at once; {what}")
            self._leave(self.received)
        try:
            yield
        finally:
            self._at_once = None

    def wait(self, seconds: float) -> None:
        """Waits so long, and no longer once this process was asked to stop."""
        self._stop.wait(seconds)

    def take_save_request(self) -> bool:
        """Whether all processes save now, as `agreed` found; asked for again by another signal."""
        is_agreed, self._save_agreed = self._save_agreed, False
        return is_agreed

    def _take_received_save(self) -> bool:
        is_received, self.save_received = self.save_received, False
        return is_received

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that stopped for a signal; 0 if none was agreed on."""
        return 0 if self._agreed is None else 128 + self._agreed

    def forget_in_child(self) -> None:
        """Undo what a forked child inherits, whose signals would be taken for this process's.

        The child ends on SIGTERM, by which a parent ends its workers. It outlives Ctrl-C and a
        closed terminal, which reach all processes at once, since the job may need its data to save.
        """
        signal.set_wakeup_fd(-1)
        os.close(self._writer)
        os.close(self._reader)
        for number in {signal.SIGTERM, _SAVE_SIGNAL} & self._previous.keys():
            signal.signal(number, self._previous[number])

    def _watch(self) -> None:
        while numbers := os.read(self._reader, 64):
            for number in numbers:
                if number in _STOP_SIGNALS:
                    self._note(signal.Signals(number))
                elif number == _SAVE_SIGNAL:
                    self.save_received = True
                    say(f"\n{_SAVE_SIGNAL.name}: {self._saving}")

    def _note(self, number: signal.Signals) -> None:
        if self.received is not None and number == signal.SIGINT:
            # Not sys.exit: threads that write checkpoints would keep the interpreter alive.
            os._exit(128 + number)
        if number == signal.SIGHUP:
            self._drop_lost_terminals()
        if self.received is None:
            self.received = number
            self._stop.set()
            if (what := self._at_once) is not None:
                say(f"\n{number.name}: leaving at once; {what}")
                # On a thread, so that a second Ctrl-C is still seen.
                threading.Thread(target=self._leave, args=(number,), name="leaving").start()
                return
            again = "; once more leaves at once" if number == signal.SIGINT else ""
            say(f"\n{number.name}: {self._leaving}{again}")

    def _drop_lost_terminals(self) -> None:
        """Let output go nowhere whose terminal was closed, where printing would be an error."""
        for number in self._terminals:
            if not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)

    def _leave(self, number: signal.Signals) -> None:
        forced_exit(128 + number, f"it was stopped by {number.name}")
