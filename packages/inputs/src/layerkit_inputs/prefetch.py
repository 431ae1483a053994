"""Prefetch: the next batches are made on a thread while the device works on this one.

The state it tells is that of the batches it *delivered*: each batch travels with the state that the
source had after making it, so what waits in the queue is made again after a restore. The thread is
a daemon that holds no reference to its owner: dropping the input, closing it or leaving the
interpreter stops it, and none of them waits for a source that hangs.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput, exit_as_error
from layerkit_inputs.state import Scope

_EXIT_SECONDS = 1.0
_CLOSE_SECONDS = 5.0


class _Worker:
    """A thread that reads ahead until the source ends, fails, or is no longer wanted."""

    def __init__(self, source: BaseInput, depth: int):
        self._source = source
        self._depth = depth
        self._ready: collections.deque[tuple[NestedMap, dict[str, Any]]] = collections.deque()
        self._end: BaseException | None = None
        self._is_stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="layerkit-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._wait_for_room():
            try:
                item = (self._source.get_next(), self._source.get_state())
            except BaseException as error:  # a thread that ends in silence would hang `take`
                with self._changed:
                    self._end = exit_as_error(self._source, error)
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
        """The next batch and the state after it; raises what the source raised."""
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
        """How many batches are made."""
        with self._changed:
            return len(self._ready)

    def wait(self, timeout: float) -> bool:
        """Whether `take` would return or raise at once, after at most `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(self._can_take, timeout)

    def _can_take(self) -> bool:
        return bool(self._ready) or self._end is not None

    def stop(self, timeout: float | None) -> bool:
        """Ends the thread; whether it was out of the source after at most `timeout` seconds."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        # The collector may finalize the owner on this very thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()


class Prefetch(BaseInput):
    """An input that reads `source` ahead on a thread; batches and states are those of `source`.

    The fields of BaseInput are taken from `source`, which nobody else may read meanwhile.
    """

    source: BaseInput
    """What to read."""
    depth: int = 2
    """Batches kept ready."""

    def __post_init__(self) -> None:
        self._check_at_least(1, "depth")
        for field in dataclasses.fields(BaseInput):
            given, derived = getattr(self, field.name), getattr(self.source, field.name)
            if given not in (field.default, derived):
                raise self._config_error(
                    f"{field.name}={given!r}, but source.{field.name}={derived!r}; set it on the "
                    "source alone."
                )
            setattr(self, field.name, derived)
        super().__post_init__()
        self._worker: _Worker | None = None
        self._stop_at_exit: weakref.finalize | None = None
        self._position: dict[str, Any] = {}

    @property
    def token_unit(self) -> str:  # type: ignore[override]
        """That of `source`."""
        return self.source.token_unit

    @property
    def state_scope(self) -> Scope:  # type: ignore[override]
        """That of `source`, whose states these are."""
        return self.source.state_scope

    def _check_fields(self) -> None:
        """The source has checked its fields."""

    def _settle_passes(self) -> None:
        """The source has settled them."""

    def get_next(self) -> NestedMap:
        """The next batch of `source`; waits until it is made, raises what making it raised."""
        batch, self._position = self._started().take()
        return batch

    @property
    def num_ready(self) -> int:
        """How many batches `get_next` would return without waiting."""
        waiting = 0 if self._worker is None else self._worker.num_ready
        return waiting + (self._peeked is not None)

    def wait(self, timeout: float) -> bool:
        """Whether `get_next` would answer at once, after at most `timeout` seconds.

        The answer may be the end of the data, or what making the next batch raised.
        """
        return self._peeked is not None or self._started().wait(timeout)

    def _started(self) -> _Worker:
        if self._worker is None:
            self._position = self.source.get_state()
            self._worker = _Worker(self.source, self.depth)
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
        # A source that hangs inside get_next is left to end with the process.
        if self._stop(_CLOSE_SECONDS):
            self.source.close()

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return that of `source`."""
        return self.source.text_tokenizer(key)

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """As `source` does."""
        return self.source.ids_to_strings(ids, lengths, key)

    def baselines(self) -> dict[str, float]:
        """Those of `source`."""
        return self.source.baselines()

    @property
    def num_skipped(self) -> int:
        """Those of `source`, which is read ahead."""
        return self.source.num_skipped

    @property
    def has_score_metrics(self) -> bool:
        """As `source` has."""
        return self.source.has_score_metrics

    @property
    def has_prediction_metrics(self) -> bool:
        """As `source` has."""
        return self.source.has_prediction_metrics

    def score_metrics(self, scores: Mapping[int, float]) -> dict[str, float]:
        """Those of `source`."""
        return self.source.score_metrics(scores)

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """Those of `source`."""
        return self.source.prediction_metrics(predictions)
