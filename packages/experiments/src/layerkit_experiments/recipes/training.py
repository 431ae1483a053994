"""Training settings of experiments: the learner, the mesh, and the number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import optax

from layerkit.base.sharding import DEFAULT_RULES
from layerkit.config import Config, Partial
from layerkit.config.checks import (
    check_non_negative,
    check_positive,
    check_rates,
)
from layerkit_experiments.recipes.optimizer_choices import OptimizerChoice
from layerkit_experiments.recipes.schedule_choices import ScheduleChoice
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.config.stages import Stage
from layerkit_runner.optim import schedules
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.optimizers import decays
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.step.train_hparams import TrainHParams, summary_interval

_CHECKS: dict[str, Callable[..., None]] = {
    "LEARNING_RATE": check_non_negative,
    "LEARNING_RATE_SCALE": check_non_negative,
    "ADAM_EPSILON": check_non_negative,
    "WEIGHT_DECAY": check_non_negative,
    "SECOND_MOMENT_DECAY": check_non_negative,
    "ADAM_BETA1": check_rates,
    "ADAM_BETA2": check_rates,
    "UPDATE_RMS_CAP": check_positive,
}


def train_config(fields: Any, learner: Config) -> Config:
    """Return the training config of a task with a learner."""
    interval = fields.SUMMARY_INTERVAL_STEPS
    return TrainHParams.HParams.config(
        learner=learner,
        num_train_steps=fields.MAX_STEPS,
        gradient_accumulation_steps=fields.GRADIENT_ACCUMULATION_STEPS,
        random_seed=fields.SEED,
        summary_interval_steps=summary_interval(fields.MAX_STEPS) if interval is None else interval,
        eval_interval_steps=fields.EVAL_INTERVAL_STEPS,
        decode_interval_steps=fields.DECODE_INTERVAL_STEPS,
        save_interval_steps=fields.CHECKPOINT_EVERY_N_STEPS,
        save_max_to_keep=fields.CHECKPOINT_MAX_TO_KEEP,
        save_keep_interval_hours=fields.CHECKPOINT_KEEP_INTERVAL_HOURS,
    )


def adamw_cosine(fields: Any) -> Config:
    """Return AdamW with a linear warmup, then a cosine down to MIN_LEARNING_RATE_RATIO."""
    ratio, cosine = fields.MIN_LEARNING_RATE_RATIO, schedules.linear_warmup_cosine_decay
    rate = schedule_learning_rate(fields, cosine, min_ratio=ratio)
    return adamw(fields, rate, decays_all=fields.DECAYED_WEIGHTS == "all")


def adamw(fields: Any, learning_rate: Config, *, decays_all: bool = False) -> Config:
    """Return AdamW, or OPTIMIZER, with a schedule that has a `peak` and a `min_ratio`.

    It decays the weights that declare it (matrices), or all.
    """
    optimizer = Partial(optax.adamw, mask=None if decays_all else decays)
    learner = checked_learner(fields, optimizer, learning_rate)
    return OptimizerChoice.of(fields).set_optimizer(learner, fields)


def checked_learner(fields: Any, optimizer: Partial, learning_rate: Config) -> Config:
    """Return the config of a learner, after a check of numbers with which it would not learn."""
    for name, check in _CHECKS.items():
        if hasattr(fields, name):
            check(type(fields).__qualname__, **{name: getattr(fields, name)})
    return Learner.HParams.config(
        optimizer=optimizer,
        learning_rate=ScheduleChoice.join_stages(fields) or learning_rate,
        clip_global_norm=fields.CLIP_GRADIENT_NORM,
    )


def schedule_learning_rate(fields: Any, schedule: Callable[..., Any], **options: Any) -> Config:
    """Return the config of a schedule with LEARNING_RATE and the steps of the fields.

    It has `options`, unless LEARNING_RATE_SCHEDULE names another one.
    """
    choice = ScheduleChoice.of(fields) or ScheduleChoice(schedule, options=options)
    return choice.config(fields)


def learner_notes(experiment: Any) -> list[str]:
    """Return lines for the start report on OPTIMIZER and on a shortened schedule."""
    return [*OptimizerChoice.notes(experiment), *ScheduleChoice.notes(experiment)]


def spmd(fields: Any, *, axes: tuple[str, ...] = (), **rules: Any) -> Config:
    """Return a partitioner that runs one program over the mesh of ICI_MESH_SHAPE.

    A device keeps the whole inputs of its layers by default. SEQUENCE_PARALLEL shards them by
    position over tensor, and `shards_features` by feature, as Pax does for the largest models.

    Args:
      fields: Experiment with the fields of the mesh of `TrainedExperiment`.
      axes: Names of axes before those of `mesh_axes`.
      **rules: Mesh axes by the names of logical axes, in place of the default rules.
    """
    if fields.SEQUENCE_PARALLEL:
        rules["residual_length"] = ("context", "tensor")
    elif fields.shards_features:
        rules["act_embed"] = "tensor"
    return SpmdPartitioner.HParams.config(
        mesh_axis_names=(*axes, *fields.mesh_axes),
        ici_mesh_shape=fields.ICI_MESH_SHAPE,
        dcn_mesh_shape=fields.DCN_MESH_SHAPE,
        rules=DEFAULT_RULES.replace(**rules),
    )


class TrainedExperiment(BaseExperiment, abstract=True):
    """Base of all experiments here: training by OPTIMIZER with a cosine on a mesh.

    A subclass lists fields that its `learner()` or `partitioner()` ignores in `unused_fields`.
    """

    mesh_axes: ClassVar[tuple[str, ...]] = ("data", "fsdp", "tensor")
    """Names of the mesh axes, in the order of ICI_MESH_SHAPE."""
    shards_features: ClassVar[bool] = False
    """True to shard the activations between layers over tensor; see `spmd`."""

    MAX_STEPS: int = 300_000
    STAGES: list[Stage] | None = None
    """Parts of the run with a batch, length, mixture or rate of their own; see docs/stages.md."""
    GRADIENT_ACCUMULATION_STEPS: int = 1
    """Number of equal parts of a batch, which are computed one after another."""
    SUMMARY_INTERVAL_STEPS: int | None = None
    """Steps between two reports of metrics; None for 100, or a hundredth of a shorter run."""
    EVAL_INTERVAL_STEPS: int | None = 100
    DECODE_INTERVAL_STEPS: int | None = None
    CHECKPOINT_EVERY_N_STEPS: int = 5000
    CHECKPOINT_MAX_TO_KEEP: int | None = 10
    CHECKPOINT_KEEP_INTERVAL_HOURS: float | None = None
    """Hours per checkpoint that is kept permanently besides the newest; None keeps no others."""
    SEED: int = 1234

    # Optimizer, a linear warmup and a cosine.
    OPTIMIZER: str = "adamw"
    """Name in `OPTIMIZERS` of recipes/optimizer_choices.py; other rates are factors of AdamW's."""
    LEARNING_RATE: float = 1e-3
    LEARNING_RATE_SCHEDULE: str | None = None
    """Name in `SCHEDULES` of recipes/schedule_choices.py; None for that of the experiment."""
    ADAM_BETA1: float = 0.9
    ADAM_BETA2: float = 0.95
    ADAM_EPSILON: float = 1e-8
    WEIGHT_DECAY: float = 0.1
    DECAYED_WEIGHTS: Literal["matrices", "all"] = "matrices"
    """`all` also decays scales and biases, as Pax does."""
    CLIP_GRADIENT_NORM: float | None = 1.0
    WARMUP_STEPS: int | float = 100
    """Steps, or a fraction of MAX_STEPS below 1."""
    DECAY_START: int | float | None = None
    """Step, or fraction, at which the decay begins; None for the end of the warmup."""
    DECAY_END: int | float | None = None
    """Step, or fraction, at which the decay ends; None for MAX_STEPS."""
    MIN_LEARNING_RATE_RATIO: float = 0.1

    # Mesh.
    SEQUENCE_PARALLEL: bool = False
    """True to split norms and residuals by position over tensor."""
    ICI_MESH_SHAPE: list[int] | None = None
    """Sizes of the mesh axes within a slice; None puts all devices on the axis data."""
    DCN_MESH_SHAPE: list[int] | None = None
    """Sizes of the mesh axes across slices; None for one slice."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "GRADIENT_ACCUMULATION_STEPS": 1,
        "MAX_STEPS": 200,
        "SUMMARY_INTERVAL_STEPS": 10,
        "EVAL_INTERVAL_STEPS": 100,
        "CHECKPOINT_EVERY_N_STEPS": 100,
        "LEARNING_RATE": 3e-3,
        "WARMUP_STEPS": 5,
        "DECAY_START": None,
        "DECAY_END": None,
        "ICI_MESH_SHAPE": None,
        "DCN_MESH_SHAPE": None,
    }

    learner = adamw_cosine
    start_notes = learner_notes
    stage_fields = {"stages": "STAGES", "num_steps": "MAX_STEPS", "row_length": "MAX_SEQ_LEN"}

    def partitioner(self) -> Config:
        """Return the config of the partitioner."""
        return spmd(self)
