"""Prefetch, an input that makes the next batches of another input on a thread.

Its state is that of the *delivered* batches. Each batch is queued with the state of the source
after it, so batches in the queue are made again after a restore. The thread is a daemon without a
reference to its owner. Deleting the input, closing it or exiting the interpreter stops the thread,
and none of them waits for a source that hangs.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput

_EXIT_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_METHODS_OF_SOURCE = (
    "baselines", "describe_data", "ids_to_strings", "prediction_metrics", "score_metrics",
    "special_ids", "text_tokenizer",
)  # fmt: skip


class _Worker:
    """A thread that reads ahead until the source ends or fails, or until it is stopped."""

    def __init__(self, source: BaseInput, depth: int, check: Callable[[NestedMap], object] | None):
        self._source = source
        self._depth = depth
        self._check = check
        self._ready: collections.deque[tuple[NestedMap, dict[str, Any]]] = collections.deque()
        self._end: BaseException | None = None
        self._is_stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="layerkit-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._wait_for_room():
            try:
                batch = self._source.get_next()
                if self._check is not None:
                    self._check(batch)
                item = (batch, self._source.get_state())
            except BaseException as error:  # Without it, `take` would wait forever.
                end = error
                if isinstance(error, SystemExit | GeneratorExit):  # would end the program
                    end = RuntimeError(f"{self._source._label}: reading a batch raised {error!r}.")
                    end.__cause__ = error
                with self._changed:
                    self._end = end
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(item)
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or len(self._ready) < self._depth)
            return not self._is_stopped

    def take(self) -> tuple[NestedMap, dict[str, Any]]:
        """Return the next batch and the state after it, or raise the error of the source."""
        with self._changed:
            self._changed.wait_for(self._can_take)
            if not self._ready:
                assert self._end is not None
                raise self._end
            item = self._ready.popleft()
            self._changed.notify_all()
            return item

    @property
    def num_ready(self) -> int:
        """Number of batches in the queue."""
        return len(self._ready)

    def wait(self, timeout: float) -> bool:
        """Wait until `take` would not block, at most `timeout` seconds; return whether it is so."""
        with self._changed:
            return self._changed.wait_for(self._can_take, timeout)

    def _can_take(self) -> bool:
        return bool(self._ready) or self._end is not None

    def stop(self, timeout: float | None) -> bool:
        """Stop the thread; return whether it has ended after at most `timeout` seconds."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        # The garbage collector may finalize the owner on this thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()


def _of_source(name: str) -> Any:
    """Return a property with the value of `source`."""
    return property(lambda self: getattr(self.source, name))


class Prefetch(BaseInput):
    """An input that reads `source` ahead on a thread and returns its batches and states.

    The fields of BaseInput are those of `source`. No other code may read `source`.
    """

    source: BaseInput
    """Input to read."""
    depth: int = 2
    """Maximum number of batches in the queue."""
    check: Callable[[NestedMap], object] | None = None
    """Function that is called with each batch on the thread. `get_next` raises its errors."""

    def __post_init__(self) -> None:
        """Check the fields and copy those of `source`."""
        self._check_at_least(1, "depth")
        label = self._label
        for field in dataclasses.fields(BaseInput):
            value, read = getattr(self, field.name), getattr(self.source, field.name)
            is_same = value in (field.default, read)
            require(is_same, label, field.name, value, f"{read!r}, as in the source")
            setattr(self, field.name, read)
        for name in _METHODS_OF_SOURCE:
            setattr(self, name, getattr(self.source, name))
        super().__post_init__()
        self._worker: _Worker | None = None
        self._stop_at_exit: weakref.finalize | None = None
        self._position: dict[str, Any] = {}

    token_unit = _of_source("token_unit")
    state_scope = _of_source("state_scope")
    num_skipped = _of_source("num_skipped")  # including records of queued batches
    has_score_metrics = _of_source("has_score_metrics")
    has_prediction_metrics = _of_source("has_prediction_metrics")

    def _check_fields(self) -> None:
        """Do nothing, since the source has checked its fields."""

    def _resolve_passes(self) -> None:
        """Do nothing, since the source has resolved them."""

    def get_next(self) -> NestedMap:
        """Wait for the next batch of `source` and return it, or raise the error of `source`."""
        batch, self._position = self._started().take()
        return batch

    @property
    def num_ready(self) -> int:
        """Number of batches that `get_next` would return without waiting."""
        waiting = 0 if self._worker is None else self._worker.num_ready
        return waiting + (self._peeked is not None)

    def wait(self, timeout: float) -> bool:
        """Wait until `get_next` would not block, and return whether it is so.

        The next call may return a batch, or raise StopIteration or the error of the source.

        Args:
          timeout: Maximum time to wait, in seconds.
        """
        return self._peeked is not None or self._started().wait(timeout)

    def _started(self) -> _Worker:
        if self._worker is None:
            self._position = self.source.get_state()
            self._worker = _Worker(self.source, self.depth, self.check)
            self._stop_at_exit = weakref.finalize(self, self._worker.stop, _EXIT_SECONDS)
        return self._worker

    def _stop(self, timeout: float | None) -> bool:
        if self._worker is None:
            return True
        assert self._stop_at_exit is not None
        self._stop_at_exit.detach()
        worker, self._worker = self._worker, None
        return worker.stop(timeout)

    def _envelope(self) -> dict[str, Any]:
        return self.source.get_state() if self._worker is None else self._position

    def _set_envelope(self, envelope: dict[str, Any]) -> None:
        self._stop(timeout=None)
        self.source.set_state(envelope)

    def _reset(self) -> None:
        self._stop(timeout=None)
        self.source.reset()

    def _close(self) -> None:
        # A source that hangs inside get_next is not closed.
        if self._stop(_CLOSE_SECONDS):
            self.source.close()
