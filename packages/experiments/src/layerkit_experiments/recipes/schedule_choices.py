"""Learning-rate schedules of experiments, by name and by the rates of STAGES, and their steps.

`WARMUP_STEPS`, `DECAY_START` and `DECAY_END` follow one rule, whoever sets them. An integer is a
number of steps; a float is a fraction of MAX_STEPS. `DECAY_START=None` is the end of the warmup,
and `DECAY_END=None` the end of the run. A schedule that ends with the run always fits into it: a
warmup or a flat part that leaves no step for the decay is shortened, and the start report says so.
A schedule with a DECAY_END keeps its steps, however long the run is, as in Pax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from layerkit.config import Config, assigned_fields, is_config
from layerkit.config.checks import check_choice, check_non_negative, check_sizes, require
from layerkit_runner.config.experiment import refuse_unread
from layerkit_runner.config.stages import stages_of
from layerkit_runner.optim import schedules

_RATIO = MappingProxyType({"min_ratio": "MIN_LEARNING_RATE_RATIO"})
_RATES = ("LEARNING_RATE", "LEARNING_RATE_SCALE", "CONSTANT_STEPS", "STEP_BOUNDARIES")
_STEPS = ("warmup_steps", "decay_start", "decay_end")
_FIELDS = MappingProxyType({**{name: name.upper() for name in _STEPS}, **_RATIO})


class ScheduleChoice(NamedTuple):
    """A schedule, and what it takes from the fields of an experiment.

    Attributes:
      function: Function of the peak and of `steps`.
      fields: Names of fields by argument of `function`.
      options: Values by argument of `function`.
      flat: Part of the steps to DECAY_END without decay, by default; None for the warmup alone.
      steps: Arguments with numbers of steps.
    """

    function: Callable[..., Any]
    fields: Mapping[str, str] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})
    flat: float | None = None
    steps: tuple[str, ...] = _STEPS

    @classmethod
    def of(cls, experiment: Any) -> ScheduleChoice | None:
        """Return the row of the experiment's LEARNING_RATE_SCHEDULE, or None without one.

        Raises:
          UserError: LEARNING_RATE_SCHEDULE is unknown, or a field is overridden that it does not
            read.
        """
        if (name := experiment.LEARNING_RATE_SCHEDULE) is None:
            return None
        check_choice(type(experiment).__qualname__, SCHEDULES, LEARNING_RATE_SCHEDULE=name)
        choice = SCHEDULES[name]
        refuse_unread(experiment, choice.unread_fields(), f"LEARNING_RATE_SCHEDULE={name!r}")
        return choice

    def unread_fields(self) -> list[str]:
        """Return the fields of steps and of the last rate that the schedule does not read."""
        is_constant = self.options.get("min_ratio") == 1.0
        read = {*self.fields, *(self.steps[:1] if is_constant else self.steps)}
        return [field for argument, field in _FIELDS.items() if argument not in read]

    def config(self, experiment: Any) -> Config:
        """Return the config of the schedule with the peak LEARNING_RATE and numbers of steps."""
        values = {name: getattr(experiment, field) for name, field in self.fields.items()}
        numbers = schedule_steps(experiment, flat=self.flat, unread=self.unread_fields())
        steps = zip(_STEPS, numbers, strict=True)
        values |= {name: step for name, step in steps if name in self.steps}
        return Config(self.function, experiment.LEARNING_RATE, **values, **self.options)

    @classmethod
    def notes(cls, experiment: Any) -> list[str]:
        """Return a line for the start report if the learner has a shortened schedule."""
        rate = experiment.learner().learning_rate
        if not is_config(rate):
            return []
        steps, changes = assigned_fields(rate), []
        for name, argument in (("WARMUP_STEPS", "warmup_steps"), ("DECAY_START", "decay_start")):
            is_set = argument in steps and getattr(experiment, name) is not None
            if is_set and number_of_steps(experiment, name) != steps[argument]:
                changes.append(f"{name} {getattr(experiment, name)} → {steps[argument]}")
        fitted = f"schedule     {', '.join(changes)}, to fit into MAX_STEPS={experiment.MAX_STEPS}"
        return [fitted] if changes else []

    @classmethod
    def join_stages(cls, experiment: Any) -> Config | None:
        """Return the config of the schedule of STAGES that have rates, or None if none has.

        A stage without a rate keeps that of the stage before.

        Raises:
          UserError: A rate is wrong, the first stage has none, or a field is overridden that STAGES
            with rates do not read.
        """
        stages = stages_of(experiment)
        if not any("rate" in one.stage for one in stages):
            return None
        name = getattr(experiment, "LEARNING_RATE_SCHEDULE", None)
        expected = "None, since STAGES have rates"
        require(
            name is None, type(experiment).__qualname__, "LEARNING_RATE_SCHEDULE", name, expected
        )
        refuse_unread(experiment, [*_RATES, *_FIELDS.values()], "STAGES with rates")
        rates: list[dict[str, Any]] = []
        for index, one in enumerate(stages):
            path, rate = f"STAGES[{index}]", one.stage.get("rate")
            if rate is None:
                require(index > 0, path, "rate", None, "a rate, since a later stage has one")
                rate = rates[-1]["to"]
            values = dict(rate) if isinstance(rate, Mapping) else {"to": rate}
            are_known = "to" in values and values.keys() <= {"to", "by"}
            are_known = are_known and isinstance(values["to"], int | float)
            require(are_known, path, "rate", rate, "a number, or {'to': number, 'by': shape}")
            check_non_negative(path, rate=values["to"])
            check_choice(path, get_args(schedules.RateShape), by=values.get("by", "linear"))
            rates.append({"by": "linear", **values})
        peak = max(rate["to"] for rate in rates) or 1.0
        return Config(
            schedules.staged,
            peak,
            boundaries=[one.last_step for one in stages],
            ratios=[rate["to"] / peak for rate in rates],
            shapes=[rate["by"] for rate in rates],
        )


def schedule_steps(
    fields: Any, *, flat: float | None = None, unread: Collection[str] = ()
) -> tuple[int, int, int]:
    """Return the end of the warmup, and start and end of the decay, by the rule of this module.

    `flat` is the part of the steps to DECAY_END without decay, by default; None for the warmup.
    Fields in `unread` count as None.

    Raises:
      ConfigError: DECAY_START fits into the run, and is in the warmup.
    """
    num_steps, warmup = fields.MAX_STEPS, number_of_steps(fields, "WARMUP_STEPS")
    is_set = fields.DECAY_START is not None and "DECAY_START" not in unread
    is_free = fields.DECAY_END is None or "DECAY_END" in unread
    end = num_steps if is_free else number_of_steps(fields, "DECAY_END")
    flat_end = 0 if flat is None else int(flat * end)
    decay_start = number_of_steps(fields, "DECAY_START") if is_set else max(warmup, flat_end)
    if not is_free:
        return warmup, decay_start, end
    if max(warmup, decay_start) >= num_steps:
        check_sizes(None, MAX_STEPS=num_steps)
        warmup = min(warmup, longest := schedules.longest_warmup(num_steps))
        if not is_set or decay_start >= num_steps:
            decay_start = max(warmup, longest if is_set else flat_end)
    expected = f"at least WARMUP_STEPS={warmup}"
    require(decay_start >= warmup, None, "DECAY_START", fields.DECAY_START, expected)
    return warmup, decay_start, num_steps


# The flat part of `wsd` and `sqrt` is that of Hägele et al. (2024, arXiv:2405.18392).
SCHEDULES: Mapping[str, ScheduleChoice] = MappingProxyType(
    {
        "cosine": ScheduleChoice(schedules.linear_warmup_cosine_decay, _RATIO),
        "exponential": ScheduleChoice(schedules.linear_warmup_exponential_decay, _RATIO),
        "linear": ScheduleChoice(schedules.linear_warmup_polynomial_decay),
        "polynomial": ScheduleChoice(
            schedules.linear_warmup_polynomial_decay, _RATIO, {"power": 2.0}
        ),
        "wsd": ScheduleChoice(schedules.linear_warmup_polynomial_decay, _RATIO, flat=0.8),
        "sqrt": ScheduleChoice(
            schedules.linear_warmup_polynomial_decay,
            _RATIO,
            {"power": 0.5, "origin": "start"},
            flat=0.8,
        ),
        "inverse_sqrt": ScheduleChoice(schedules.linear_warmup_sqrt_decay, steps=("warmup_steps",)),
        "constant": ScheduleChoice(
            schedules.linear_warmup_polynomial_decay, options={"min_ratio": 1.0}
        ),
    }
)


def number_of_steps(fields: Any, name: str) -> int:
    """Return the number of steps of a field that holds steps or a fraction of the run.

    Args:
      fields: Object with the field and MAX_STEPS, such as an experiment.
      name: Name of the field. An integer is a number of steps, a float a part of MAX_STEPS.

    Raises:
      ConfigError: A float is not in [0, 1].
    """
    value = getattr(fields, name)
    if isinstance(value, int):
        return value
    expected = "an integer, or a fraction of MAX_STEPS between 0 and 1"
    require(0.0 <= value <= 1.0, None, name, value, expected)
    return round(value * fields.MAX_STEPS)
