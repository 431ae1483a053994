"""Mixture: rows of several indexed inputs by weights, in a fixed order, with one count as state.

The position in the stream determines the component (see `schedule`) and the row in the order of
that component's epochs. So any host finds the rows of any global batch, and a run can resume with
another number of hosts. Small components begin new epochs while large ones are in their first.

Components need row numbers. Streams are mixed by the library that reads
them: `grain.IterDataset.mix`, mixtures of SeqIO, `datasets.interleave_datasets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_choice, check_positive, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.mixing.components import (
    build_components,
    check_reads_rows,
    check_same_rows,
    merge_rows,
    num_rows_of,
)
from layerkit_inputs.mixing.composite_input import CompositeInput
from layerkit_inputs.mixing.schedule import MixingSchedule, Weight


class Mixture(IndexedInput, CompositeInput):
    """A mixture of rows of several `IndexedInput`s by weights.

        Mixture.HParams.config(
            is_training=True,
            percore_batch_size=8,
            components={"web": web, "books": books},  # configs
            weights={"web": 0.7, "books": 0.3},
        )

    After any number of rows each component has given its share of them, with an error below one
    row. A mixture has no end, so an evaluation reads `eval_loop_num_batches` batches. To evaluate
    on all rows, evaluate on each component separately. Row `n` of component `c` has `provenance`
    `n * components + c`.
    """

    components: Mapping[str, Config[BaseInput]] | None = sub_config_field(None)
    """Configs of the inputs by name. They are built with the batch size, the host and the kind of
    pass of the mixture. Each component shuffles by its own fields."""
    weights: Mapping[str, float] | None = None
    """Weight of each component, above 0, in any unit. None: equal weights."""
    weights_from: Mapping[int, Mapping[str, Weight]] | None = None
    """Weights by the first row of the mixture that they hold for, 0 for the first weights; they
    replace `weights`. A pair `[first, last]` changes linearly until the next weights. A component
    without weight has no rows there, and later goes on where it stopped."""

    def __post_init__(self) -> None:
        """Check the fields and build the components."""
        for field in ("shuffle", "shuffle_window"):
            value, expected = getattr(self, field), f"None; set {field} in the components"
            require(value is None, self._label, field, value, expected)
        super().__post_init__()
        self.shuffle = False
        expected = "a number of batches, since a mixture has no epoch"
        num_batches = self.eval_loop_num_batches
        require(self.endless, self._label, "eval_loop_num_batches", num_batches, expected)
        names = self.components or {}
        self._components = build_components(
            self,
            self.components,
            field="components",
            batch_sizes=dict.fromkeys(names, self.local_batch_size),
        )
        self._schedule = self._make_schedule([*names])
        for name, reader in self._components.items():
            check_reads_rows(self, f"components[{name!r}]", reader)
        self._readers = cast("list[IndexedInput]", [*self._components.values()])
        self._are_alike = False

    def _make_schedule(self, names: list[str]) -> MixingSchedule:
        pieces: Mapping[int, Mapping[str, Weight]] | None = self.weights_from
        if pieces is None:
            weights = dict.fromkeys(names, 1.0) if self.weights is None else self.weights
            expected = f"a weight of each of {names}"
            is_complete = weights.keys() == set(names)
            require(is_complete, self._label, "weights", dict(weights), expected)
            check_positive(self._label, **{f"weights[{n!r}]": weights[n] for n in names})
            pieces = {0: weights}
        expected = "weights from row 0 on, and from later ones"
        begins = sorted(pieces)
        require(begins[:1] == [0], self._label, "weights_from", begins, expected)
        for begin, piece in pieces.items():
            check_choice(self._label, names, **{f"weight at row {begin}": n for n in piece})
        # In the order of the components, whatever that of the weights.
        first = {name: pieces[0].get(name, 0) for name in names}
        return MixingSchedule(first, later_weights={n: pieces[n] for n in begins[1:]})

    def change_weights(self, weights_from: Mapping[int, Mapping[str, Weight]]) -> None:
        """Replace the field `weights_from`; the position stays."""
        self.weights_from = weights_from
        self._schedule = self._make_schedule([*self._components])

    def shares(self) -> dict[str, float]:
        """Return the share of each component in the rows, by the first weights."""
        return self._schedule.shares()

    def _num_rows(self) -> None:
        return None

    def _read_at(self, positions: np.ndarray, num_rows: int | None) -> tuple[NestedMap, np.ndarray]:
        if not self._are_alike:
            # Now, not at the first batch that holds both.
            check_same_rows(self, self._first_rows(), "components")
            self._are_alike = True
        turns, within = self._schedule.turns(positions)
        rows, parts = np.empty(len(positions), np.int64), []
        is_unreadable = np.zeros(len(positions), bool)
        for index, reader in enumerate(self._readers):
            places = np.flatnonzero(turns == index)
            if not len(places):
                continue
            part, numbers = reader._read_at(within[places], num_rows_of(reader))
            parts.append(part)
            # Row n of component c is row n * components + c of the mixture.
            rows[places] = numbers * len(self._readers) + index
            if len(reader._is_unreadable):
                is_unreadable[places] = reader._is_unreadable
        self._is_unreadable = is_unreadable
        return merge_rows(parts, turns), rows

    def _first_rows(self) -> dict[str, NestedMap]:
        readers = zip(self._schedule.names, self._readers, strict=True)
        first = np.zeros(1, np.int64)
        return {name: reader._read_at(first, num_rows_of(reader))[0] for name, reader in readers}

    def _identity(self) -> dict[str, Any]:
        # The schedule depends on the rows that are done, so it is no part of the fingerprint.
        identity = {**super()._identity(), **self._schedule.identity(self._rows_done)}
        for name, reader in zip(self._schedule.names, self._readers, strict=True):
            identity |= {f"{name}.{key}": value for key, value in reader._identity().items()}
        return identity
