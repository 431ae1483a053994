"""Mixtures of readers that are no more than a stream: by row, or a whole batch at a time.

The turns are dealt out as in `Mixture`: after any number of them each component has had its share,
give or take less than one. The state holds those of the components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import num_rows_of
from layerkit_inputs.mixing.components import (
    build_components,
    check_alike,
    checked_configs,
    merge_rows,
    number_apart,
    rows_between,
)
from layerkit_inputs.mixing.composite_input import CompositeInput
from layerkit_inputs.mixing.schedule import schedule_of
from layerkit_inputs.state import Scope


class _WeightedInput(CompositeInput):
    """Fields and turns that mixtures of streams share."""

    components: Mapping[str, Config] | None = sub_config_field(None)
    """Configs of the readers, by name. They are built with the batch size, the place among the
    hosts and the kind of pass of the mixture."""
    weights: Mapping[str, float] | None = None
    """Of each component, above 0, in any unit. None: all alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        configs = checked_configs(self.components, "components", self._config_error)
        self._schedule = schedule_of(configs, self.weights, self._config_error)
        self._components = build_components(
            self,
            configs,
            field="components",
            refuse=self._config_error,
            batch_sizes=dict.fromkeys(configs, self.local_batch_size),
        )
        self._turn = 0

    def shares(self) -> dict[str, float]:
        """The share of each component."""
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
                f"the state was written with turns {position['turns']}, here they are {now}; "
                "restore with the same weights, or start a new run from the weights of the model "
                "alone."
            )
        self._turn = position["turn"]


class BatchMixture(_WeightedInput):
    """Whole batches of one component at a time, in turns; without weights one after the other.

    All hosts read the same component at the same time. In an evaluation of one epoch, components
    that have come to their end are passed over, and it ends when all have: each is read whole.
    Example `n` of component `c` has `provenance` `n * components + c`.
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
            return number_apart(batch, int(turn), len(readers))
        raise StopIteration

    def _reader_state(self) -> dict[str, Any]:
        return {**self._position(), "components": self._component_states()}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        self._set_component_states(position["components"])
        self._set_position(position)

    @property
    def has_score_metrics(self) -> bool:
        """Whether some component has them."""
        return any(reader.has_score_metrics for reader in self._components.values())

    @property
    def has_prediction_metrics(self) -> bool:
        """Whether some component has them."""
        return any(reader.has_prediction_metrics for reader in self._components.values())

    def score_metrics(self, scores: Mapping[int, float]) -> dict[str, float]:
        """Those of each component on its own examples, as `component/metric`."""
        return self._metrics("score_metrics", scores)

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """Those of each component on its own examples, as `component/metric`."""
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
    """The rows of an input one after the other, with a state between any two of them."""

    def __init__(self, source: BaseInput):
        self._source = source
        self._batch: NestedMap | None = None
        self._before: dict[str, Any] = {}
        self._num_rows = 0
        self._num_used = 0

    def take(self, count: int) -> list[NestedMap]:
        """The next `count` rows, of as many batches as hold them."""
        parts = []
        while count:
            if self._batch is None:
                self._before = self._source.get_state()
                self._batch = self._source.get_next()
                self._num_rows, self._num_used = num_rows_of(self._batch), 0
            start = self._num_used
            stop = self._num_used = min(start + count, self._num_rows)
            parts.append(rows_between(self._batch, start, stop))
            count -= stop - start
            if stop == self._num_rows:
                self._batch = None
        return parts

    def forget(self) -> None:
        """Drops what is left of the batch in hand."""
        self._batch = None

    def state(self) -> dict[str, Any]:
        """The state of the source before the batch in hand, and how much of that is used."""
        if self._batch is None:
            return {"source": self._source.get_state(), "num_used": 0}
        return {"source": self._before, "num_used": self._num_used}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was called; reads the batch in hand again."""
        self._batch = None
        self._source.set_state(state["source"])
        if state["num_used"]:
            self.take(state["num_used"])


class StreamMixture(_WeightedInput):
    """Rows of several readers of any kind, dealt out by each host from its own streams.

    A state fits the same host of as many hosts. Readers of rows by number are better served by
    `Mixture`. A mixture has no end, so an evaluation reads `eval_loop_num_batches` batches. Example
    `n` of component `c` has `provenance` `n * components + c`.
    """

    state_scope: ClassVar[Scope] = "host"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.endless:
            raise self._config_error(
                "one epoch of a mixture of rows is not defined; set eval_loop_num_batches, or use "
                "BatchMixture, which reads each component to its end."
            )
        self._streams = {name: _RowStream(reader) for name, reader in self._components.items()}
        self._are_alike = False

    def _next(self) -> NestedMap:
        turns, _ = self._schedule.turns(self._turn + np.arange(self.local_batch_size))
        if not self._are_alike:
            batches = {name: reader.peek() for name, reader in self._components.items()}
            check_alike(batches, "components", self._config_error)
            self._are_alike = True
        parts: list[NestedMap] = []
        for index, stream in enumerate(self._streams.values()):
            if count := int(np.sum(turns == index)):
                taken = stream.take(count)
                parts += [number_apart(rows, index, len(self._streams)) for rows in taken]
        self._turn += self.local_batch_size
        return merge_rows(parts, turns)

    def _reset(self) -> None:
        super()._reset()
        for stream in self._streams.values():
            stream.forget()

    def _reader_state(self) -> dict[str, Any]:
        streams = {name: stream.state() for name, stream in self._streams.items()}
        return {**self._position(), "components": streams}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        states = position["components"]
        self._set_component_states({name: state["source"] for name, state in states.items()})
        for name, stream in self._streams.items():
            stream.set_state(states[name])
        self._set_position(position)
