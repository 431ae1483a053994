"""StreamMixture: rows of several inputs that have no row numbers, by weights.

Shares are kept at every position, as in `Mixture` (see `schedule`). The state holds the states of
the components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.evaluation import num_rows_of
from layerkit_inputs.base.state import Scope, check_same_data
from layerkit_inputs.mixing.components import (
    build_components,
    check_same_rows,
    merge_rows,
    renumber_provenance,
    slice_rows,
)
from layerkit_inputs.mixing.composite_input import CompositeInput
from layerkit_inputs.mixing.schedule import make_schedule


class _RowStream:
    """Rows of an input in order, with a state after any row."""

    def __init__(self, source: BaseInput):
        self._source = source
        self._batch: NestedMap | None = None
        self._before: dict[str, Any] = {}
        self._num_rows = 0
        self._num_used = 0

    def take(self, count: int) -> list[NestedMap]:
        """Return the next `count` rows, as slices of the batches that hold them."""
        parts = []
        while count:
            if self._batch is None:
                self._before = self._source.get_state()
                self._batch = self._source.get_next()
                self._num_rows, self._num_used = num_rows_of(self._batch), 0
            start = self._num_used
            stop = self._num_used = min(start + count, self._num_rows)
            parts.append(slice_rows(self._batch, start, stop))
            count -= stop - start
            if stop == self._num_rows:
                self._batch = None
        return parts

    def drop_batch(self) -> None:
        """Drop the unread rows of the current batch."""
        self._batch = None

    def state(self) -> dict[str, Any]:
        """Return the state of the source before the current batch, and how many rows were used."""
        if self._batch is None:
            return {"source": self._source.get_state(), "num_used": 0}
        return {"source": self._before, "num_used": self._num_used}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state; this reads the current batch again."""
        self._batch = None
        self._source.set_state(state["source"])
        if state["num_used"]:
            self.take(state["num_used"])


class StreamMixture(CompositeInput):
    """A mixture of single rows of inputs of any kind; each host mixes its own streams.

    A state fits the same host of the same number of hosts. For inputs with row numbers, `Mixture`
    is the better choice. A mixture has no end, so an evaluation reads `eval_loop_num_batches`
    batches. Example `n` of component `c` has `provenance` `n * components + c`.
    """

    state_scope: ClassVar[Scope] = "host"

    components: Mapping[str, Config[BaseInput]] | None = sub_config_field(None)
    """Configs of the inputs by name. They are built with the batch size, the host and the kind of
    pass of the mixture."""
    weights: Mapping[str, float] | None = None
    """Weight of each component, above 0, in any unit. None: equal weights."""

    def __post_init__(self) -> None:
        """Check that the mixture is endless, and build the components."""
        super().__post_init__()
        expected = "a number of batches, since a mixture of rows has no epoch"
        num_batches = self.eval_loop_num_batches
        require(self.endless, self._label, "eval_loop_num_batches", num_batches, expected)
        names = self.components or {}
        self._components = build_components(
            self,
            self.components,
            field="components",
            batch_sizes=dict.fromkeys(names, self.local_batch_size),
        )
        self._schedule = make_schedule(names, self.weights, self._label)
        self._streams = {name: _RowStream(reader) for name, reader in self._components.items()}
        self._are_alike = False
        self._turn = 0

    def shares(self) -> dict[str, float]:
        """Return the share of each component."""
        return self._schedule.shares()

    def _next(self) -> NestedMap:
        turns, _ = self._schedule.turns(self._turn + np.arange(self.local_batch_size))
        if not self._are_alike:
            batches = {name: reader.peek() for name, reader in self._components.items()}
            check_same_rows(self, batches, "components")
            self._are_alike = True
        parts: list[NestedMap] = []
        for index, stream in enumerate(self._streams.values()):
            if count := int(np.sum(turns == index)):
                taken = stream.take(count)
                parts += [renumber_provenance(rows, index, len(self._streams)) for rows in taken]
        self._turn += self.local_batch_size
        return merge_rows(parts, turns)

    def _reset(self) -> None:
        super()._reset()
        self._turn = 0
        for stream in self._streams.values():
            stream.drop_batch()

    def _reader_state(self) -> dict[str, Any]:
        streams = {name: stream.state() for name, stream in self._streams.items()}
        return {"turn": self._turn, "turns": self._schedule.identity(), "components": streams}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        now = {"turns": self._schedule.identity()}
        check_same_data(self._label, {"turns": position["turns"]}, now)
        for name, stream in self._streams.items():
            stream.set_state(position["components"][name])
        self._turn = position["turn"]
