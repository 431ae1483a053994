"""Pipelines of a task, and the part of their time in which stages have nothing to do.

The schedule is that of `layerkit.layers.pipeline_schedule`: S stages, M microbatches and R circular
repeats take M·R + S - 1 ticks, of which each stage idles in S - 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit.config import target_of, walk_configs
from layerkit.layers.pipeline import Pipeline
from layerkit.layers.pipeline_schedule import PipelineSchedule
from layerkit.layers.pipelined_transformer import PipelinedTransformer


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """One pipeline of a task.

    Attributes:
      num_stages: S.
      num_microbatches: M, of one pass of rows through it.
      rows_per_microbatch: Rows of each, over all devices.
      circular_repeats: R; 1 is GPipe.
      num_ticks: From the first microbatch entering to the last one leaving.
      bubble_fraction: Part of the ticks in which a stage has nothing to do.
    """

    num_stages: int
    num_microbatches: int
    rows_per_microbatch: int
    circular_repeats: int
    num_ticks: int
    bubble_fraction: float


def pipeline_plans(task: Any, *, rows: int) -> list[PipelinePlan]:
    """The pipelines of a task's config, in the order in which they stand in it.

    Args:
      task: Config of the task; layers have accepted their sizes.
      rows: That go through at a time: of the global batch, or of one part of it where gradients are
        accumulated.
    """
    pipelines = {id(config): config for config in walk_configs(task) if _is_pipeline(config)}
    return [_plan(config, rows) for config in pipelines.values()]


def _is_pipeline(config: Any) -> bool:
    target = target_of(config)
    return isinstance(target, type) and issubclass(target, (Pipeline, PipelinedTransformer))


def _plan(config: Any, rows: int) -> PipelinePlan:
    count = config.num_microbatches
    if count is None:
        count = rows // config.microbatch_size
    schedule = PipelineSchedule(config.num_stages, count, config.circular_repeats)
    return PipelinePlan(
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        rows_per_microbatch=rows // count,
        circular_repeats=schedule.circular_repeats,
        num_ticks=schedule.num_ticks,
        bubble_fraction=schedule.bubble_fraction,
    )
