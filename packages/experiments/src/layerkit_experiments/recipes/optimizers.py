"""Optimizers, schedules and intervals of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, cast

import optax

from layerkit.config import Config, Partial
from layerkit.config.checks import check_non_negative, check_positive, check_rates, check_sizes
from layerkit_runner.config.experiment import is_set_before
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.optimizers import adam_with_update_cap, decays
from layerkit_runner.optim.schedules import (
    linear_warmup_cosine_decay,
    linear_warmup_exponential_decay,
    longest_warmup,
)
from layerkit_runner.step.train_hparams import TrainHParams, summary_interval

_NON_NEGATIVE = (
    "LEARNING_RATE",
    "LEARNING_RATE_SCALE",
    "ADAM_EPSILON",
    "WEIGHT_DECAY",
    "SECOND_MOMENT_DECAY",
)
_RATES = ("ADAM_BETA1", "ADAM_BETA2")
_POSITIVE = ("UPDATE_RMS_CAP",)


class TrainingLength:
    """Number of steps, and intervals of summaries, evaluation and checkpoints."""

    MAX_STEPS: int = 300_000
    SUMMARY_INTERVAL_STEPS: int = 100
    """Steps between two reports of metrics; see `summary_interval_steps` for short runs."""
    EVAL_INTERVAL_STEPS: int | None = 100
    DECODE_INTERVAL_STEPS: int | None = None
    CHECKPOINT_EVERY_N_STEPS: int = 5000
    CHECKPOINT_MAX_TO_KEEP: int | None = 10
    CHECKPOINT_KEEP_INTERVAL_HOURS: float | None = None
    """Hours per checkpoint that is kept permanently besides the newest; None keeps no others."""
    SEED: int = 1234

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "MAX_STEPS": 200,
        "SUMMARY_INTERVAL_STEPS": 10,
        "EVAL_INTERVAL_STEPS": 100,
        "CHECKPOINT_EVERY_N_STEPS": 100,
    }

    def validate(self) -> None:
        """Check the number of steps before schedules use it.

        Raises:
          ConfigError: MAX_STEPS is below 1.
        """
        super().validate()  # type: ignore[misc]
        check_sizes(None, MAX_STEPS=self.MAX_STEPS)

    def summary_interval_steps(self) -> int:
        """Return SUMMARY_INTERVAL_STEPS, or at most MAX_STEPS / 100 if that is set after it.

        MAX_STEPS is set after it by `--fdl.MAX_STEPS=60` alone, or by a class that sets MAX_STEPS.
        """
        every = self.SUMMARY_INTERVAL_STEPS
        if is_set_before(cast(Any, self), "SUMMARY_INTERVAL_STEPS", "MAX_STEPS"):
            return summary_interval(self.MAX_STEPS, at_most=every)
        return every

    def train_config(self, learner: Config) -> Config:
        """Return the training config of the task with this learner."""
        return TrainHParams.HParams.config(
            learner=learner,
            num_train_steps=self.MAX_STEPS,
            random_seed=self.SEED,
            summary_interval_steps=self.summary_interval_steps(),
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

    def config(self, schedule: Callable[..., Any], peak: float, **options: Any) -> Config:
        """Return the config of a schedule of the runner with these steps.

        Args:
          schedule: Function such as `linear_warmup_cosine_decay`.
          peak: Highest rate.
          **options: Other arguments of the function.
        """
        return Config(
            schedule,
            peak,
            warmup_steps=self.warmup,
            decay_start=self.decay_start,
            decay_end=self.decay_end,
            **options,
        )


class ScheduleOverRun(TrainingLength):
    """A schedule of a warmup and a decay over the rest of the run.

    A subclass has WARMUP_STEPS, and optionally DECAY_START and DECAY_END.
    """

    def schedule_steps(self) -> ScheduleSteps:
        """Return the steps of the schedule, shortened if they do not fit into the run.

        A length is shortened if the schedule would be invalid and MAX_STEPS was set after it, such
        as by `--fdl.MAX_STEPS=60` alone. A length that was set with MAX_STEPS is kept.
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
        """Return a note about lengths that were shortened because only MAX_STEPS was changed."""
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


