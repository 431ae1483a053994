"""StagedRows: rows of an indexed input in batches whose size and length change at some steps.

All stages read one stream: the tokens of the rows of the source, in its order. A shorter row is an
equal part of a row of the source, and the parts of a row follow one another, as in DeepSpeed's
`seqlen_reshape`. So stages read the documents that the source reads alone, in the same order, and
a position in tokens determines what comes next. A longer length begins with a whole row of it, so
up to one row of the longer length is left out at its border.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_divisible, check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.mixing.components import build_components, check_reads_rows, num_rows_of
from layerkit_inputs.mixing.composite_input import CompositeInput
from layerkit_inputs.mixing.schedule import Weight


class StageRows(NamedTuple):
    """The batches of a stage."""

    num_steps: int
    """Number of batches."""
    batch: int
    """Rows of a batch over all hosts."""
    length: int = 1
    """Positions of a row; 1 if the rows have no length."""
    weights: Mapping[str, Weight] | None = None
    """Weight of each component of a `Mixture`, or a pair that changes linearly over the stage.
    None: those at the end of the stage before."""


def token_ranges(stages: Sequence[StageRows], moved: tuple[int, int] = (0, 0)) -> list[range]:
    """Return the tokens of the source that each stage reads; it leaves out those between two.

    >>> token_ranges([StageRows(3, 1, 64), StageRows(1, 1, 256)])
    [range(0, 192), range(256, 512)]

    Args:
      stages: The stages.
      moved: Number of steps after which the position was moved, and the token it was moved to. The
        stage of the next step begins there unless it has begun before, and later stages follow it.
    """
    ranges, end, last = [], 0, 0
    for stage in stages:
        begin = first = end + -end % stage.length
        steps, last = stage.num_steps, last + stage.num_steps
        if last - steps <= moved[0] < last:
            first, has_begun = moved[1] + -moved[1] % stage.length, last - steps < moved[0]
            begin, steps = min(begin, first) if has_begun else first, last - moved[0]
        end = first + steps * stage.batch * stage.length
        ranges.append(range(begin, end))
    return ranges


class StagedRows(CompositeInput):
    """An input for training on the rows of another one, in stages.

    The batches of the last stage go on without end.
    """

    source: Config[BaseInput] | None = sub_config_field(None)
    """Config of the other input, which reads rows by their numbers."""
    row_length: int = 1
    """Positions of a row of the other input; 1 if the rows have no length."""
    stages: Sequence[StageRows] = ()
    """The stages. A length divides `row_length`."""

    def __post_init__(self) -> None:
        """Check the fields and build the other input."""
        super().__post_init__()
        require(self.is_training, self._label, "is_training", self.is_training, "True")
        require(self.stages, self._label, "stages", self.stages, "at least one stage")
        for stage in self.stages:
            sizes = {"num_steps": stage.num_steps, "batch": stage.batch, "length": stage.length}
            check_sizes(self._label, **sizes)
            hosts, expected = self.num_infeed_hosts, f"a divisor of row_length={self.row_length}"
            check_divisible(self._label, by=("num_infeed_hosts", hosts), batch=stage.batch)
            is_part = self.row_length % stage.length == 0
            require(is_part, self._label, "length", stage.length, expected)
        self._last_steps = [*itertools.accumulate(stage.num_steps for stage in self.stages)]
        self._step, self._token = 0, 0
        # Number of steps after which a rollback or a start at a later step moved the position, and
        # the token it was moved to.
        self._moved = (0, 0)
        self._has_weights = any(stage.weights is not None for stage in self.stages)
        self._components = build_components(
            self,
            {"source": self._source_config()},
            field="source",
            batch_sizes={"source": self.local_batch_size},
        )
        reader = self._components["source"]
        check_reads_rows(self, "source", reader)
        self._source = cast("IndexedInput", reader)

    def _source_config(self) -> Config[BaseInput]:
        """Return the config of the source, with the weights of the stages if there are any."""
        source = cast("Config[BaseInput]", self.source)
        if not self._has_weights:
            return source
        expected = "a config of a Mixture, since stages have weights"
        require(hasattr(source, "weights_from"), self._label, "source", source, expected)
        expected, changes = "None, since stages have weights", source.weights_from
        require(changes is None, self._label, "source.weights_from", changes, expected)
        return source.clone(weights=None, weights_from=self._weights_from())

    def _weights_from(self) -> dict[int, Mapping[str, Weight]]:
        """Return the weights by the first row of the source that they hold for."""
        source: Any = self.source
        from_rows: dict[int, Mapping[str, Weight]] = {
            0: source.weights or dict.fromkeys(source.components, 1.0)
        }
        last = from_rows[0]
        ranges = token_ranges(self.stages, self._moved)
        for tokens, stage in zip(ranges, self.stages, strict=True):
            # A row has one component, so a row that has begun is read to its end.
            row, stop = (-(-token // self.row_length) for token in (tokens.start, tokens.stop))
            if stage.weights is None and row > max(from_rows):
                continue
            # Data that begin within a stage begin at that part of a change.
            num_tokens = stage.num_steps * stage.batch * stage.length
            part = max(1 - len(tokens) / num_tokens, 0)
            weights = {
                name: [w[0] + (w[1] - w[0]) * part, w[1]] if isinstance(w, Sequence) and part else w
                for name, w in (last if stage.weights is None else stage.weights).items()
            }
            last = {n: w[-1] if isinstance(w, Sequence) else w for n, w in weights.items()}
            from_rows = {n: w for n, w in from_rows.items() if n < row} | {row: weights}
            if last != weights:
                from_rows[stop] = last
        return from_rows

    @property
    def local_batch_size(self) -> int:
        """Number of rows on this host of the batch that was made last, or else of the first."""
        return self._stage_of(max(self._step - 1, 0)).batch // self.num_infeed_hosts

    def _stage_of(self, step: int) -> StageRows:
        """Return the stage of a step, counted from 0."""
        index = bisect.bisect_right(self._last_steps, step)
        return self.stages[min(index, len(self.stages) - 1)]

    def _next(self) -> NestedMap:
        stage = self._stage_of(self._step)
        begin = self._token + -self._token % stage.length
        num_rows = stage.batch // self.num_infeed_hosts
        parts = self.row_length // stage.length
        first = begin // stage.length + self.infeed_host_index * num_rows
        stop = first + num_rows
        rows = np.arange(first // parts, -(-stop // parts), dtype=np.int64)
        batch, _ = self._source._read_at(rows, num_rows_of(self._source))
        self._token, self._step = begin + stage.batch * stage.length, self._step + 1
        if parts == 1:
            return batch
        skipped = first - first // parts * parts
        cut = cut_rows(batch, parts=parts, row_length=self.row_length)
        return cut.transform(lambda array: array[skipped : skipped + num_rows])

    def _reset(self) -> None:
        self._step, self._token = 0, 0
        self._set_moved(0, 0)

    def _set_moved(self, step: int, token: int) -> None:
        """Set what moved the position, and the rows at which later stages change the weights."""
        is_same, self._moved = self._moved == (step, token), (step, token)
        if self._has_weights and not is_same:
            cast("Any", self._source).change_weights(self._weights_from())

    def _reader_state(self) -> dict[str, Any]:
        rows = self._token // self.row_length
        self._source._rows_done = rows
        left = self._token - rows * self.row_length
        moved = {"moved": [*self._moved]} if any(self._moved) else {}
        source = self._source.get_state()
        return {"step": self._step, "tokens_of_row": left, **moved, "source": source}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        self._step, source = position["step"], position["source"]
        # Before the source checks the weights of the rows that are done, later ones are moved.
        rows_done = source["position"].get("rows_done", 0)
        self._token = rows_done * self.row_length + position["tokens_of_row"]
        if (moved := position.get("moved", (0, 0))) is None:
            moved = (self._step, self._token) if self._token else (0, 0)
        self._set_moved(*moved)
        self._source.set_state(source)
        if not self._token:
            self._set_moved(self._step, 0)
        if not self._has_weights:
            return
        read = self._tokens_read(self._step)
        expected = f"0 or {read}, the tokens of {self._step} steps of these stages, since weights"
        expected += " begin at tokens; give the stages before the batch and length that they had"
        require(self._token in (0, read), self._label, "tokens read", self._token, expected)

    def _tokens_read(self, steps: int) -> int:
        """Return the number of tokens that the stages read in their first steps."""
        step, read = self._moved
        ranges = token_ranges(self.stages, self._moved)
        for tokens, stage, last in zip(ranges, self.stages, self._last_steps, strict=True):
            if steps > max(step, last - stage.num_steps):
                read = tokens.stop - max(last - steps, 0) * stage.batch * stage.length
        return read

    def skip_steps(self, steps: int) -> None:
        """Continue as after the first steps of a run in these stages, of which none is read."""
        self._step, self._token = steps, self._tokens_read(steps)

    def state_at(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with which a step comes next, at the position of a state in the data.

        Args:
          step: Number of steps before it.
          state: State of this input, or of the source alone, whose run then goes on in stages.
        """
        position = state["position"]
        if "tokens_of_row" not in position:
            position = {"tokens_of_row": 0, "source": state}
        # None stands for this step and this position.
        moved = {} if position.get("step") == step else {"moved": None}
        return {**self._state_owner(), "position": {**position, **moved, "step": step}}

    def describe_data(self) -> list[str]:
        """Return the lines of the other input."""
        return self._source.describe_data()


