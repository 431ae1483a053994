"""The policy as tables: steps and times in, decisions out; and one real run that follows it."""

from __future__ import annotations

import datetime
import re

import jax.numpy as jnp
import pytest

from layerkit_runner.checkpoints import CheckpointManager, CheckpointPolicy, SavedStep

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def saved(*step_and_hours: tuple[int, float]) -> list[SavedStep]:
    return [SavedStep(step, START + datetime.timedelta(hours=at)) for step, at in step_and_hours]


@pytest.mark.parametrize(
    ("step", "last_saved", "due"),
    [
        (0, None, False),
        (1, None, False),
        (9, None, False),
        (10, None, True),
        (11, 10, False),
        (20, 10, True),
        (20, 20, False),  # saved or being saved
        (20, 15, True),  # after an off-interval save on preemption, the multiples stand
        (25, 15, False),
        (10, 20, False),  # never back
    ],
)
def test_saves_at_multiples_of_the_interval(step, last_saved, due):
    policy = CheckpointPolicy(save_interval_steps=10)
    assert policy.should_save(step, last_saved=last_saved) is due


def test_step_zero_is_due_only_when_asked_for_and_only_once():
    policy = CheckpointPolicy(save_interval_steps=10, save_step_zero=True)
    assert policy.should_save(0, last_saved=None)
    assert not policy.should_save(0, last_saved=0)


HOURLY_AT_TEN = [(step, step / 10) for step in range(10, 101, 10)]  # step 10 at 1 h, 20 at 2 h, …


@pytest.mark.parametrize(
    ("max_to_keep", "hours", "steps_kept"),
    [
        (3, None, {80, 90, 100}),
        (100, None, set(range(10, 101, 10))),
        (None, None, set(range(10, 101, 10))),
        # 10 is the anchor; then the first one 4 h or more after the last kept: 50, 90.
        (2, 4, {10, 50, 90, 100}),
        # 3.5 h after 10 (at 1 h) is 4.5 h: 50 at 5 h; then 8.5 h: 90 at 9 h.
        (1, 3.5, {10, 50, 90, 100}),
        (1, 24, {10, 100}),
    ],
)
def test_keeps_the_newest_and_one_per_duration(max_to_keep, hours, steps_kept):
    interval = None if hours is None else datetime.timedelta(hours=hours)
    policy = CheckpointPolicy(max_to_keep=max_to_keep, keep_interval=interval)
    assert policy.steps_to_keep(saved(*HOURLY_AT_TEN)) == steps_kept
    assert policy.steps_to_keep(saved(*reversed(HOURLY_AT_TEN))) == steps_kept


def test_applying_the_rule_after_every_save_keeps_the_same_as_at_the_end():
    policy = CheckpointPolicy(max_to_keep=2, keep_interval=datetime.timedelta(hours=4))
    there: list[SavedStep] = []
    for new in saved(*HOURLY_AT_TEN):
        kept = policy.steps_to_keep([*there, new])
        there = [checkpoint for checkpoint in [*there, new] if checkpoint.step in kept]
    assert [checkpoint.step for checkpoint in there] == [10, 50, 90, 100]


def test_nothing_saved_keeps_nothing():
    assert CheckpointPolicy().steps_to_keep([]) == frozenset()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"save_interval_steps": 0},
            "CheckpointPolicy.save_interval_steps is 0; expected at least 1. To write no "
            "checkpoints at all, make no CheckpointManager.",
        ),
        (
            {"max_to_keep": 0},
            "CheckpointPolicy.max_to_keep is 0; expected at least 1, or None to keep every "
            "checkpoint.",
        ),
        (
            {"keep_interval": datetime.timedelta(0)},
            "CheckpointPolicy.keep_interval is 0:00:00; expected a positive duration, or None to "
            "keep no checkpoint for its age.",
        ),
    ],
)
def test_values_out_of_range_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CheckpointPolicy(**fields)


def test_a_run_and_its_continuation_leave_what_the_policy_says(tmp_path):
    policy = CheckpointPolicy(save_interval_steps=3, max_to_keep=2, keep_interval=None)
    state = {"w": jnp.ones(4)}
    written = []
    for steps in (range(8), range(7, 14)):  # stopped after step 7, and continued
        with CheckpointManager(tmp_path, policy=policy) as manager:
            for step in steps:
                if manager.save(step, state, input_states={}, metadata={}):
                    written.append(step)
    assert written == [3, 6, 9, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint_00000009",
        "checkpoint_00000012",
    ]


def test_the_anchor_of_the_duration_survives_a_continuation(tmp_path):
    policy = CheckpointPolicy(
        save_interval_steps=1, max_to_keep=1, keep_interval=datetime.timedelta(hours=1)
    )
    for steps in ((1, 2), (3, 4)):
        with CheckpointManager(tmp_path, policy=policy) as manager:
            for step in steps:
                manager.save(step, {"w": jnp.ones(4)}, input_states={}, metadata={})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint_00000001",
        "checkpoint_00000004",
    ]
