"""Optimizers and schedules of BERT, GLaM, the Transformer of 2017 and Pax's BERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import optax

from layerkit.config import Config, Partial
from layerkit.interop.praxis import axis_order
from layerkit_experiments.recipes.optimizers import (
    ExponentialDecay,
    ScheduleOverRun,
    TrainingLength,
    adamw_learner,
    check_optimizer_numbers,
)
from layerkit_runner.optim import schedules
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.optimizers import decays
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor


class AdamWLinear(ScheduleOverRun):
    """AdamW that decays matrices; linear warmup, then linear decay to 0 (Devlin et al., 2018)."""

    LEARNING_RATE: float = 1e-4
    ADAM_BETA1: float = 0.9
    ADAM_BETA2: float = 0.999
    ADAM_EPSILON: float = 1e-6
    WEIGHT_DECAY: float = 0.01
    CLIP_GRADIENT_NORM: float | None = 1.0
    WARMUP_STEPS: int = 10_000

    reduced_fields: ClassVar[Mapping[str, Any]] = {"LEARNING_RATE": 3e-3, "WARMUP_STEPS": 5}

    def learner(self) -> Config:
        """Return the config of the learner."""
        return adamw_learner(
            self,
            decayed=decays,
            learning_rate=self.schedule_steps().config(
                schedules.linear_warmup_polynomial_decay, self.LEARNING_RATE
            ),
        )


class AdafactorSqrt(TrainingLength):
    """Adafactor without momentum; a constant rate, then 1/√step (Du et al., 2021: GLaM).

    Updates are proportional to the size of the weights, so the rate is relative to it (Shazeer and
    Stern, 2018; arXiv:1804.04235).
    """

    LEARNING_RATE: float = 0.01
    CONSTANT_STEPS: int = 10_000
    """Number of steps at LEARNING_RATE, followed by LEARNING_RATE·√(CONSTANT_STEPS / step)."""
    SECOND_MOMENT_DECAY: float = 0.8
    """Exponent c of the decay 1 - step^-c of the factored second moments."""
    UPDATE_RMS_CAP: float | None = 1.0
    CLIP_GRADIENT_NORM: float | None = None

    reduced_fields: ClassVar[Mapping[str, Any]] = {"LEARNING_RATE": 0.03}

    def learner(self) -> Config:
        """Return the config of the learner."""
        check_optimizer_numbers(self)
        return Learner.HParams.config(
            optimizer=Partial(
                optax.adafactor,
                decay_rate=self.SECOND_MOMENT_DECAY,
                clipping_threshold=self.UPDATE_RMS_CAP,
            ),
            learning_rate=Config(
                schedules.sqrt_decay,
                self.LEARNING_RATE,
                decay_start=self.CONSTANT_STEPS,
            ),
            clip_global_norm=self.CLIP_GRADIENT_NORM,
        )


class AdafactorExponential(ExponentialDecay):
    """Adafactor with momentum in int8; linear warmup, then exponential decay to a tenth (Pax).

    ADAM_BETA2 is the decay of the factored second moments, with Adam's bias correction.
    """

    DECAY_END = 100_000
    MAX_STEPS = 100_000

    def optimizer(self) -> Partial:
        """Return Adafactor."""
        return pax_adafactor(self, decay_adam=self.ADAM_BETA2)


class AdamInverseSqrt(TrainingLength):
    """Adam; linear warmup, then 1/√step, scaled by the model size (Vaswani et al., 2017)."""

    LEARNING_RATE_SCALE: float = 1.0
    ADAM_BETA1: float = 0.9
    ADAM_BETA2: float = 0.98
    ADAM_EPSILON: float = 1e-9
    WARMUP_STEPS: int = 4000
    CLIP_GRADIENT_NORM: float | None = None

    reduced_fields: ClassVar[Mapping[str, Any]] = {"LEARNING_RATE_SCALE": 0.1, "WARMUP_STEPS": 10}

    def learner(self) -> Config:
        """Return the config of the learner."""
        check_optimizer_numbers(self)
        return Learner.HParams.config(
            optimizer=Partial(
                optax.adam, b1=self.ADAM_BETA1, b2=self.ADAM_BETA2, eps=self.ADAM_EPSILON
            ),
            learning_rate=Config(
                schedules.transformer,
                warmup_steps=self.WARMUP_STEPS,
                model_dims=self.MODEL_DIMS,  # type: ignore[attr-defined]  # of the model's recipe
                scale=self.LEARNING_RATE_SCALE,
            ),
            clip_global_norm=self.CLIP_GRADIENT_NORM,
        )


def pax_adafactor(fields: ExponentialDecay, *, decay_adam: float) -> Partial:
    """Return Pax's `ShardedAdafactor`, with a momentum in int8 and factors of the second moment.

    Args:
      fields: Recipe with the decay of the momentum, the weight decay and the update cap.
      decay_adam: Decay of the factored second moments, with Adam's bias correction.
    """
    return Partial(
        sharded_adafactor,
        beta1=fields.ADAM_BETA1,
        decay_adam=decay_adam,
        weight_decay=fields.WEIGHT_DECAY,
        clip_threshold=fields.UPDATE_RMS_CAP,
        axis_order=axis_order,
    )
