"""Loss of other processes of the job, found by the coordinator that JAX runs in process 0.

A process that fails writes its exit code and the reason to the coordinator's key-value store, where
a thread of every other process waits for them. A process that ends without a reason is found by
JAX's heartbeats, which C++ threads send. So a long compilation, or code that holds Python's lock,
is no loss. Each process then prints one sentence and ends, also if its main thread is in compiled
code. It ends with the code of the failed process, so that a launcher restarts no lasting error.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import threading
import time
from typing import Any

import jax

from layerkit_runner.distributed.watchdog import Identity, exit_now, finished_within, print_error

# Exit code of a process that ends because another was killed: sysexits.h's "try again".
LOST_PROCESS_EXIT_CODE = 75

HEARTBEAT_SECONDS = 20

_FAILED = "layerkit_runner/failed"
_EXCHANGE_MS = 60_000
_WAIT_MS = 3_600_000
_POLL_SECONDS = 1.0
_ANSWER_MS = 2_000
# Delay before the others report a failed process. Often all fail for the same reason, and each
# should first report its own error.
_SECONDS_TO_REPORT = 3.0
# Process 0 ends this much later, since JAX aborts the others as soon as the coordinator ends.
_SECONDS_TO_LEARN = 5.0
_SECONDS_TO_LEAVE = 10.0
_MAX_TEXT = 1000


class Peers:
    """The other processes of the job, watched by threads of this process."""

    def __init__(self, client: Any, identity: Identity) -> None:
        """Introduce this process to the others through JAX's client, and start the threads."""
        self._client = client
        self._identity = identity
        self._everyone = list(range(identity.num_processes))
        self._is_over = threading.Event()
        self._ends = threading.Lock()
        self._answers = threading.Condition()
        self._num_answers = 0
        self._loss: str | None = None
        self._exit_code = LOST_PROCESS_EXIT_CODE
        self._is_leaving = False
        client.key_value_set(self._key("process", identity.process), str(identity))
        self._coordinator = self._name(0, _EXCHANGE_MS)
        if identity.process != 0:
            self._name_coordinator_at_abort()
        watches = (self._watch_failures, self._watch_heartbeats)
        self._threads = [threading.Thread(target=one, name="peers", daemon=True) for one in watches]
        for thread in self._threads:
            thread.start()

    def leave(self, exit_code: int, reason: str) -> None:
        """Report the reason of this process's end, unless it is empty, before it exits.

        The others end with `exit_code`, but with 75 for 0, since they may be in the end report.
        """
        if reason:
            self._is_leaving = True
            # The callers end the sentence.
            text = f"{self._identity} failed: {reason[:_MAX_TEXT].removesuffix('.')}"
            code = exit_code or LOST_PROCESS_EXIT_CODE
            record = json.dumps([self._identity.process, code, text])
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
                self._client.key_value_set(_FAILED, record)
        if self._identity.process == 0:
            time.sleep(_SECONDS_TO_LEARN)

    def confirm_all_alive(self) -> None:
        """Wait until all processes have answered; if one is lost, a thread ends this process."""
        with self._answers:
            expected = self._num_answers + 2  # the next answer may be about an earlier time
            self._answers.wait_for(lambda: self._num_answers >= expected, 2 * HEARTBEAT_SECONDS)
        with self._ends:  # held by the thread that ends this process
            pass

    def close(self) -> None:
        """Wait until all processes have completed, and disconnect; process 0 is the last one."""
        self._client.key_value_set(self._key("done", self._identity.process), "")
        self._client.wait_at_barrier("layerkit_runner/end", 24 * _WAIT_MS)
        self._is_over.set()
        if self._identity.process == 0:
            finished_within(_SECONDS_TO_LEAVE, self._wait_for_last)
        jax.distributed.shutdown()  # ends the calls of the threads
        # A call that returned while the interpreter ends would abort the process.
        for thread in self._threads:
            thread.join(_SECONDS_TO_LEAVE)
        ctypes.CDLL(None).signal(signal.SIGABRT, int(signal.SIG_DFL))

    def _wait_for_last(self) -> None:
        while len(self._client.get_live_nodes(self._everyone)) > 1:
            time.sleep(_POLL_SECONDS / 10)

    def _watch_failures(self) -> None:
        while not self._is_over.is_set():
            try:
                record = self._client.blocking_key_value_get(_FAILED, _WAIT_MS)
            except jax.errors.JaxRuntimeError:  # none has failed until now
                time.sleep(_POLL_SECONDS)
                continue
            process, exit_code, text = json.loads(record)
            if process != self._identity.process:
                self._loss, self._exit_code = text, exit_code
                time.sleep(_SECONDS_TO_REPORT)
                self._end()
            return

    def _watch_heartbeats(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            try:
                # Waits for the same call of every process that sends heartbeats.
                missing = {*self._everyone} - self._client.get_live_nodes(self._everyone).keys()
                for key, _ in self._client.key_value_dir_get(self._key("done", "")):
                    missing.discard(int(key.rpartition("/")[2]))
                if missing:
                    process = min(missing)
                    self._loss = _lost(process, self._name(process, _ANSWER_MS))
                    self._end()
            except jax.errors.JaxRuntimeError:  # JAX aborts if it is the coordinator that is lost
                continue
            with self._answers:
                self._num_answers += 1
                self._answers.notify_all()

    def _name_coordinator_at_abort(self) -> None:
        """Name process 0 when JAX aborts this process, from C++, since the coordinator is lost."""

        def abort(_: int) -> None:
            # If the coordinator answers, the abort has another cause and continues.
            if not self._is_over.is_set() and not finished_within(
                _ANSWER_MS / 1000, lambda: self._client.key_value_try_get(self._key("process", 0))
            ):
                self._loss = self._loss or _lost(0, self._coordinator)
                self._end()

        # Python's handlers run in the main thread, which may be in compiled code.
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(abort)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._handler)

    def _end(self) -> None:
        with self._ends:
            if self._is_leaving:
                return  # with the reason of its own
            print_error(
                f"runner: {self._loss}. Every step needs all processes, so process"
                f" {self._identity.process} ends as well; the same command in every process"
                " resumes from the newest checkpoint."
            )
            exit_now(self._exit_code)

    def _name(self, process: int, wait_ms: int) -> str:
        try:
            name: str = self._client.blocking_key_value_get(self._key("process", process), wait_ms)
        except jax.errors.JaxRuntimeError:  # it was lost before it introduced itself
            name = f"process {process} of {self._identity.num_processes}"
        return name

    @staticmethod
    def _key(name: str, process: int | str) -> str:
        return f"layerkit_runner/{name}/{process}"


def _lost(process: int, name: str) -> str:
    return (
        f"{name} is lost: it sent no heartbeat for {HEARTBEAT_SECONDS} s, or its coordinator"
        " closed. It was killed or suspended, ran out of memory, or its machine or network failed;"
        f" logs/process_{process:04d}.log may have the reason"
    )
