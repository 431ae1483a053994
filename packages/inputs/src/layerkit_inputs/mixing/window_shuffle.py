"""WindowShuffle, which shuffles the rows of a stream, for readers without random access.

A window of batches is read at a time, and its rows are delivered in random order. Unlike the rows
of a shuffle buffer, all rows of a window have been delivered after a known number of batches. So
the state consists of the state of the source before the window, the number of the window and the
number of delivered batches. It is exact, and a few bytes larger than that of the source. Resuming
reads one window again.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.state import Scope
from layerkit_inputs.mixing.components import build_components, check_configs, concatenate_rows
from layerkit_inputs.mixing.composite_input import CompositeInput


class WindowShuffle(CompositeInput):
    """An input that shuffles the rows of `source` within windows while training.

    Outside of training it returns the batches of `source` unchanged. Each host shuffles its own
    stream, so a state can be restored only on the host with the same index, among the same number
    of hosts. Readers of rows by number have their own fields `shuffle` and `shuffle_window`,
    without this restriction.
    """

    state_scope: ClassVar[Scope] = "host"

    source: Config | None = sub_config_field(None)
    """Config of the reader. It is built with the batch size, host index and kind of pass of this
    input."""
    window_batches: int = 16
    """Number of batches of a window, which is kept in memory."""

    def __post_init__(self) -> None:
        """Check the fields and build the source."""
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
                "cannot restore",
                field="window_batches",
                value=self.window_batches,
                expected=f"{position['window_batches']}, as in the state",
                hint="Restore with the same fields, or start a new run from the weights alone.",
            )
        self._source.set_state(position["source"])
        self._begin_at(position["window"])
        if position["num_done"]:
            self._before = position["source"]
            self._rows = self._shuffled_window()
            self._num_done = position["num_done"]
