"""Training settings of experiments: the number of steps, intervals, optimizer and mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from layerkit.config import Config
from layerkit_experiments.recipes.meshes import spmd
from layerkit_experiments.recipes.optimizers import adamw_cosine, schedule_notes
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.step.train_hparams import TrainHParams, summary_interval


class TrainedExperiment(BaseExperiment, abstract=True):
    """Base of experiments that are not language models: training by AdamW on a mesh.

    A subclass that overrides `learner()` or `partitioner()` lists what it does not read in
    `unused_fields`.
    """

    mesh_axes: ClassVar[tuple[str, ...]] = ("data", "fsdp", "tensor")
    """Names of the mesh axes, in the order of ICI_MESH_SHAPE."""
    shards_features: ClassVar[bool] = False
    """True to shard the activations between layers over tensor; see `recipes.meshes.spmd`."""

    MAX_STEPS: int = 300_000
    SUMMARY_INTERVAL_STEPS: int | None = None
    """Steps between two reports of metrics; None for 100, or a hundredth of a shorter run."""
    EVAL_INTERVAL_STEPS: int | None = 100
    DECODE_INTERVAL_STEPS: int | None = None
    CHECKPOINT_EVERY_N_STEPS: int = 5000
    CHECKPOINT_MAX_TO_KEEP: int | None = 10
    CHECKPOINT_KEEP_INTERVAL_HOURS: float | None = None
    """Hours per checkpoint that is kept permanently besides the newest; None keeps no others."""
    SEED: int = 1234

    LEARNING_RATE: float = 1e-3
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

    SEQUENCE_PARALLEL: bool = False
    """True to split norms and residuals by position over tensor."""
    ICI_MESH_SHAPE: list[int] | None = None
    """[data, fsdp, tensor] within a slice; None puts all devices on data."""
    DCN_MESH_SHAPE: list[int] | None = None
    """[data, fsdp, tensor] across slices; None for one slice."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {
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

    def learner(self) -> Config:
        """Return the config of the learner."""
        return adamw_cosine(self)

    def partitioner(self) -> Config:
        """Return the config of the partitioner."""
        return spmd(self)

    def start_notes(self) -> list[str]:
        """Return a note about a schedule that was shortened."""
        return schedule_notes(self)


def train_config(fields: Any, learner: Config) -> Config:
    """Return the training config of a task.

    Args:
      fields: Experiment with the fields of training of `TrainedExperiment`.
      learner: Config of the learner.
    """
    interval = fields.SUMMARY_INTERVAL_STEPS
    return TrainHParams.HParams.config(
        learner=learner,
        num_train_steps=fields.MAX_STEPS,
        random_seed=fields.SEED,
        summary_interval_steps=summary_interval(fields.MAX_STEPS) if interval is None else interval,
        eval_interval_steps=fields.EVAL_INTERVAL_STEPS,
        decode_interval_steps=fields.DECODE_INTERVAL_STEPS,
        save_interval_steps=fields.CHECKPOINT_EVERY_N_STEPS,
        save_max_to_keep=fields.CHECKPOINT_MAX_TO_KEEP,
        save_keep_interval_hours=fields.CHECKPOINT_KEEP_INTERVAL_HOURS,
    )
