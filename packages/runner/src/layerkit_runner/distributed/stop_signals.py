"""Signals: Ctrl-C, SIGTERM and SIGHUP finish the step, save and exit; SIGUSR1 saves and continues.

The loop reads the flag of a signal between steps and while it waits for its input. A second Ctrl-C
exits at once, without saving. The report at the end runs inside `StopSignals.leaving_at_once`.

Processes that train together act on a signal to any of them after the same step. A process that
learns of a signal starts no further step and publishes the last step that it has started. When all
have published, all act after the newest of these, since a step that one process has started ends
only when all start it. The exchange uses JAX's coordinator and no device.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from layerkit_runner.distributed.cluster import gather_values
from layerkit_runner.distributed.watchdog import forced_exit, print_error, progress

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAVE_SIGNAL = signal.SIGUSR1
_SIGNALS = (*_STOP_SIGNALS, _SAVE_SIGNAL)

# Intervals and keys of the agreement on the last step.
_POLL_SECONDS = 1.0
_WAIT_SECONDS = 0.05
_SECONDS_TO_CLOSE = 5.0
_KEY = "layerkit_runner/stop"
_runs = itertools.count()
# Step of a process that has left the loop of steps, after which all ignore a signal.
_FINISHED = 2**62

_active: StopSignals | None = None


def _forget_in_child() -> None:
    global _active
    if _active is not None:
        _active.forget_in_child()
        _active = None


os.register_at_fork(after_in_child=_forget_in_child)


class StopRequestedError(Exception):
    """Work that was canceled because of a signal; completed steps can be saved."""


class StopSignals:
    """A context manager that handles the signals, entered on the main thread.

    Attributes:
      received: First signal to stop; None if none was received.
      saves: True if all processes save now, as `agreed` found; the caller sets it to False.
      save_received: True if a signal to save was received that the processes have not agreed on.
      ends_process: True if the process belongs to the run, which may end it at once.
    """

    ends_process: ClassVar[bool] = True

    def __init__(
        self,
        *,
        leaving: str = "finishing this step, saving, leaving",
        saving: str = "saving after this step",
    ) -> None:
        """Store the texts of the messages; see the class for the arguments."""
        self._leaving = leaving
        self._saving = saving
        self._stop = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self._agreed: signal.Signals | None = None
        self.saves = False
        self._num_repeated = 0
        self._at_once: str | None = None
        self._agreement: StopAgreement | None = None
        # Signal to stop that `_take_requests` has not returned; 0 for none.
        self._unmet = 0
        self._terminals: list[int] = []
        self.received: signal.Signals | None = None
        self.save_received = False

    def __enter__(self) -> StopSignals:
        """Handle the signals, on a thread."""
        # Python runs a handler in the main thread, which may be in compiled code for minutes. The C
        # handler writes to this pipe at once, and a thread reads it.
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # set by `nohup`
            self._previous[number] = signal.signal(number, lambda *_: None)
        global _active
        _active = self
        self._watcher = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Restore the previous handlers."""
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

    def agree_by(self, store: Any, process: int, num_processes: int) -> None:
        """Agree with the other processes of a training job on the step for each signal."""
        take = self._take_requests
        self._agreement = StopAgreement(store, process, num_processes, take, run=next(_runs))

    def agreed(self, step: int) -> bool:
        """Return whether all processes stop after `step` steps; must be called after each step."""
        if self._agreement is None:
            return self._meet(self._take_requests())
        return self._meet(self._agreement.reached(step + self._num_repeated))

    def agreed_now(self) -> bool:
        """Return whether all processes stop now; all must call this at the same place."""
        requests = gather_values(self._take_requests())
        return self._meet(Requests(*map(max, zip(*requests, strict=True))))

    def _meet(self, requests: Requests | None) -> bool:
        if requests is not None and requests.stop:
            self._agreed = signal.Signals(requests.stop)
        self.saves |= requests is not None and requests.saves
        return self._agreed is not None

    def gives_up_waiting(self) -> bool:
        """Return whether to cancel the wait for the next batch, and to call `agreed` again."""
        if self._agreement is None:
            return self.received is not None
        return self._agreement.is_open

    def may_start(self, step: int) -> bool:
        """Return whether to start a step; if not, the caller must call `agreed` again."""
        return self._agreement is None or self._agreement.may_start(step + self._num_repeated)

    def go_back(self, num_steps: int) -> None:
        """Continue from an earlier step, as all processes do.

        They agree on the number of started steps, so that a signal is not met by a later step.
        """
        self._num_repeated += num_steps

    def finish(self) -> bool:
        """Leave the loop of steps; return False if a signal requires a call of `agreed` first."""
        return self._agreement is None or self._agreement.finish()

    def _take_requests(self) -> Requests:
        """Return the requests of signals since the last call."""
        stop, self._unmet = self._unmet, 0
        saves, self.save_received = self.save_received, False
        return Requests(stop=stop, saves=saves)

    @contextlib.contextmanager
    def leaving_at_once(self, what: str) -> Iterator[None]:
        """End the process at once on a signal to stop inside the block, or on a pending one."""
        self._at_once = what
        if self.received is not None:
            print_error(f"\n{self.received.name}: leaving at once; {what}")
            self._leave(self.received)
        try:
            yield
        finally:
            self._at_once = None

    def request_stop(self, number: signal.Signals) -> None:
        """Stop as if the signal had been received first."""
        self.received, self._unmet = number, int(number)
        self._stop.set()

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until this process receives a signal to stop."""
        self._stop.wait(seconds)

    @property
    def exit_code(self) -> int:
        """Exit code of a process that stopped for a signal; 0 if none was agreed on."""
        return 0 if self._agreed is None else 128 + self._agreed

    def forget_in_child(self) -> None:
        """Restore the handlers in a forked child, whose signals would reach its parent.

        SIGTERM, which a parent sends to its workers, ends the child. Ctrl-C and a closed terminal
        do not, since the job may need its data to save.
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
                    print_error(f"\n{_SAVE_SIGNAL.name}: {self._saving}")

    def _note(self, number: signal.Signals) -> None:
        if self.received is not None and number == signal.SIGINT:
            # Not sys.exit: threads that write checkpoints would keep the interpreter alive.
            os._exit(128 + number)
        if number == signal.SIGHUP:
            # Printing to a closed terminal would raise errors.
            for terminal in self._terminals:
                if not os.isatty(terminal):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, terminal)
                    os.close(nowhere)
        if self.received is None:
            self.request_stop(number)
            if (what := self._at_once) is not None:
                print_error(f"\n{number.name}: leaving at once; {what}")
                # On a thread, so that a second Ctrl-C is still handled.
                threading.Thread(target=self._leave, args=(number,), name="leaving").start()
                return
            again = "; press Ctrl-C again to exit at once" if number == signal.SIGINT else ""
            print_error(f"\n{number.name}: {self._leaving}{again}")

    def _leave(self, number: signal.Signals) -> None:
        forced_exit(128 + number, f"stopped by {number.name}")


