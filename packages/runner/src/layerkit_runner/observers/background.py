"""One thread for slow writing, so that the training loop never waits for a store."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable
from typing import Any


class Background:
    """Runs jobs one after another, in the order given, in a thread of its own.

    The failure of a job is raised by the next call here, in the thread of the caller.
    """

    def __init__(self) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._jobs: collections.deque[concurrent.futures.Future[Any]] = collections.deque()

    @property
    def is_idle(self) -> bool:
        """Whether every job has ended."""
        return all(job.done() for job in self._jobs)

    def submit(self, job: Callable[..., Any], *args: Any) -> None:
        """Appends `job(*args)` to the work, without waiting."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        self._jobs.append(self._executor.submit(job, *args))

    def close(self) -> None:
        """Waits for the work that is left; after a failure, drops it."""
        try:
            while self._jobs:
                self._jobs.popleft().result()
        finally:
            self._jobs.clear()
            self._executor.shutdown(cancel_futures=True)
