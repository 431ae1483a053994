"""Schedules of pipelines: GPipe and circular.

M microbatches pass R times through S stages. Stage s starts one tick after stage s - 1 and then
processes M·R microbatches without a pause, in order, round by round. The pipeline takes M·R + S - 1
ticks, of which each stage idles in S - 1 (bubbles), before its first and after its last microbatch.

R = 1 is GPipe (Huang et al., 2019, arXiv:1811.06965). In a circular schedule (Narayanan et al.,
2021, arXiv:2104.04473, forward passes only) each stage has R separate parts of the depth, so ticks
and bubbles are R times shorter.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_IN_SEQUENCE: ContextVar[bool] = ContextVar("stages_in_sequence", default=False)
_MESH_AXES: ContextVar[tuple[str, ...]] = ContextVar("stage_mesh_axes", default=())


@contextlib.contextmanager
def stages_in_sequence() -> Iterator[None]:
    """Return a context in which a pipeline runs its stages one after another on all rows.

    The function is the same, without microbatches and bubbles: its model FLOPs can be counted.
    """
    token = _IN_SEQUENCE.set(True)
    try:
        yield
    finally:
        _IN_SEQUENCE.reset(token)


def are_stages_in_sequence() -> bool:
    """Return whether `stages_in_sequence` applies."""
    return _IN_SEQUENCE.get()


@contextlib.contextmanager
def inside_stages(mesh_axes: tuple[str, ...] | None) -> Iterator[None]:
    """Return a context of the layers of stages that `jax.vmap` splits over these mesh axes."""
    token = _MESH_AXES.set(mesh_axes or ())
    try:
        yield
    finally:
        _MESH_AXES.reset(token)


def stage_mesh_axes() -> tuple[str, ...]:
    """Return the mesh axes of `inside_stages`, which the specs of a `shard_map` cannot name."""
    return _MESH_AXES.get()


class Work(NamedTuple):
    """The work of stages at a tick; each field is `[..., stage]`, or a scalar for one stage.

    Attributes:
      is_real: False in a bubble, where the other fields are those of a neighboring tick.
      round: int32, index of the circular repeat.
      microbatch: int32, index of the microbatch.
      serial: int32, unique number of stage, round and microbatch.
    """

    is_real: jax.Array
    round: jax.Array
    microbatch: jax.Array
    serial: jax.Array


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """The schedule of a batch in a pipeline.

    Attributes:
      num_stages: Number of stages S.
      num_microbatches: Number of microbatches M.
      circular_repeats: Number of rounds R; 1 is GPipe.
    """

    num_stages: int
    num_microbatches: int
    circular_repeats: int = 1

    @property
    def num_ticks(self) -> int:
        """Number of ticks from the entry of the first microbatch to the exit of the last."""
        return self.num_microbatches * self.circular_repeats + self.num_stages - 1

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the ticks in which a stage idles."""
        return (self.num_stages - 1) / self.num_ticks

    def work_at(self, tick: jax.Array) -> Work:
        """Return the work of all stages at `tick`, int32 `[]` or `[ticks, 1]`."""
        stages = jnp.arange(self.num_stages)
        pieces = self.num_microbatches * self.circular_repeats
        piece = tick - stages
        is_real = (piece >= 0) & (piece < pieces)
        piece = jnp.clip(piece, 0, pieces - 1)
        return Work(
            is_real=is_real,
            round=piece // self.num_microbatches,
            microbatch=piece % self.num_microbatches,
            serial=stages * pieces + piece,
        )

    def ticks_of_work(self) -> np.ndarray:
        """Return the tick of each piece of work, int `[repeats, microbatches, stages]`."""
        pieces = np.arange(self.num_microbatches * self.circular_repeats)
        ticks = pieces[:, None] + np.arange(self.num_stages)
        return ticks.reshape(self.circular_repeats, self.num_microbatches, self.num_stages)


def bubble_fraction(*, num_stages: int, num_microbatches: int, circular_repeats: int = 1) -> float:
    """Return the fraction of a pipeline's time in which a stage idles.

    It is (S - 1) / (M·R + S - 1) for S stages, M microbatches and R circular repeats.

    >>> bubble_fraction(num_stages=4, num_microbatches=16)
    0.15789473684210525
    >>> bubble_fraction(num_stages=4, num_microbatches=16, circular_repeats=4)
    0.04477611940298507
    """
    return PipelineSchedule(num_stages, num_microbatches, circular_repeats).bubble_fraction
