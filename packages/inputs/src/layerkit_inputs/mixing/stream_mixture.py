"""Mixtures of inputs that have no row numbers, by row (StreamMixture) or by batch (BatchMixture).

Shares are kept at every position, as in `Mixture` (see `schedule`). The state holds the states of
the components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.eval_padding import num_rows_of
from layerkit_inputs.base.state import Scope
from layerkit_inputs.mixing.components import (
    build_components,
    check_configs,
    check_same_rows,
    merge_rows,
    renumber_provenance,
    slice_rows,
)
from layerkit_inputs.mixing.composite_input import CompositeInput
from layerkit_inputs.mixing.schedule import make_schedule


class _WeightedInput(CompositeInput):
    """Base of mixtures of streams, with their fields and schedule."""

    components: Mapping[str, Config] | None = sub_config_field(None)
    """Configs of the inputs by name. They are built with the batch size, the host and the kind of
    pass of the mixture."""
    weights: Mapping[str, float] | None = None
    """Weight of each component, above 0, in any unit. None: equal weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        configs = check_configs(self, self.components, "components")
        self._schedule = make_schedule(configs, self.weights, self._label)
        self._components = build_components(
            self,
            configs,
            field="components",
            batch_sizes=dict.fromkeys(configs, self.local_batch_size),
        )
        self._turn = 0

    def shares(self) -> dict[str, float]:
        """Return the share of each component."""
        return self._schedule.shares()

    def _reset(self) -> None:
        super()._reset()
        self._turn = 0

    def _position(self) -> dict[str, Any]:
        return {"turn": self._turn, "turns": self._schedule.identity()}

    def _set_position(self, position: dict[str, Any]) -> None:
        now = self._schedule.identity()
        if position["turns"] != now:
            raise self._config_error(
                "state of another schedule",
                field="weights",
                value=position["turns"],
                expected=f"{now}",
                hint="Restore with the same weights, or start a new run from the weights of the "
                "model alone.",
            )
        self._turn = position["turn"]


class BatchMixture(_WeightedInput):
    """A mixture of whole batches: each batch is from one component, by weights or round-robin.

    All hosts read the same component at the same time. An epoch of evaluation reads each component
    to its end and skips components that have ended. Example `n` of component `c` has `provenance`
    `n * components + c`.
    """

    def _next(self) -> NestedMap:
        readers = list(self._components.values())
        ended: set[int] = set()
        while len(ended) < len(readers):
            (turn,), _ = self._schedule.turns(np.array([self._turn]))
            self._turn += 1
            try:
                batch = readers[turn].get_next()
            except StopIteration:
                ended.add(int(turn))
                continue
            return renumber_provenance(batch, int(turn), len(readers))
        raise StopIteration

    def _reader_state(self) -> dict[str, Any]:
        return {**self._position(), "components": self._component_states()}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        self._set_component_states(position["components"])
        self._set_position(position)

    @property
    def has_score_metrics(self) -> bool:
        """True if any component has score metrics."""
        return any(reader.has_score_metrics for reader in self._components.values())

    @property
    def has_prediction_metrics(self) -> bool:
        """True if any component has prediction metrics."""
        return any(reader.has_prediction_metrics for reader in self._components.values())

    def score_metrics(self, scores: Mapping[int, float]) -> dict[str, float]:
        """Return `component/metric` of each component, from the scores of its examples."""
        return self._metrics("score_metrics", scores)

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """Return `component/metric` of each component, from the predictions of its examples."""
        return self._metrics("prediction_metrics", predictions)

    def _metrics(self, which: str, outputs: Mapping[int, Any]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        count = len(self._components)
        for index, (name, reader) in enumerate(self._components.items()):
            if getattr(reader, f"has_{which}"):
                own = {n // count: value for n, value in outputs.items() if n % count == index}
                found = getattr(reader, which)(own)
                metrics |= {f"{name}/{metric}": value for metric, value in found.items()}
        return metrics


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


class StreamMixture(_WeightedInput):
    """A mixture of single rows of inputs of any kind; each host mixes its own streams.

    A state fits the same host of the same number of hosts. For inputs with row numbers, `Mixture`
    is the better choice. A mixture has no end, so an evaluation reads `eval_loop_num_batches`
    batches. Example `n` of component `c` has `provenance` `n * components + c`.
    """

    state_scope: ClassVar[Scope] = "host"

    def __post_init__(self) -> None:
        """Check that the mixture is endless, and create the streams of rows."""
        super().__post_init__()
        if not self.endless:
            raise self._config_error(
                "a mixture of rows has no epoch",
                field="eval_loop_num_batches",
                value=self.eval_loop_num_batches,
                expected="a number of batches, with reset_for_eval=None",
                hint="BatchMixture reads each component to its end.",
            )
        self._streams = {name: _RowStream(reader) for name, reader in self._components.items()}
        self._are_alike = False

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
        for stream in self._streams.values():
            stream.drop_batch()

    def _reader_state(self) -> dict[str, Any]:
        streams = {name: stream.state() for name, stream in self._streams.items()}
        return {**self._position(), "components": streams}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        states = position["components"]
        self._set_component_states({name: state["source"] for name, state in states.items()})
        for name, stream in self._streams.items():
            stream.set_state(states[name])
        self._set_position(position)
