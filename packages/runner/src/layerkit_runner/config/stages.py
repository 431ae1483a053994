"""Stages of a training run: its batch size, length of rows, mixture and learning rate by step.

What a stage leaves out stays as in the stage before it, and in the first stage as the experiment
sets it. Steps follow from tokens here, once, so that schedules, data and reports agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from layerkit.config import field_types
from layerkit.config.checks import check_sizes, require
from layerkit.errors import ConfigError
from layerkit_runner.errors import FieldError, as_usage_error


class Stage(TypedDict, total=False):
    """A part of a training run, written as a dict.

    `Stage(until_tokens=1_000_000, batch=32)` in Python is `{"until_tokens": 1000000, "batch": 32}`
    on a command line.
    """

    until_step: int
    """Last step of the stage, counted from the start of the run."""
    until_tokens: int
    """Tokens after which the stage ends, in place of `until_step`: positions of rows, counted from
    the start of the run. The stage ends with the first step that reaches them."""
    batch: int
    """Rows of a batch over all hosts."""
    length: int
    """Positions of a row, a divisor of those of a row of the data."""
    mixture: Mapping[str, float | Sequence[float]]
    """Weight of each component of a `Mixture` by name, or `[first, last]` to change it linearly;
    those that it leaves out have none."""
    rate: float | Mapping[str, Any]
    """Learning rate at the end of the stage, to which it goes by a line from that of the stage
    before, or from 0; or `{"to": rate, "by": shape}`, see `optim.schedules.staged`."""


@dataclasses.dataclass(frozen=True)
class StageSteps:
    """A stage with its steps.

    Attributes:
      first_step: Number of its first step, from 1.
      last_step: Number of its last step.
      batch: Rows of a batch over all hosts; None for that of the training input.
      length: Positions of a row; None if rows of the training input have no length.
      row_length: Positions of a row of the training input, from which shorter rows are cut.
      stage: The stage as it is written.
    """

    first_step: int
    last_step: int
    batch: int | None
    length: int | None
    row_length: int | None
    stage: Stage

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return self.last_step - self.first_step + 1


def stages_of(experiment: Any) -> list[StageSteps]:
    """Return the stages of a `BaseExperiment` with their steps; [] if it has none.

    Its `stage_fields` name the fields: `stages`, a list of `Stage`; `num_steps`, which follows from
    them; and `row_length`, the positions of a row of the training data, which it may lack.

    Raises:
      UsageError: A stage has unknown fields or no end, ends before it begins, or has a length that
        does not divide that of the data.
    """
    names, known = experiment.stage_fields, list[StageSteps]()
    row_length = getattr(experiment, names.get("row_length", ""), None)
    batch: int | None = None
    length, last_step, tokens = row_length, 0, 0
    for index, stage in enumerate(getattr(experiment, names.get("stages", ""), None) or ()):
        path = f"{names['stages']}[{index}]"
        with as_usage_error():
            end = _check_fields(path, stage)
            batch, length = stage.get("batch", batch), stage.get("length", length)
            expected = f"a divisor of {names['row_length']}={row_length}"
            is_divisor = length is None or (row_length is not None and row_length % length == 0)
            require(is_divisor, path, "length", length, expected)
            is_counted = end == "until_step" or (batch and all(one.batch for one in known))
            expected = "the rows of a batch from the first stage on, to count until_tokens"
            require(is_counted, path, "batch", batch, expected)
            until, done = stage[end], last_step if end == "until_step" else tokens
            expected = f"more than {done}, those before this stage"
            require(until > done, path, end, until, expected)
        per_step = (batch or 0) * (length or 1)
        num_steps = until - done if end == "until_step" else -((done - until) // per_step)
        tokens += num_steps * per_step
        first_step, last_step = last_step + 1, last_step + num_steps
        known.append(StageSteps(first_step, last_step, batch, length, row_length, stage))
    return known


def set_last_step(experiment: Any) -> None:
    """Set the number of steps to the last step of the stages.

    Raises:
      FieldError: An override sets another number.
    """
    if stages := stages_of(experiment):
        last, name = stages[-1].last_step, experiment.stage_fields["num_steps"]
        value = experiment.overrides.get(name, last)
        expected = f"{last}, the last step of {experiment.stage_fields['stages']}, or no value"
        require(value == last, type(experiment).__qualname__, name, value, expected, FieldError)
        setattr(experiment, name, last)


def _check_fields(path: str, stage: Any) -> Literal["until_step", "until_tokens"]:
    """Check the fields of a stage one by one, and return the one that ends it."""
    kinds = Stage.__annotations__
    require(isinstance(stage, Mapping), path, "stage", stage, f"a dict of {', '.join(kinds)}")
    for name, value in stage.items():
        if (kind := kinds.get(name)) is None:
            raise ConfigError("unknown field", owner=path, value=name, choices=kinds)
        is_kind = field_types.fit(value, kind, (__name__,)) is not field_types.MISMATCH
        require(is_kind, path, name, value, kind.__forward_arg__)
        if kind.__forward_arg__ == "int":
            check_sizes(path, **{name: value})
    ends = stage.keys() & {"until_step", "until_tokens"}
    require(len(ends) == 1, path, "end", [*ends], "one of until_step and until_tokens")
    if (mixture := stage.get("mixture")) is not None:
        ranges = [
            weight if isinstance(weight, Sequence) else [weight] * 2 for weight in mixture.values()
        ]
        are_weights = any(map(any, ranges)) and all(
            len(weights) == 2 and all(0 <= weight < math.inf for weight in weights)
            for weights in ranges
        )
        expected = "weights from 0 by name, or pairs of them, not all 0"
        require(are_weights, path, "mixture", mixture, expected)
    return ends.pop()
