"""Learners: an optimizer with a learning-rate schedule, made from the fields of an experiment.

`WARMUP_STEPS`, `DECAY_START` and `DECAY_END` follow one rule, whoever sets them. An integer is a
number of steps; a float is a fraction of MAX_STEPS. `DECAY_START=None` is the end of the warmup,
and `DECAY_END=None` the end of the run. A schedule that ends with the run always fits into it: a
warmup or a flat part that leaves no step for the decay is shortened, and the start report says so.
A schedule with a DECAY_END keeps its steps, however long the run is, as in Pax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from layerkit.config import Config, Partial, assigned_fields
from layerkit.config.checks import check_non_negative, check_positive, check_rates, check_sizes
from layerkit.errors import ConfigError
from layerkit.interop.praxis import axis_order
from layerkit_runner.optim import schedules
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.optimizers import adam_with_update_cap, decays
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor

_NON_NEGATIVE = (
    "LEARNING_RATE",
    "LEARNING_RATE_SCALE",
    "ADAM_EPSILON",
    "WEIGHT_DECAY",
    "SECOND_MOMENT_DECAY",
)
_RATES = ("ADAM_BETA1", "ADAM_BETA2")
_POSITIVE = ("UPDATE_RMS_CAP",)


def schedule_steps(fields: Any) -> tuple[int, int, int]:
    """Return the end of the warmup, and start and end of the decay, by the rule of this module."""
    warmup = number_of_steps(fields, "WARMUP_STEPS")
    start, end = fields.DECAY_START, fields.DECAY_END
    decay_start = warmup if start is None else number_of_steps(fields, "DECAY_START")
    if end is not None:
        return warmup, decay_start, number_of_steps(fields, "DECAY_END")
    if not warmup <= decay_start < fields.MAX_STEPS:
        check_sizes(None, MAX_STEPS=fields.MAX_STEPS)
        longest = schedules.longest_warmup(fields.MAX_STEPS)
        warmup = min(warmup, longest)
        decay_start = warmup if start is None else min(decay_start, max(warmup, longest))
    return warmup, decay_start, fields.MAX_STEPS


def number_of_steps(fields: Any, name: str) -> int:
    """Return the number of steps of a field that holds steps or a fraction of MAX_STEPS.

    Raises:
      ConfigError: The field is a float outside of [0, 1].
    """
    value = getattr(fields, name)
    if isinstance(value, int):
        return value
    if not 0.0 <= value <= 1.0:
        expected = "an integer, or a fraction of MAX_STEPS between 0 and 1"
        raise ConfigError(field=name, value=value, expected=expected)
    return round(value * fields.MAX_STEPS)


def schedule_notes(experiment: Any) -> list[str]:
    """Return a line for the start report if the learner has a shortened schedule."""
    steps = assigned_fields(experiment.learner().learning_rate)
    changes = []
    for name, argument in (("WARMUP_STEPS", "warmup_steps"), ("DECAY_START", "decay_start")):
        is_set = argument in steps and getattr(experiment, name) is not None
        if is_set and number_of_steps(experiment, name) != steps[argument]:
            changes.append(f"{name} {getattr(experiment, name)} → {steps[argument]}")
    if not changes:
        return []
    return [f"schedule     {', '.join(changes)}, to fit into MAX_STEPS={experiment.MAX_STEPS}"]


def adamw_cosine(fields: Any) -> Config:
    """Return AdamW with a linear warmup, then a cosine down to MIN_LEARNING_RATE_RATIO."""
    rate = with_schedule(
        fields, schedules.linear_warmup_cosine_decay, min_ratio=fields.MIN_LEARNING_RATE_RATIO
    )
    return adamw(fields, rate, decays_all=fields.DECAYED_WEIGHTS == "all")


def adamw_linear(fields: Any) -> Config:
    """Return AdamW that decays matrices; a linear warmup, then linear decay to 0 (Devlin, 2018)."""
    return adamw(fields, with_schedule(fields, schedules.linear_warmup_polynomial_decay))


def adamw(fields: Any, learning_rate: Config, *, decays_all: bool = False) -> Config:
    """Return a learner with AdamW.

    Args:
      fields: Experiment with the fields of Adam, WEIGHT_DECAY and CLIP_GRADIENT_NORM.
      learning_rate: Config of the schedule.
      decays_all: True to decay all weights, False to decay those that declare it (matrices).
    """
    optimizer = Partial(
        optax.adamw,
        b1=fields.ADAM_BETA1,
        b2=fields.ADAM_BETA2,
        eps=fields.ADAM_EPSILON,
        weight_decay=fields.WEIGHT_DECAY,
        mask=None if decays_all else decays,
    )
    return _learner(fields, optimizer, learning_rate)


def adam_exponential(fields: Any) -> Config:
    """Return Pax's Adam with an update cap; a linear warmup, then exponential decay."""
    return _learner(fields, _capped_adam(fields), _exponential(fields))


