"""Tests of the pipeline schedule, compared with a simulation."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from layerkit.ops.pipeline_schedule import PipelineSchedule, bubble_fraction

# (stages, microbatches, repeats)
SIZES = [(1, 1, 1), (4, 2, 1), (3, 7, 1), (1, 3, 2), (2, 2, 3), (3, 5, 2), (5, 7, 3)]


def table(schedule):
    """Who does what: {(tick, stage): (round, microbatch)}, without the bubbles."""
    work = jax.tree.map(np.asarray, schedule.work_at(np.arange(schedule.num_ticks)[:, None]))
    fields = np.stack([work.round, work.microbatch], axis=-1)
    cells = itertools.product(range(schedule.num_ticks), range(schedule.num_stages))
    return {cell: tuple(fields[cell].tolist()) for cell in cells if work.is_real[cell]}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_schedule_runs_each_task_once_after_its_inputs(sizes):
    stages, microbatches, repeats = sizes
    schedule = PipelineSchedule(*sizes)
    work, done = table(schedule), {}
    for (tick, stage), (round_, microbatch) in work.items():
        assert (round_, microbatch, stage) not in done
        done[round_, microbatch, stage] = tick
        if stage > 0:  # what the stage before it computed at the last tick
            assert done[round_, microbatch, stage - 1] == tick - 1
        elif round_ > 0:
            assert done[round_ - 1, microbatch, stages - 1] < tick
    assert len(done) == repeats * microbatches * stages
    ticks = schedule.ticks_of_work()
    assert ticks.shape == (repeats, microbatches, stages)
    assert all(ticks[piece] == tick for piece, tick in done.items())

    cells = schedule.num_ticks * stages
    np.testing.assert_allclose(schedule.bubble_fraction, (cells - len(work)) / cells, rtol=1e-12)


def test_serial_numbers_are_unique():
    schedule = PipelineSchedule(3, 4, 2)
    work = schedule.work_at(np.arange(schedule.num_ticks)[:, None])
    numbers = np.asarray(work.serial)[np.asarray(work.is_real)]
    assert len(np.unique(numbers)) == 3 * 4 * 2


def test_number_of_bubbles_equals_known_schedules():
    # Narayanan et al. (2021), section 2.2: (p - 1) / (v·m) of the ideal time, so of the whole time
    # (p - 1) / (v·m + p - 1). Huang et al. (2019): negligible where there are 4 times as many
    # microbatches as stages.
    assert bubble_fraction(num_stages=4, num_microbatches=8) == 3 / 11
    assert bubble_fraction(num_stages=4, num_microbatches=8, circular_repeats=2) == 3 / 19
    assert bubble_fraction(num_stages=8, num_microbatches=32) < 0.18
    assert bubble_fraction(num_stages=1, num_microbatches=5) == 0.0