class Interrupts(StopSignals):
    """A handler of Ctrl-C for a run inside another program, such as a notebook.

    The first Ctrl-C finishes the step and saves. A second one, or one during work that is not
    saved, raises KeyboardInterrupt. Outside of the main thread it handles nothing.
    """

    ends_process: ClassVar[bool] = False

    def __enter__(self) -> Interrupts:
        """Handle Ctrl-C, unless the process ignores it."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exception: Any) -> None:
        """Restore the previous handler."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def leaving_at_once(self, what: str) -> Iterator[None]:
        """Raise KeyboardInterrupt on Ctrl-C inside the block, or on a pending one."""
        if self.received is not None:
            raise KeyboardInterrupt(what)
        self._at_once = what
        try:
            yield
        finally:
            self._at_once = None

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.received is not None or self._at_once is not None:
            raise KeyboardInterrupt(self._at_once or "interrupted again")
        self.request_stop(signal.Signals(number))
        with contextlib.suppress(RuntimeError):  # A print was interrupted.
            print("interrupted: " + self._leaving, file=sys.stderr, flush=True)


class Requests(NamedTuple):
    """Requests of signals to the processes: the number of the one to stop, or 0; and to save."""

    stop: int = 0
    saves: bool = False


class StopAgreement:
    """The agreement between processes on the step after which they act on requests.

    In each round, every process stores the newest step that it has started, and the requests to it.
    The first that does so starts the round for the others. `take_requests` returns and clears the
    requests to this process. `run` numbers its runs, whose answers stay in the store.
    """

    def __init__(
        self,
        store: Any,
        process: int,
        num_processes: int,
        take_requests: Callable[[], Requests],
        *,
        run: int,
    ) -> None:
        """Start the thread that watches for requests; see the class for the arguments."""
        self._store = store
        self._process = process
        self._num_processes = num_processes
        self._take_requests = take_requests
        self._lock = threading.Lock()
        self._run, self._round = run, 0
        self._started = 0
        # Requests of this round to this process; None before the round starts.
        self._requests: Requests | None = None
        self._is_published = False
        self._decision: tuple[int, Requests] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-agreement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching for requests."""
        self._ended.set()
        self._thread.join(_SECONDS_TO_CLOSE)

    @property
    def is_open(self) -> bool:
        """True if there is a request whose step is not decided yet."""
        return self._requests is not None and self._decision is None

    def may_start(self, step: int) -> bool:
        """Return whether this process may start a step; if not, call `reached`."""
        with self._lock:
            if self.is_open or (self._decision is not None and step > self._decision[0]):
                return False
            self._started = step
            return True

    def reached(self, step: int) -> Requests | None:
        """Return the requests that all processes meet after `step`, or None.

        `step` is the newest step that this process has started. The call waits for the other
        processes while a request is open.
        """
        with self._lock:
            if self._requests is None:
                return None
            self._publish()
        if self._decision is None:
            progress("agreeing with the other processes on the last step", waits_for_others=True)
            while len(answers := self._published()) < self._num_processes:
                time.sleep(_WAIT_SECONDS)
            started, *merged = map(max, zip(*answers, strict=True))
            self._decision = started, Requests(*merged)
        last, requests = self._decision
        if step < last:
            return None
        with self._lock:
            self._round += 1
            self._is_published = False
            self._requests = self._decision = None
        return requests

    def finish(self) -> bool:
        """Leave the loop of steps; return False if a request must be met first."""
        with self._lock:
            is_over = self._decision is not None and self._decision[0] == _FINISHED
            if self._requests is not None and not is_over:
                return False
            self._started = _FINISHED
            return True

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            # The coordinator may answer the next time; if it is lost, the job ends.
            with contextlib.suppress(Exception):
                self._poll()

    def _poll(self) -> None:
        if self._requests is None:
            requests = self._take_requests()
            # Not asked with a request at hand, which an error would lose.
            if requests == Requests() and not self._published():
                return
            with self._lock:
                self._requests = requests
        with self._lock:
            self._publish()

    def _publish(self) -> None:
        if self._requests is not None and not self._is_published:
            answer = json.dumps([self._started, *self._requests])
            # A failed attempt may have stored the value.
            key = f"{_KEY}/{self._run}/{self._round}/{self._process}"
            self._store.key_value_set(key, answer, allow_overwrite=True)
            self._is_published = True

    def _published(self) -> list[Any]:
        answers = self._store.key_value_dir_get(f"{_KEY}/{self._run}/{self._round}/")
        return [json.loads(answer) for _, answer in answers]
