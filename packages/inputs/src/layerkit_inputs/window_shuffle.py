"""WindowShuffle: the rows of a stream in random order, for readers that cannot jump.

A stream is read a window of batches at a time, and the rows of the window are delivered in random
order. Unlike the usual shuffle buffer, of which each row stays for a random while, a window is over
at a known moment. So the state is the source's before the window, the number of the window and how
much of it is done: a few bytes more than the source's, and exact. Going on reads one window again.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.nested_map import NestedMap
from layerkit_inputs.mixing.components import build_components, check_configs, concatenate_rows
from layerkit_inputs.mixing.composite_input import CompositeInput
from layerkit_inputs.state import Scope


class WindowShuffle(CompositeInput):
    """Batches of `source` while training, their rows shuffled within windows; else as they are.

    Each host shuffles its own stream, so a state fits the same host of as many hosts. Readers of
    rows by number have `shuffle` and `shuffle_window` of their own, without these bounds.
    """

    state_scope: ClassVar[Scope] = "host"

    source: Config | None = sub_config_field(None)
    """Config of the reader. It is built with the batch size, the place among the hosts and the kind
    of pass given here."""
    window_batches: int = 16
    """Batches of a window, which is kept in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_at_least(1, "window_batches")
        self._components = build_components(
            self,
            check_configs(self, {"source": self.source}, ""),
            field="",
            batch_sizes={"source": self.local_batch_size},
        )
        self._source = self._components["source"]
        self._begin_at(0)

    def _begin_at(self, window: int) -> None:
        self._window = window
        self._num_done = 0
        self._rows: NestedMap | None = None
        self._before: dict[str, Any] | None = None

    def _next(self) -> NestedMap:
        if not self.is_training:
            return self._source.get_next()
        if self._rows is not None and self._num_done == self.window_batches:
            self._begin_at(self._window + 1)
        if self._rows is None:
            self._before = self._source.get_state()
            self._rows = self._shuffled_window()
        start = self._num_done * self.local_batch_size
        self._num_done += 1
        stop = start + self.local_batch_size
        return self._rows.transform(lambda array: array[start:stop].copy())

    def _shuffled_window(self) -> NestedMap:
        batches = [self._source.get_next() for _ in range(self.window_batches)]
        key = np.array([self.input_random_seed or 0, self._window], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        order = generator.permutation(self.window_batches * self.local_batch_size)
        return concatenate_rows(batches).transform(lambda array: array[order])

    def _reset(self) -> None:
        super()._reset()
        self._begin_at(0)

    def _reader_state(self) -> dict[str, Any]:
        before = self._source.get_state() if self._before is None else self._before
        return {
            "source": before,
            "window_batches": self.window_batches,
            "window": self._window,
            "num_done": self._num_done,
        }

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        if position["window_batches"] != self.window_batches:
            raise self._config_error(
                f"the state was written with window_batches={position['window_batches']}, here "
                f"window_batches={self.window_batches}; restore with the fields it was written "
                "with, or start a new run from the weights alone."
            )
        self._source.set_state(position["source"])
        self._begin_at(position["window"])
        if position["num_done"]:
            self._before = position["source"]
            self._rows = self._shuffled_window()
            self._num_done = position["num_done"]