def cut_rows(batch: NestedMap, *, parts: int, row_length: int) -> NestedMap:
    """Cut each row into equal parts, as if rows of that length had been packed.

    Args:
      batch: Arrays `[rows, row_length, ...]`. The segments of a part are counted from 1, and the
        positions of a segment that began in the part before from 0.
      parts: Number of parts of a row.
      row_length: Positions of a row.

    Returns:
      Arrays `[rows * parts, row_length / parts, ...]`.

    Raises:
      ConfigError: An array has another second axis, or the rows are pairs, whose positions do not
        correspond.
    """
    pairs = [name for name, value in batch.items() if isinstance(value, Mapping)]
    require(not pairs, None, "batch", pairs, "arrays, since rows of pairs cannot be cut")

    def cut(array: np.ndarray) -> np.ndarray:
        expected = f"[rows, {row_length}, ...], which can be cut"
        require(array.shape[1:2] == (row_length,), None, "shape", list(array.shape), expected)
        return array.reshape(array.shape[0] * parts, row_length // parts, *array.shape[2:])

    batch = batch.transform(cut)
    if "segment_ids" in batch:
        ids = batch.segment_ids
        if "segment_pos" in batch:
            is_first = ids == ids[:, :1]
            batch.segment_pos = batch.segment_pos - is_first * batch.segment_pos[:, :1]
        # 0 is padding.
        batch.segment_ids = np.where(ids > 0, ids - np.maximum(ids[:, :1] - 1, 0), ids)
    return batch
