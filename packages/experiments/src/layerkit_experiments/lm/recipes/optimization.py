"""Optimizers, schedules and how long to train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import optax

from layerkit.config import Config, Partial
from layerkit_runner.config.experiment import is_set_before
from layerkit_runner.errors import UsageError
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.optimizers import adam_with_update_cap, decays
from layerkit_runner.optim.schedules import (
    linear_warmup_cosine_decay,
    linear_warmup_exponential_decay,
    longest_warmup,
)
from layerkit_runner.training.train_hparams import TrainHParams

_NOT_NEGATIVE = (
    "LEARNING_RATE",
    "LEARNING_RATE_SCALE",
    "ADAM_EPSILON",
    "WEIGHT_DECAY",
    "SECOND_MOMENT_DECAY",
)
_BELOW_ONE = ("ADAM_BETA1", "ADAM_BETA2")


class TrainingLength:
    """How long to train, and how often to look and to save."""

    MAX_STEPS: int = 300_000
    SUMMARY_INTERVAL_STEPS: int = 100
    EVAL_INTERVAL_STEPS: int | None = 100
    DECODE_INTERVAL_STEPS: int | None = None
    CHECKPOINT_EVERY_N_STEPS: int = 5000
    CHECKPOINT_MAX_TO_KEEP: int | None = 10
    CHECKPOINT_KEEP_INTERVAL_HOURS: float | None = None
    """Besides the newest, one checkpoint per so many hours stays for good; None for no others."""
    SEED: int = 1234

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "MAX_STEPS": 200,
        "SUMMARY_INTERVAL_STEPS": 10,
        "EVAL_INTERVAL_STEPS": 100,
        "CHECKPOINT_EVERY_N_STEPS": 100,
    }

    def validate(self) -> None:
        """Check the length before schedules are made from it.

        Raises:
          ValueError: MAX_STEPS is below 1.
        """
        super().validate()  # type: ignore[misc]
        if self.MAX_STEPS < 1:
            raise ValueError(f"MAX_STEPS={self.MAX_STEPS}: expected a positive integer")

    def train_config(self, learner: Config) -> Config:
        """How the task is trained, with this learner."""
        return TrainHParams.HParams.config(
            learner=learner,
            num_train_steps=self.MAX_STEPS,
            random_seed=self.SEED,
            summary_interval_steps=self.SUMMARY_INTERVAL_STEPS,
            eval_interval_steps=self.EVAL_INTERVAL_STEPS,
            decode_interval_steps=self.DECODE_INTERVAL_STEPS,
            save_interval_steps=self.CHECKPOINT_EVERY_N_STEPS,
            save_max_to_keep=self.CHECKPOINT_MAX_TO_KEEP,
            save_keep_interval_hours=self.CHECKPOINT_KEEP_INTERVAL_HOURS,
        )


class ScheduleSteps(NamedTuple):
    """Steps at which the parts of a schedule end.

    Attributes:
      warmup: Last step of the warmup.
      decay_start: Step at which the decay begins.
      decay_end: Step at which the decay ends.
    """

    warmup: int
    decay_start: int
    decay_end: int


class ScheduleOverRun(TrainingLength):
    """A warmup and a decay over the rest of the run.

    A recipe derived from this has WARMUP_STEPS and may have DECAY_START and DECAY_END.
    """

    def schedule_steps(self) -> ScheduleSteps:
        """Return the steps of the schedule, shortened where they do not fit into the run.

        A length is shortened where the schedule would be refused and MAX_STEPS was set after it,
        such as by `--fdl.MAX_STEPS=60` alone. A length that was set with MAX_STEPS stays.
        """
        fields: Any = self
        warmup: int = fields.WARMUP_STEPS
        start: int | None = getattr(fields, "DECAY_START", None)
        end: int | None = getattr(fields, "DECAY_END", None)
        decay_start = warmup if start is None else start
        if end is not None or warmup <= decay_start < self.MAX_STEPS:
            return ScheduleSteps(warmup, decay_start, self.MAX_STEPS if end is None else end)
        most = longest_warmup(self.MAX_STEPS)
        if is_set_before(fields, "WARMUP_STEPS", "MAX_STEPS"):
            warmup = min(warmup, most)
        if start is None:
            decay_start = warmup
        elif is_set_before(fields, "DECAY_START", "MAX_STEPS"):
            decay_start = min(start, max(warmup, most))
        return ScheduleSteps(warmup, decay_start, self.MAX_STEPS)

    def start_notes(self) -> list[str]:
        """Return which lengths were shortened because only the number of steps was changed."""
        steps = self.schedule_steps()
        lengths = {"WARMUP_STEPS": steps.warmup, "DECAY_START": steps.decay_start}
        given = {name: getattr(self, name, None) for name in lengths}
        shortened = [name for name in lengths if given[name] not in (None, lengths[name])]
        if not shortened:
            return []
        changes = ", ".join(f"{name} {given[name]} → {lengths[name]}" for name in shortened)
        return [
            f"schedule     {changes}, to fit into MAX_STEPS={self.MAX_STEPS} unless you set"
            f" {'it' if len(shortened) == 1 else 'them'}"
        ]


class AdamExponential(TrainingLength):
    """Adam with an update cap; linear warmup, then exponential decay to a tenth."""

    LEARNING_RATE: float = 1e-3
    ADAM_BETA1: float = 0.9
    ADAM_BETA2: float = 0.99
    ADAM_EPSILON: float = 1e-6
    WEIGHT_DECAY: float = 1e-3
    CLIP_GRADIENT_NORM: float | None = 5.0
    UPDATE_RMS_CAP: float | None = 1.0
    WARMUP_STEPS: int = 4000
    DECAY_START: int = 4001
    DECAY_END: int = 300_000
    MIN_LEARNING_RATE_RATIO: float = 0.1

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "LEARNING_RATE": 3e-3,
        "WARMUP_STEPS": 5,
        "DECAY_START": 6,
        "DECAY_END": 200,
    }

    def learner(self) -> Config:
        """The config of the learner."""
        check_optimizer_numbers(self)
        return Learner.HParams.config(
            optimizer=Partial(
                adam_with_update_cap,
                b1=self.ADAM_BETA1,
                b2=self.ADAM_BETA2,
                eps=self.ADAM_EPSILON,
                weight_decay=self.WEIGHT_DECAY,
                update_rms_cap=self.UPDATE_RMS_CAP,
            ),
            learning_rate=Config(
                linear_warmup_exponential_decay,
                self.LEARNING_RATE,
                warmup_steps=self.WARMUP_STEPS,
                decay_start=self.DECAY_START,
                decay_end=self.DECAY_END,
                min_ratio=self.MIN_LEARNING_RATE_RATIO,
            ),
            clip_global_norm=self.CLIP_GRADIENT_NORM,
        )


class AdamWCosine(ScheduleOverRun):
    """AdamW; linear warmup, then a cosine over the rest of the run."""

    LEARNING_RATE: float = 1e-3
    ADAM_BETA1: float = 0.9
    ADAM_BETA2: float = 0.95
    ADAM_EPSILON: float = 1e-8
    WEIGHT_DECAY: float = 0.1
    DECAYED_WEIGHTS: Literal["matrices", "all"] = "matrices"
    """`all` decays scales and biases too, as Pax does."""
    CLIP_GRADIENT_NORM: float | None = 1.0
    WARMUP_STEPS: int = 100
    DECAY_START: int | None = None
    """Where the cosine begins; None for WARMUP_STEPS."""
    DECAY_END: int | None = None
    """Where the learning rate has come down; None for MAX_STEPS."""
    MIN_LEARNING_RATE_RATIO: float = 0.1

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "LEARNING_RATE": 3e-3,
        "WARMUP_STEPS": 5,
        "DECAY_START": None,
        "DECAY_END": None,
    }

    def learner(self) -> Config:
        """The config of the learner."""
        steps = self.schedule_steps()
        return adamw_learner(
            self,
            decayed=decays if self.DECAYED_WEIGHTS == "matrices" else None,
            learning_rate=Config(
                linear_warmup_cosine_decay,
                self.LEARNING_RATE,
                warmup_steps=steps.warmup,
                decay_start=steps.decay_start,
                decay_end=steps.decay_end,
                min_ratio=self.MIN_LEARNING_RATE_RATIO,
            ),
        )


def adamw_learner(
    fields: Any, *, decayed: Callable[[Any], Any] | None, learning_rate: Config
) -> Config:
    """The config of a learner by AdamW.

    Args:
      fields: A recipe with the fields of Adam, WEIGHT_DECAY and CLIP_GRADIENT_NORM.
      decayed: Tells which weights decay; None for all.
      learning_rate: The config of its schedule.

    Raises:
      UsageError: a field has a number that no run can want.
    """
    check_optimizer_numbers(fields)
    return Learner.HParams.config(
        optimizer=Partial(
            optax.adamw,
            b1=fields.ADAM_BETA1,
            b2=fields.ADAM_BETA2,
            eps=fields.ADAM_EPSILON,
            weight_decay=fields.WEIGHT_DECAY,
            mask=decayed,
        ),
        learning_rate=learning_rate,
        clip_global_norm=fields.CLIP_GRADIENT_NORM,
    )


def check_optimizer_numbers(fields: Any) -> None:
    """Refuses numbers with which an optimizer would run, and learn nothing.

    Args:
      fields: A recipe; of the fields that are checked, it need not have all.

    Raises:
      UsageError: one is out of range, by the name of its field.
    """
    for names, limit, expected in (
        (_NOT_NEGATIVE, math.inf, "a finite number from 0"),
        (_BELOW_ONE, 1.0, "from 0 to below 1"),
    ):
        for name in names:
            value = getattr(fields, name, 0.0)
            if not 0 <= value < limit:  # nor is NaN
                raise UsageError(f"{type(fields).__qualname__}.{name}={value} must be {expected}")
