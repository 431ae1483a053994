"""Mixture: rows of several readers by weights, in a fixed order, with one count as its state.

Whose turn it is follows from the position in the stream (`schedule`), and so does which row
of that component, in the order of its own epochs. So any host finds the rows of any global batch,
and a run may go on with another number of hosts. Small components begin new epochs while large ones
are still in their first.

This is for readers of rows by number. `StreamMixture` is for all others, `BatchMixture` takes whole
batches of one component at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.indexed_input import IndexedInput
from layerkit_inputs.mixing.components import (
    build_components,
    check_alike,
    checked_configs,
    merge_rows,
    rows_between,
)
from layerkit_inputs.mixing.schedule import schedule_of

_BATCHES_AT_ONCE = 4
"""How many are read of components that have their rows in memory."""


class _Pieces(NamedTuple):
    """A batch that is read but not yet put together."""

    parts: list[NestedMap]
    """Rows of the first component, then of the second...; of none that has no turn."""
    turns: np.ndarray
    """int64 `[rows]`: the number of a component."""
    rows: np.ndarray
    """int64 `[rows]`: their numbers in the mixture."""


class Mixture(IndexedInput):
    """Rows of several `IndexedInput`s by weights.

        Mixture.HParams.config(
            is_training=True,
            percore_batch_size=8,
            components={"web": web, "books": books},  # configs
            weights={"web": 0.7, "books": 0.3},
        )

    After any number of rows each component has given its share of them, give or take less than one.
    A mixture has no end, so an evaluation reads `eval_loop_num_batches` batches; to evaluate on all
    rows, evaluate on each component by itself. `provenance` is row `n` of component `c` as
    `n * components + c`.
    """

    components: Mapping[str, Config] | None = sub_config_field(None)
    """Configs of the readers, by name. They are built with the batch size, the place among the
    hosts and the kind of pass of the mixture; each shuffles, or not, by its own fields."""
    weights: Mapping[str, float] | None = None
    """Of each component, above 0, in any unit. None: all alike."""

    def __post_init__(self) -> None:
        for field in ("shuffle", "shuffle_window"):
            if getattr(self, field) is not None:
                raise self._config_error(
                    f"{field}={getattr(self, field)!r}; a mixture keeps the order of its turns, "
                    f"set {field} on its components."
                )
        super().__post_init__()
        self.shuffle = False
        if not self.endless:
            raise self._config_error(
                "one epoch of a mixture is not defined; set eval_loop_num_batches, or evaluate on "
                "each component by itself."
            )
        configs = checked_configs(self.components, "components", self._config_error)
        self._schedule = schedule_of(configs, self.weights, self._config_error)
        built = build_components(
            self,
            configs,
            field="components",
            refuse=self._config_error,
            batch_sizes=dict.fromkeys(configs, self.local_batch_size),
        )
        self._readers = [self._checked(name, reader) for name, reader in built.items()]
        self._are_alike = False
        self._ahead: dict[int, _Pieces] = {}

    def _checked(self, name: str, reader: BaseInput) -> IndexedInput:
        kind = type(reader).__qualname__
        if not isinstance(reader, IndexedInput):
            raise self._config_error(
                f"components[{name!r}] is a {kind}, which has no rows by number; use StreamMixture."
            )
        if type(reader).get_next is not BaseInput.get_next:
            raise self._config_error(
                f"components[{name!r}]: {kind} overrides get_next, but a mixture reads single rows "
                "and would not call it; override _read_rows, or use StreamMixture."
            )
        return reader

    def shares(self) -> dict[str, float]:
        """The share of each component in the rows."""
        return self._schedule.shares()

    @property
    def token_unit(self) -> str:  # type: ignore[override]
        """That of the components."""
        return self._readers[0].token_unit

    # Rows of all components have one numbering: row n of component c is n * components + c.

    def _num_rows(self) -> None:
        return None

    def _rows_at(self, positions: np.ndarray, num_rows: int | None) -> np.ndarray:
        turns, within = self._schedule.turns(positions)
        rows = np.empty(len(positions), np.int64)
        for index, reader in enumerate(self._readers):
            here = turns == index
            if not here.any():
                continue
            own_rows = reader._num_rows()
            if own_rows == 0:
                raise reader._config_error("there are no rows to read.")
            rows[here] = reader._rows_at(within[here], own_rows) * len(self._readers) + index
        return rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        own_rows, turns = np.divmod(rows, len(self._readers))
        if not self._are_alike:
            self._check_components()
        parts = []
        for index, reader in enumerate(self._readers):
            here = turns == index
            if here.any():
                parts.append(reader._read_rows(own_rows[here]))
        return merge_rows(parts, turns)

    def _read_positions(self, positions: np.ndarray, num_rows: int | None) -> NestedMap:
        if not all(reader.rows_in_memory for reader in self._readers):
            return super()._read_positions(positions, num_rows)
        first = int(positions[0])
        if first not in self._ahead:
            self._ahead = self._read_batches_from(first)
        parts, turns, rows = self._ahead.pop(first)
        return self._finished(merge_rows(parts, turns), rows)

    def _read_batches_from(self, first: int) -> dict[int, _Pieces]:
        """The next batches by their first positions; one read of all costs less than one of each.

        Nothing but positions decides what they hold, so they are right whatever happens between.
        """
        if not self._are_alike:
            self._check_components()
        firsts = first + np.arange(_BATCHES_AT_ONCE) * self.global_batch_size
        size = self.local_batch_size
        rows = self._rows_at((firsts[:, None] + np.arange(size)).reshape(-1), None)
        own_rows, turns = np.divmod(rows, len(self._readers))
        parts: list[list[NestedMap]] = [[] for _ in firsts]
        for index, reader in enumerate(self._readers):
            places = np.flatnonzero(turns == index)
            if not len(places):
                continue
            read = reader._read_rows(own_rows[places])
            ends = places.searchsorted(np.arange(len(firsts) + 1) * size).tolist()
            for batch, (start, stop) in zip(parts, itertools.pairwise(ends), strict=True):
                if start < stop:
                    batch.append(rows_between(read, start, stop))
        batches = zip(parts, turns.reshape(-1, size), rows.reshape(-1, size), strict=True)
        return {at: _Pieces(*batch) for at, batch in zip(firsts.tolist(), batches, strict=True)}

    def _check_components(self) -> None:
        """Compares a row of each, so that unlike ones are known at once and not when they meet."""
        first_row = np.zeros(1, np.int64)
        names = self._schedule.names
        rows = {
            name: reader._read_rows(first_row)
            for name, reader in zip(names, self._readers, strict=True)
        }
        check_alike(rows, "components", self._config_error)
        self._are_alike = True

    def _fingerprint(self) -> dict[str, Any]:
        identity: dict[str, Any] = {"turns": self._schedule.identity()}
        for name, reader in zip(self._schedule.names, self._readers, strict=True):
            identity |= {f"{name}.{key}": value for key, value in reader._identity().items()}
        return identity

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return that of the first component; all have one vocabulary."""
        return self._readers[0].text_tokenizer(key)

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """As the first component does; all have one vocabulary."""
        return self._readers[0].ids_to_strings(ids, lengths, key)

    @property
    def num_skipped(self) -> int:
        """Records that components could not read and left out."""
        return sum(reader.num_skipped for reader in self._readers)

    def _close(self) -> None:
        self._ahead = {}
        for reader in self._readers:
            reader.close()
