"""Stages of a training run: its batch size, length of rows, mixture and learning rate by step.

A stage states what changes. What it leaves out stays as in the stage before it, and in the first
stage as the experiment sets it. Steps follow from tokens here, once, so that schedules, data and
reports agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

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
    mixture: Mapping[str, Any]
    """Weight of each component of a `Mixture` by name; those that it leaves out have none."""
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
    names = experiment.stage_fields
    if not (stages := getattr(experiment, names.get("stages", ""), None)):
        return []
    with as_usage_error():
        return _stage_steps(names, stages, getattr(experiment, names["row_length"], None))


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


def _stage_steps(
    names: Mapping[str, str], stages: Sequence[Stage], row_length: int | None
) -> list[StageSteps]:
    known: list[StageSteps] = []
    last_step, tokens = 0, 0
    batch: int | None = None
    length = row_length
    for index, stage in enumerate(stages):
        path = f"{names['stages']}[{index}]"
        _check_fields(path, stage)
        batch, length = stage.get("batch", batch), stage.get("length", length)
        expected = f"a divisor of {names['row_length']}={row_length}"
        is_divisor = length is None or (row_length is not None and row_length % length == 0)
        require(is_divisor, path, "length", length, expected)
        per_step = None if batch is None else batch * (length or 1)
        first_step, last_step = last_step + 1, _last_step(stage, path, last_step, tokens, per_step)
        if per_step is not None:
            tokens += per_step * (last_step - first_step + 1)
        known.append(StageSteps(first_step, last_step, batch, length, row_length, stage))
    return known


def _check_fields(path: str, stage: Stage) -> None:
    for name, value in stage.items():
        if (kind := Stage.__annotations__.get(name)) is None:
            fields = tuple(Stage.__annotations__)
            raise ConfigError("unknown field", owner=path, value=name, choices=fields)
        is_kind = field_types.fit(value, kind, (__name__,)) is not field_types.MISMATCH
        require(is_kind, path, name, value, getattr(kind, "__forward_arg__", str(kind)))
        if kind.__forward_arg__ == "int":
            check_sizes(path, **{name: value})  # type: ignore[arg-type]
    ends = [name for name in ("until_step", "until_tokens") if name in stage]
    expected = "one of until_step and until_tokens"
    require(len(ends) == 1, path, "end", ends, expected)


def _last_step(stage: Stage, path: str, before: int, tokens: int, per_step: int | None) -> int:
    """Return the last step of a stage that follows `before` steps and `tokens` tokens."""
    if (until_step := stage.get("until_step")) is not None:
        expected = f"more than {before}, the steps before this stage"
        require(until_step > before, path, "until_step", until_step, expected)
        return until_step
    if per_step is None:
        expected = "the rows of a batch, here or in an earlier stage, to count until_tokens"
        raise ConfigError(owner=path, field="batch", value=None, expected=expected)
    expected = f"more than {tokens}, the tokens before this stage"
    until_tokens = stage["until_tokens"]
    require(until_tokens > tokens, path, "until_tokens", until_tokens, expected)
    return before + -(-(until_tokens - tokens) // per_step)
