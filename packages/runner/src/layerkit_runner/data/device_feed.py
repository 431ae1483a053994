"""DeviceFeed: the next batches are on the devices before the step that reads them.

Batches that the input has ready are sent while a step runs, so that no step waits for a transfer.
At most `depth` of them wait on the devices, and the position that the feed tells is that of the
batches it gave out: one that only waits is read again after a restore.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

from layerkit.nested_map import NestedMap
from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.data.batch_checks import check_batch
from layerkit_runner.data.infeed import as_usage_error
from layerkit_runner.distributed.stop_signals import StopRequestedError
from layerkit_runner.partitioning import Partitioner

_POLL_SECONDS = 0.002


class DeviceFeed:
    """Global batches of an endless input, one after the other.

    Args:
      source: Read by nobody else from the first `take` on.
      partitioner: Started.
      depth: Batches that may wait on the devices.
      clock: Seconds.
    """

    def __init__(
        self,
        source: Prefetch,
        partitioner: Partitioner,
        *,
        depth: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._source = source
        self._partitioner = partitioner
        self._depth = depth
        self._clock = clock
        self._waiting: collections.deque[tuple[NestedMap, dict[str, Any]]] = collections.deque()
        self._state: dict[str, Any] | None = None

    def take(
        self,
        is_idle: Callable[[], bool],
        *,
        gives_up: Callable[[], bool] = lambda: False,
        may_take: Callable[[], bool] = lambda: True,
    ) -> tuple[NestedMap, float]:
        """Return the next global batch.

        Args:
          is_idle: Whether the devices have nothing left to do.
          gives_up: Whether to stop waiting for a batch.
          may_take: Asked once the batch is there; whether it is to be given out.

        Returns:
          (batch, seconds that the devices stood still for want of it).

        Raises:
          StopRequestedError: No batch was given out; the next call gives out the same one.
          UsageError: The data cannot be read.
        """
        idle_seconds = 0.0
        if not self._waiting:
            idle_seconds = self._wait(is_idle, gives_up)
            self._send_next()
        if not may_take():
            raise StopRequestedError
        batch, self._state = self._waiting.popleft()
        return batch, idle_seconds

    def peek(self) -> NestedMap:
        """The global batch that `take` gives next; reading goes on as if nobody had looked.

        Raises:
          UsageError: the data cannot be read.
        """
        if not self._waiting:
            self._send_next()
        return self._waiting[0][0]

    def fill(self) -> None:
        """Sends the batches that are ready, as far as there is room; waits for none."""
        while len(self._waiting) < self._depth and self._source.num_ready:
            self._send_next()

    def state(self) -> dict[str, Any]:
        """Where the input stands after the batches that were given out."""
        return self._source.get_state() if self._state is None else self._state

    def _send_next(self) -> None:
        if self._state is None:
            self._state = self._source.get_state()
        with as_usage_error():
            batch = check_batch(self._source, self._source.get_next())
        self._waiting.append((self._partitioner.put_batch(batch), self._source.get_state()))

    def _wait(self, is_idle: Callable[[], bool], gives_up: Callable[[], bool]) -> float:
        """Wait until the source has a batch; return how long the devices stood still meanwhile."""
        idle_since, timeout = None, 0.0
        while not self._source.wait(timeout):
            if idle_since is None and is_idle():
                idle_since = self._clock()
            if gives_up():
                raise StopRequestedError
            timeout = _POLL_SECONDS
        return 0.0 if idle_since is None else self._clock() - idle_since
