"""The step after which all processes of a training job act on a signal that any of them received.

A process that learns of a signal starts no further step and publishes the last step that it has
started. Once all have done so, the newest of these steps is the one after which all save, since
what a process has started ends only when all others start it, too. The exchange goes through the
key-value store of JAX's coordinator and so needs no device: a process can take part in it while it
waits for its input or for the other processes.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from layerkit_runner.distributed.process_exchange import KeyValueStore
from layerkit_runner.distributed.watchdog import progress

_POLL_SECONDS = 1.0
_WAIT_SECONDS = 0.05
_SECONDS_TO_CLOSE = 5.0
_KEY = "layerkit_runner/stop"
# What a process publishes that has left the loop of steps: a signal comes too late for all.
_FINISHED = 2**62


@dataclasses.dataclass(frozen=True)
class Requests:
    """What processes are asked for.

    Attributes:
      stop: Number of the signal to stop; 0 for none.
      saves: Whether to save and continue.
    """

    stop: int = 0
    saves: bool = False


class StopAgreement:
    """The agreement of this process with the others, from one request to the next.

    Args:
      store: Shared by all processes.
      process: Number of this process.
      num_processes: Number of processes.
      take_requests: Returns the requests that this process received since the last call.
      has_requests: Returns whether `take_requests` would return any.
    """

    def __init__(
        self,
        store: KeyValueStore,
        process: int,
        num_processes: int,
        *,
        take_requests: Callable[[], Requests],
        has_requests: Callable[[], bool],
    ) -> None:
        self._store = store
        self._process = process
        self._num_processes = num_processes
        self._take_requests = take_requests
        self._has_requests = has_requests
        self._lock = threading.Lock()
        self._round = 0
        # The last step that this process has started; None before its loop.
        self._started: int | None = None
        self._is_frozen = False
        # What this process publishes in this round, the same at each attempt.
        self._at: dict[str, Any] | None = None
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
        """Whether a request came whose step is not decided yet."""
        return self._is_frozen and self._decision is None

    def may_start(self, step: int) -> bool:
        """Whether this process may start a step; if not, `reached` tells what to do instead."""
        with self._lock:
            if self._is_frozen and (self._decision is None or step > self._decision[0]):
                return False
            self._started = step
            return True

    def reached(self, step: int) -> Requests | None:
        """Return what all processes do after this step, or None if they do nothing.

        Waits for the other processes while a request is open. To be called between steps.

        Args:
          step: The last step that this process has started.
        """
        with self._lock:
            if self._started is None:
                self._started = step
            if not self._is_frozen:
                return None
            self._publish()
        if self._decision is None:
            self._decision = self._wait()
        last, requests = self._decision
        if step < last:
            return None
        with self._lock:
            self._round += 1
            self._is_frozen = self._is_published = False
            self._at = self._decision = None
        return requests

    def finish(self) -> bool:
        """Leave the loop of steps; returns False if a request came that is to be met first."""
        with self._lock:
            is_over = self._decision is not None and self._decision[0] == _FINISHED
            if self._is_frozen and not is_over:
                return False
            self._started = _FINISHED
            return True

    def _wait(self) -> tuple[int, Requests]:
        progress("agreeing with the other processes on the last step", waits_for_others=True)
        while len(found := self._list("at")) < self._num_processes:
            time.sleep(_WAIT_SECONDS)
        last = max(each["started"] for each in found)
        stop = max(each["stop"] for each in found)
        return last, Requests(stop=stop, saves=any(each["saves"] for each in found))

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            try:
                self._look()
            except Exception:
                # The coordinator may answer next time; where it is gone, the job ends.
                continue

    def _look(self) -> None:
        if self._is_frozen:
            with self._lock:
                self._publish()
            return
        is_own = self._has_requests()
        if is_own:
            self._set("request", {})
        if is_own or self._list("request"):
            with self._lock:
                self._is_frozen = True
                self._publish()

    def _publish(self) -> None:
        if self._is_published or not self._is_frozen or self._started is None:
            return
        if self._at is None:
            requests = dataclasses.asdict(self._take_requests())
            self._at = {"started": self._started, **requests}
        self._set("at", self._at)
        self._is_published = True

    def _set(self, name: str, value: Any) -> None:
        key = f"{_KEY}/{self._round}/{name}/{self._process}"
        # An attempt that failed may have stored it.
        self._store.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def _list(self, name: str) -> list[Any]:
        found = self._store.key_value_dir_get(f"{_KEY}/{self._round}/{name}/")
        return [json.loads(value) for _, value in found]
