"""Learners other than AdamW with a cosine, from the fields of an experiment."""

from __future__ import annotations

from typing import Any

import optax

from layerkit.config import Config, Partial
from layerkit.interop.praxis import axis_order
from layerkit_experiments.recipes.schedule_choices import number_of_steps
from layerkit_experiments.recipes.training import (
    adamw,
    checked_learner,
    schedule_learning_rate,
)
from layerkit_runner.config.experiment import refuse_unread
from layerkit_runner.optim import schedules
from layerkit_runner.optim.optimizers import adam_with_update_cap
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor


def adamw_linear(fields: Any) -> Config:
    """Return AdamW that decays matrices; a linear warmup, then linear decay to 0 (Devlin, 2018)."""
    if fields.LEARNING_RATE_SCHEDULE is None:
        refuse_unread(fields, ("MIN_LEARNING_RATE_RATIO",), "a linear decay to 0")
    return adamw(fields, schedule_learning_rate(fields, schedules.linear_warmup_polynomial_decay))


def adam_exponential(fields: Any) -> Config:
    """Return Pax's Adam with an update cap; a linear warmup, then exponential decay."""
    return checked_learner(fields, _capped_adam(fields), _exponential(fields))


def adafactor_exponential(fields: Any) -> Config:
    """Return Pax's Adafactor with momentum in int8; a linear warmup, then exponential decay.

    ADAM_BETA2 is the decay of the factored second moments, with Adam's bias correction.
    """
    optimizer = _pax_adafactor(fields, decay_adam=fields.ADAM_BETA2)
    return checked_learner(fields, optimizer, _exponential(fields))


def capped_cosine(fields: Any) -> Config:
    """Return Pax's Adam with an update cap, or Adafactor if USE_ADAFACTOR is set; a cosine."""
    if fields.USE_ADAFACTOR:
        refuse_unread(fields, ("ADAM_BETA2", "ADAM_EPSILON"), "USE_ADAFACTOR=True")
        optimizer = _pax_adafactor(fields, decay_adam=0.99)
    else:
        optimizer = _capped_adam(fields)
    rate = schedule_learning_rate(
        fields, schedules.linear_warmup_cosine_decay, min_ratio=fields.MIN_LEARNING_RATE_RATIO
    )
    return checked_learner(fields, optimizer, rate)


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
    start = number_of_steps(fields, "CONSTANT_STEPS")
    rate: Config = Config(schedules.sqrt_decay, fields.LEARNING_RATE, decay_start=start)
    return checked_learner(fields, optimizer, rate)


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
    return checked_learner(fields, optimizer, rate)


def _exponential(fields: Any) -> Config:
    return schedule_learning_rate(
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
