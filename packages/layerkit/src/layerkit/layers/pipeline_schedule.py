"""When each stage of a pipeline works on what: the arithmetic of GPipe and of circular schedules.

M microbatches pass through S stages, and in a circular schedule R times around. Stage s begins one
tick after stage s - 1, and then has M·R pieces of work without a pause: the microbatches in order,
round after round. So the whole takes M·R + S - 1 ticks, of which each stage idles in S - 1, before
its first piece and after its last. Those are the bubbles.

With R = 1 this is GPipe (Huang et al., 2019, arXiv:1811.06965). In a circular schedule (Narayanan
et al., 2021, arXiv:2104.04473, forward passes only) each stage holds R pieces of the depth that lie
apart, so that a tick is R times shorter and so are the bubbles.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Work(NamedTuple):
    """What stages do at a tick, each field `[..., stage]`, or a scalar for one stage.

    Attributes:
      is_real: Whether there is work; False in a bubble, where the others are those of a neighbour.
      round: int32, which of the circular repeats.
      microbatch: int32, of which microbatch.
      serial: int32, a number of its own for each stage, round and microbatch.
    """

    is_real: jax.Array
    round: jax.Array
    microbatch: jax.Array
    serial: jax.Array


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """The plan of one pass of a batch through a pipeline.

    Attributes:
      num_stages: S.
      num_microbatches: M.
      circular_repeats: R; 1 is GPipe.
    """

    num_stages: int
    num_microbatches: int
    circular_repeats: int = 1

    @property
    def num_ticks(self) -> int:
        """From the first microbatch entering to the last one leaving, in passes of one stage."""
        return self.num_microbatches * self.circular_repeats + self.num_stages - 1

    @property
    def bubble_fraction(self) -> float:
        """Part of the ticks in which a stage has nothing to do."""
        return (self.num_stages - 1) / self.num_ticks

    def work_at(self, tick: jax.Array) -> Work:
        """What each stage does at `tick`, int32 `[]` or `[ticks, 1]`; fields `[..., stage]`."""
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
        """The tick of each piece of work: int `[repeats, microbatches, stages]`."""
        pieces = np.arange(self.num_microbatches * self.circular_repeats)
        ticks = pieces[:, None] + np.arange(self.num_stages)
        return ticks.reshape(self.circular_repeats, self.num_microbatches, self.num_stages)


def bubble_fraction(*, num_stages: int, num_microbatches: int, circular_repeats: int = 1) -> float:
    """Part of a pipeline's time in which a stage has nothing to do.

    (S - 1) / (M·R + S - 1) for S stages, M microbatches and R circular repeats.

    >>> bubble_fraction(num_stages=4, num_microbatches=16)
    0.15789473684210525
    >>> bubble_fraction(num_stages=4, num_microbatches=16, circular_repeats=4)
    0.04477611940298507
    """
    return PipelineSchedule(num_stages, num_microbatches, circular_repeats).bubble_fraction