def adafactor_exponential(fields: Any) -> Config:
    """Return Pax's Adafactor with momentum in int8; a linear warmup, then exponential decay.

    ADAM_BETA2 is the decay of the factored second moments, with Adam's bias correction.
    """
    optimizer = _pax_adafactor(fields, decay_adam=fields.ADAM_BETA2)
    return _learner(fields, optimizer, _exponential(fields))


def capped_cosine(fields: Any) -> Config:
    """Return Pax's Adam with an update cap, or Adafactor if USE_ADAFACTOR is set; a cosine."""
    optimizer = (
        _pax_adafactor(fields, decay_adam=0.99) if fields.USE_ADAFACTOR else _capped_adam(fields)
    )
    rate = with_schedule(
        fields, schedules.linear_warmup_cosine_decay, min_ratio=fields.MIN_LEARNING_RATE_RATIO
    )
    return _learner(fields, optimizer, rate)


def adafactor_sqrt(fields: Any) -> Config:
    """Return Adafactor without momentum; a constant rate, then 1/√step (Du et al., 2021: GLaM).

    Updates are proportional to the size of the weights, so the rate is relative to it (Shazeer and
    Stern, 2018; arXiv:1804.04235).
    """
    optimizer = Partial(
        optax.adafactor,
        decay_rate=fields.SECOND_MOMENT_DECAY,
        clipping_threshold=fields.UPDATE_RMS_CAP,
    )
    rate: Config = Config(
        schedules.sqrt_decay, fields.LEARNING_RATE, decay_start=fields.CONSTANT_STEPS
    )
    return _learner(fields, optimizer, rate)


def adam_inverse_sqrt(fields: Any) -> Config:
    """Return Adam; a linear warmup, then 1/√step, by the model size (Vaswani et al., 2017)."""
    optimizer = Partial(
        optax.adam, b1=fields.ADAM_BETA1, b2=fields.ADAM_BETA2, eps=fields.ADAM_EPSILON
    )
    rate: Config = Config(
        schedules.transformer,
        warmup_steps=number_of_steps(fields, "WARMUP_STEPS"),
        model_dims=fields.MODEL_DIMS,
        scale=fields.LEARNING_RATE_SCALE,
    )
    return _learner(fields, optimizer, rate)


def with_schedule(fields: Any, schedule: Callable[..., Any], **options: Any) -> Config:
    """Return the config of a schedule of the runner with LEARNING_RATE and the schedule's steps.

    Args:
      fields: Experiment with LEARNING_RATE and the fields of `schedule_steps`.
      schedule: Function such as `linear_warmup_cosine_decay`.
      **options: Other arguments of the function.
    """
    warmup, start, end = schedule_steps(fields)
    steps = {"warmup_steps": warmup, "decay_start": start, "decay_end": end}
    return Config(schedule, fields.LEARNING_RATE, **steps, **options)


def _exponential(fields: Any) -> Config:
    return with_schedule(
        fields, schedules.linear_warmup_exponential_decay, min_ratio=fields.MIN_LEARNING_RATE_RATIO
    )


def _capped_adam(fields: Any) -> Partial:
    return Partial(
        adam_with_update_cap,
        b1=fields.ADAM_BETA1,
        b2=fields.ADAM_BETA2,
        eps=fields.ADAM_EPSILON,
        weight_decay=fields.WEIGHT_DECAY,
        update_rms_cap=fields.UPDATE_RMS_CAP,
    )


def _pax_adafactor(fields: Any, *, decay_adam: float) -> Partial:
    """Return Pax's `ShardedAdafactor`, with momentum in int8 and factored second moments."""
    return Partial(
        sharded_adafactor,
        beta1=fields.ADAM_BETA1,
        decay_adam=decay_adam,
        weight_decay=fields.WEIGHT_DECAY,
        clip_threshold=fields.UPDATE_RMS_CAP,
        axis_order=axis_order,
    )


def _learner(fields: Any, optimizer: Partial, learning_rate: Config) -> Config:
    """Return the config of a learner, after a check of numbers with which it would not learn."""
    for names, check in (
        (_NON_NEGATIVE, check_non_negative),
        (_RATES, check_rates),
        (_POSITIVE, check_positive),
    ):
        values = {name: getattr(fields, name) for name in names if hasattr(fields, name)}
        check(type(fields).__qualname__, **values)
    return Learner.HParams.config(
        optimizer=optimizer,
        learning_rate=learning_rate,
        clip_global_norm=fields.CLIP_GRADIENT_NORM,
    )
