"""SkippedSteps: messages about steps that were not valid, and the limit that ends a run."""

from __future__ import annotations

import math
from typing import Any

import optax
import pytest

from layerkit.config import Partial
from layerkit_runner.optim.learner import Learner
from layerkit_runner.run.programs.skipped_steps import SkippedSteps
from layerkit_runner.step.train_hparams import TrainHParams


def skipped_steps(**fields: Any) -> SkippedSteps:
    learner = Learner.HParams.config(optimizer=Partial(optax.sgd), learning_rate=0.1)
    return SkippedSteps(TrainHParams.HParams.config(learner=learner, **fields).Instantiate())


def add(
    skipped: SkippedSteps, step: int, *, loss: float = math.nan, norm: float = 1.0
) -> str | None:
    return skipped.add(step, loss_name="xent", loss=loss, grad_norm=norm)


def test_problem_is_set_at_the_limit_of_steps_in_a_row():
    skipped = skipped_steps(max_consecutive_skipped_steps=3)
    skipped.add_valid()
    for step in (2, 3, 5, 6):
        if step == 5:
            skipped.add_valid()
        add(skipped, step)
        assert skipped.problem is None
    add(skipped, 7)
    problem = skipped.problem
    assert problem is not None and "step 7" in problem and "xent=nan" in problem
    # A step that was under way and was valid does not take it back.
    skipped.add_valid()
    assert skipped.problem == problem


@pytest.mark.parametrize(
    ("max_in_a_row", "num_train_steps", "expected"),
    [(100, 1000, 10), (4, 1000, 4), (100, 6, 6), (None, 1000, None)],
)
def test_limit_is_lower_before_any_valid_step(
    max_in_a_row: int | None, num_train_steps: int, expected: int | None
):
    skipped = skipped_steps(
        max_consecutive_skipped_steps=max_in_a_row, num_train_steps=num_train_steps
    )
    ended_at = None
    for step in range(1, 200):
        add(skipped, step)
        if skipped.problem is not None and ended_at is None:
            ended_at = step
    assert ended_at == expected


def test_resumed_counts_are_those_of_an_uninterrupted_run():
    straight = skipped_steps(max_consecutive_skipped_steps=20)
    straight.add_valid()
    for step in range(2, 6):
        add(straight, step)
    resumed = skipped_steps(max_consecutive_skipped_steps=20)
    resumed.restore(straight.record())
    for step in range(6, 22):
        for counts in (straight, resumed):
            assert counts.problem is None
            add(counts, step)
    assert resumed.problem == straight.problem is not None
    assert resumed.record() == straight.record() == {"in_a_row": 20, "in_all": 20}


@pytest.mark.parametrize(
    ("fraction", "bad", "num_steps", "ends_at"),
    [
        (0.5, range(2, 60), 60, 32),  # 31 of 60 steps are more than half, whatever follows.
        (0.5, range(2, 61, 2), 60, None),
        (0.0, [7], 60, 7),
        (None, range(2, 60), 60, None),
    ],
)
def test_more_skipped_steps_than_the_fraction_of_all_are_a_problem(
    fraction: float | None, bad: Any, num_steps: int, ends_at: int | None
):
    skipped = skipped_steps(num_train_steps=num_steps, max_skipped_steps_fraction=fraction)
    for step in range(1, num_steps + 1):
        if step in bad:
            add(skipped, step)
        else:
            skipped.add_valid()
        if skipped.problem is not None:
            break
    skipped.apply_limits(step, is_over=True)
    assert (None if skipped.problem is None else step) == ends_at


def test_run_that_ends_early_compares_with_its_completed_steps():
    skipped = skipped_steps(num_train_steps=1000, max_skipped_steps_fraction=0.5)
    skipped.restore({"in_a_row": 0, "in_all": 6})
    skipped.apply_limits(10)
    assert skipped.problem is None
    skipped.apply_limits(10, is_over=True)
    assert skipped.problem is not None and "6 of 10 steps were not valid" in skipped.problem


def test_limit_after_completed_steps_is_not_lowered():
    skipped = skipped_steps(max_consecutive_skipped_steps=50)
    for step in range(1001, 1030):
        add(skipped, step)
    # 1000 steps were taken, so the lower limit of a run without a valid step does not apply.
    assert skipped.problem is None


def test_long_row_is_reported_every_tenth_step_after_the_first_ten():
    skipped = skipped_steps()
    reported = [step for step in range(1, 41) if add(skipped, step) is not None]
    assert reported == [*range(1, 11), 20, 30, 40]