class ExponentialDecay(TrainingLength):
    """Linear warmup, then exponential decay to a tenth, with the defaults of Pax.

    A subclass defines the optimizer, and may define another decay.
    """

    LEARNING_RATE: float = 1e-3
    ADAM_BETA1: float = 0.9
    ADAM_BETA2: float = 0.99
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

    def optimizer(self) -> Partial:
        """Return the optimizer without its learning rate."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define optimizer")

    def schedule(self) -> Config:
        """Return the config of the schedule."""
        return self.schedule_of(linear_warmup_exponential_decay)

    def schedule_of(self, function: Callable[..., Any]) -> Config:
        """Return the config of a schedule of the runner with the fields of this recipe."""
        steps = ScheduleSteps(self.WARMUP_STEPS, self.DECAY_START, self.DECAY_END)
        return steps.config(function, self.LEARNING_RATE, min_ratio=self.MIN_LEARNING_RATE_RATIO)

    def learner(self) -> Config:
        """Return the config of the learner."""
        check_optimizer_numbers(self)
        return Learner.HParams.config(
            optimizer=self.optimizer(),
            learning_rate=self.schedule(),
            clip_global_norm=self.CLIP_GRADIENT_NORM,
        )


class AdamExponential(ExponentialDecay):
    """Adam with an update cap; linear warmup, then exponential decay to a tenth."""

    ADAM_EPSILON: float = 1e-6

    def optimizer(self) -> Partial:
        """Return Adam."""
        return Partial(
            adam_with_update_cap,
            b1=self.ADAM_BETA1,
            b2=self.ADAM_BETA2,
            eps=self.ADAM_EPSILON,
            weight_decay=self.WEIGHT_DECAY,
            update_rms_cap=self.UPDATE_RMS_CAP,
        )


class AdamWCosine(ScheduleOverRun):
    """AdamW; linear warmup, then a cosine over the rest of the run."""

    LEARNING_RATE: float = 1e-3
    ADAM_BETA1: float = 0.9
    ADAM_BETA2: float = 0.95
    ADAM_EPSILON: float = 1e-8
    WEIGHT_DECAY: float = 0.1
    DECAYED_WEIGHTS: Literal["matrices", "all"] = "matrices"
    """`all` also decays scales and biases, as Pax does."""
    CLIP_GRADIENT_NORM: float | None = 1.0
    WARMUP_STEPS: int = 100
    DECAY_START: int | None = None
    """Step at which the cosine begins; None for WARMUP_STEPS."""
    DECAY_END: int | None = None
    """Step at which the decay ends; None for MAX_STEPS."""
    MIN_LEARNING_RATE_RATIO: float = 0.1

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "LEARNING_RATE": 3e-3,
        "WARMUP_STEPS": 5,
        "DECAY_START": None,
        "DECAY_END": None,
    }

    def learner(self) -> Config:
        """Return the config of the learner."""
        return adamw_learner(
            self,
            decayed=decays if self.DECAYED_WEIGHTS == "matrices" else None,
            learning_rate=self.schedule_steps().config(
                linear_warmup_cosine_decay,
                self.LEARNING_RATE,
                min_ratio=self.MIN_LEARNING_RATE_RATIO,
            ),
        )


def adamw_learner(
    fields: Any, *, decayed: Callable[[Any], Any] | None, learning_rate: Config
) -> Config:
    """Return the config of a learner with AdamW.

    Args:
      fields: A recipe with the fields of Adam, WEIGHT_DECAY and CLIP_GRADIENT_NORM.
      decayed: Function that returns a mask of decayed weights; None decays all.
      learning_rate: Config of the schedule.

    Raises:
      ConfigError: A number is out of range.
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
    """Check numbers with which an optimizer would run without learning.

    Args:
      fields: A recipe, which need not have all checked fields.

    Raises:
      ConfigError: A number is out of range.
    """
    owner = type(fields).__qualname__
    for names, check in (
        (_NON_NEGATIVE, check_non_negative),
        (_RATES, check_rates),
        (_POSITIVE, check_positive),
    ):
        check(owner, **{name: getattr(fields, name) for name in names if hasattr(fields, name)})
