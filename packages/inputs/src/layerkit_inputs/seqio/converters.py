"""Conversion of the examples of a task to rows of a batch.

An example has the features `inputs` and `targets`, or only `targets`. Examples of a language model
may also have `suffixes`. They follow the targets, and only they have a loss. Other features are
passed through, padded with zeros. This module decides which examples share a row. The module
`features` makes the arrays of rows, with the edge cases of SeqIO's converters.

Packing is first fit within a window of examples that fill about `window_rows` rows. A position
consists of the window's first example and the number of rows that were read from the window.
Restoring it reads the window again. SeqIO keeps one row open at a time and so pads more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.errors import BadRecords
from layerkit_inputs.base.evaluation import ROW_MARKS
from layerkit_inputs.packing.first_fit import plan_packing
from layerkit_inputs.packing.model_features import (
    NegativeIds,
    encoder_decoder_features,
    fill_rows,
    lm_features,
    prompt_features,
)
from layerkit_inputs.seqio.example_stream import ExampleSource, NumberedExample
from layerkit_inputs.seqio.shard_pipelines import Example

FeatureConverter = Literal["language_model", "prefix_lm", "encoder_decoder", "prompts"]
"""Format of a batch; see `SeqIOInput.feature_converter`."""

FirstToken = Literal["predicted", "given"]
"""Role of the first token of a row; see `SeqIOInput.first_token`."""


class RowFormat(NamedTuple):
    """Format of the rows of a batch."""

    converter: FeatureConverter
    lengths: Mapping[str, int]
    """Largest number of tokens of an example, by feature."""
    packed: bool
    weights_on_targets_only: bool
    bos_id: int
    negative_ids: NegativeIds = "no_weight"
    """Meaning of negative ids in rows of a language model."""
    first_token: FirstToken = "predicted"
    """Role of the first token of a row; see `SeqIOInput.first_token`."""

    @property
    def passed_through(self) -> list[str]:
        """Names of the features that are not tokens of the model. Packed rows cannot have any."""
        tokens = ("inputs", "targets", *(("suffixes",) if self.has_suffixes else ()))
        return [name for name in self.lengths if name not in tokens]

    @property
    def has_suffixes(self) -> bool:
        """True if `suffixes` follow the targets of a language model."""
        return "suffixes" in self.lengths and self.converter in ("language_model", "prefix_lm")

    @property
    def limits(self) -> tuple[int, ...]:
        """Size of each part of a row: its sides, then the features in `passed_through`.

        A row of an encoder-decoder has two sides, `src` and `tgt`. Other rows have one.
        """
        targets = self.lengths.get("targets", 0)
        targets += self.lengths["suffixes"] if self.has_suffixes else 0
        sides = self._sides(self.lengths.get("inputs", 0), targets)
        return (*sides, *(self.lengths[name] for name in self.passed_through))

    def sizes(self, example: Example) -> tuple[int, ...]:
        """Return the size that an example needs in each part of a row, in the order of `limits`."""
        targets = len(example.get("targets", ()))
        targets += len(example.get("suffixes", ())) if self.has_suffixes else 0
        sides = self._sides(len(example.get("inputs", ())), targets)
        return (*sides, *(len(example[name]) for name in self.passed_through))

    def _sides(self, inputs: int, targets: int) -> tuple[int, ...]:
        """Return the size of each side for the numbers of tokens of `inputs` and `targets`."""
        match self.converter:
            case "encoder_decoder":
                return inputs, targets
            case "prompts":
                return (inputs + 1,)
            case _:
                return (inputs + targets,)

    def batch(self, rows: Sequence[Sequence[Example]]) -> NestedMap:
        """Return arrays `[rows, ...]` of the examples in each row."""
        merged = rows
        if self.has_suffixes:
            merged = [[_append_suffix(example) for example in row] for row in rows]
        batch = self._batch_of_tokens(merged)
        if self.has_suffixes:
            batch.weights = batch.weights * self._counted(rows)
        if self.first_token == "given":
            _shift(batch)
        for name in self.passed_through:
            is_free = name not in (*batch, *ROW_MARKS)
            expected = "features with other names than the arrays of a batch"
            require(is_free, None, "task_feature_lengths", name, expected)
            values = np.concatenate([example[name] for row in rows for example in row])
            sizes = np.array([sum(len(example[name]) for example in row) for row in rows])
            valid = np.arange(self.lengths[name]) < sizes[:, None]
            batch[name] = fill_rows(values, valid, values.dtype)
        return batch

    def _counted(self, rows: Sequence[Sequence[Example]]) -> np.ndarray:
        """Return float32 `[rows, length]`: 1 for tokens with a loss, 0 for others.

        The suffix of an example has the loss. In an example without a suffix, the targets have it.
        """
        counted = []
        for row in rows:
            parts = [np.zeros(0, np.float32)]
            for example in row:
                suffix = len(example.get("suffixes", ()))
                targets = len(example["targets"])
                inputs = len(example["inputs"]) if "inputs" in self.lengths else 0
                before = inputs + (targets if suffix else 0)
                parts.append(np.repeat(np.array([0, 1], np.float32), [before, suffix or targets]))
            counted.append(np.concatenate(parts))
        sizes = np.array([len(row) for row in counted])
        valid = np.arange(self.limits[0]) < sizes[:, None]
        return fill_rows(np.concatenate(counted), valid, np.dtype(np.float32))

    def _batch_of_tokens(self, rows: Sequence[Sequence[Example]]) -> NestedMap:
        examples = [example for row in rows for example in row]
        inputs = [example.get("inputs", ()) for example in examples]
        targets = [example.get("targets", ()) for example in examples]
        match self.converter:
            case "encoder_decoder":
                return encoder_decoder_features(
                    inputs,
                    targets,
                    inputs_length=self.lengths["inputs"],
                    targets_length=self.lengths["targets"],
                    rows=_number_rows(rows) if self.packed else None,
                    bos_id=self.bos_id,
                )
            case "prompts":
                return prompt_features(
                    [np.abs(ids) for ids in inputs], length=self.limits[0], bos_id=self.bos_id
                )
        batch = lm_features(
            inputs if "inputs" in self.lengths else None,
            targets,
            length=self.limits[0],
            rows=_number_rows(rows) if self.packed else None,
            bos_id=self.bos_id,
            weights_on_targets_only=self.weights_on_targets_only,
            negative_ids=self.negative_ids,
        )
        if self.converter != "prefix_lm":
            batch.pop("inputs_indicator", None)
        return batch


def _shift(batch: NestedMap) -> None:
    """Use labels as ids, and move labels, weights and paddings one position to the left."""
    batch.ids = batch.labels
    for name, last in (("labels", 0), ("weights", 0), ("paddings", 1)):
        value = np.roll(batch[name], -1, axis=1)
        value[:, -1:] = last
        batch[name] = value


def _append_suffix(example: Example) -> Example:
    suffix = example.get("suffixes", ())
    if not len(suffix):
        return example
    return {**example, "targets": np.concatenate([example["targets"], suffix])}


def _number_rows(rows: Sequence[Sequence[Example]]) -> list[list[int]]:
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return [list(range(end - len(row), end)) for row, end in zip(rows, ends, strict=True)]


@dataclasses.dataclass
class Rows:
    """A stream of rows. A row has one example, or several if examples are packed."""

    source: ExampleSource
    row_format: RowFormat
    window_rows: int
    """Number of rows that are packed together."""
    bad_records: BadRecords
    """Policy for examples longer than a row."""

    def __post_init__(self) -> None:
        """Start before the first window."""
        self._window: list[list[NumberedExample]] = []
        self._window_begin: dict[str, Any] | None = None
        self._rows_done = 0

    def position(self) -> dict[str, Any]:
        """Return the position: the start of the open window, and how many of its rows were read."""
        if self._window_begin is None or self._rows_done == len(self._window):
            return {"examples": self.source.position(), "rows_done": 0}
        return {"examples": self._window_begin, "rows_done": self._rows_done}

    def set_position(self, position: dict[str, Any]) -> None:
        """Restore a position."""
        self.source.set_position(position["examples"])
        self._window, self._window_begin, self._rows_done = [], None, 0
        if position["rows_done"]:
            self._read_window()
            self._rows_done = position["rows_done"]

    def read(self) -> list[NumberedExample]:
        """Return the examples of the next row; raise StopIteration at the end."""
        if not self.row_format.packed:
            return [self._read_fitting()]
        if self._rows_done == len(self._window):
            self._read_window()
        self._rows_done += 1
        return self._window[self._rows_done - 1]

    def _read_window(self) -> None:
        self._window_begin, self._rows_done = self.source.position(), 0
        limits = np.array(self.row_format.limits)
        sizes: list[tuple[int, ...]] = []
        window: list[NumberedExample] = []
        total = np.zeros(len(limits), np.int64)
        while (total < limits * self.window_rows).all():
            try:
                numbered = self._read_fitting()
            except StopIteration:
                break
            size = self.row_format.sizes(numbered.example)
            if any(size):  # an example without tokens is dropped
                window.append(numbered)
                sizes.append(size)
                total += size
        plan = plan_packing(sizes, limits.tolist(), open_rows=max(len(sizes), 1))
        self._window = [[window[number] for number in row] for row in plan.rows()]
        if not self._window:
            raise StopIteration

    def _read_fitting(self) -> NumberedExample:
        while True:
            numbered = self.source.read()
            sizes, limits = self.row_format.sizes(numbered.example), self.row_format.limits
            if all(size <= limit for size, limit in zip(sizes, limits, strict=True)):
                return numbered
            self.bad_records.report(
                file=f"task {numbered.task.name}",
                record=numbered.number,
                problem=f"the example has {sizes} positions, but a row has {limits}. Set "
                "trim_output_features=True, or increase task_feature_lengths.",
            )
