"""Prefetch of global batches to the devices.

Batches that the input has ready are sent while a step runs, so that no step waits for a transfer.
The state of the feed is the position after the batches that it returned: a batch that waits on the
devices is read again after a restore.
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
    """A queue of global batches of an endless input on the devices.

    Args:
      source: Input, which nothing else reads after the first `take`.
      partitioner: Partitioner that has started.
      depth: Limit of batches that wait on the devices.
      clock: Function that returns seconds.
    """

    def __init__(
        self,
        source: Prefetch,
        partitioner: Partitioner,
        *,
        depth: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a feed that has read no batch."""
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
          is_idle: Function that returns whether the devices have no work left.
          gives_up: Function that returns whether to stop waiting for a batch.
          may_take: Function that is called once the batch is ready; whether to return it.

        Returns:
          (batch, seconds for which the devices were idle because they waited for it).

        Raises:
          StopRequestedError: No batch was returned; the next call returns the same one.
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
        """Return the global batch that `take` returns next, without consuming it.

        Raises:
          UsageError: The data cannot be read.
        """
        if not self._waiting:
            self._send_next()
        return self._waiting[0][0]

    def fill(self) -> None:
        """Send batches that are ready to the devices up to `depth`, without waiting."""
        while len(self._waiting) < self._depth and self._source.num_ready:
            self._send_next()

    def state(self) -> dict[str, Any]:
        """Return the state of the input after the batches that were returned."""
        return self._source.get_state() if self._state is None else self._state

    def _send_next(self) -> None:
        if self._state is None:
            self._state = self._source.get_state()
        with as_usage_error():
            batch = check_batch(self._source, self._source.get_next())
        self._waiting.append((self._partitioner.put_batch(batch), self._source.get_state()))

    def _wait(self, is_idle: Callable[[], bool], gives_up: Callable[[], bool]) -> float:
        """Wait until the source has a batch; return for how many seconds the devices were idle."""
        idle_since, timeout = None, 0.0
        while not self._source.wait(timeout):
            if idle_since is None and is_idle():
                idle_since = self._clock()
            if gives_up():
                raise StopRequestedError
            timeout = _POLL_SECONDS
        return 0.0 if idle_since is None else self._clock() - idle_since
