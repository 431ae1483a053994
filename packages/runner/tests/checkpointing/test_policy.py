"""The policy of saving and keeping, as tables and in real runs, and recorded evaluations."""

from __future__ import annotations

import dataclasses
import datetime
import math

import jax.numpy as jnp
import pytest
from etils import epath

from layerkit.errors import ConfigError
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy, SavedStep
from layerkit_runner.checkpointing.policy import read_evaluations, write_evaluations

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def saved(*step_and_hours: tuple[int, float]) -> list[SavedStep]:
    return [SavedStep(step, START + datetime.timedelta(hours=at)) for step, at in step_and_hours]


@pytest.mark.parametrize(
    ("step", "last_saved", "due"),
    [
        (0, None, False),
        (9, None, False),
        (10, None, True),
        (11, 10, False),
        (20, 10, True),
        (20, 20, False),  # saved or being saved
        (20, 15, True),  # after an off-interval save on preemption, the multiples stand
        (25, 15, False),
        (10, 20, False),  # never back
        (0, 0, False),  # step 0, which `save_step_zero` saves, is saved once
    ],
)
def test_save_is_due_at_multiples_of_the_interval(step, last_saved, due):
    policy = CheckpointPolicy(save_interval_steps=10)
    assert policy.should_save(step, last_saved=last_saved) is due
    with_zero = dataclasses.replace(policy, save_step_zero=True)
    assert with_zero.should_save(step, last_saved=last_saved) is (
        due or (step, last_saved) == (0, None)
    )


def test_steps_kept_for_good_are_due_too():
    policy = CheckpointPolicy(save_interval_steps=10, keep_interval_steps=15, keep_steps=(7, 0))
    due = [step for step in range(46) if policy.should_save(step, last_saved=None)]
    assert due == [0, 7, 10, 15, 20, 30, 40, 45]


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
def test_policy_keeps_the_newest_and_one_per_interval(max_to_keep, hours, steps_kept):
    interval = None if hours is None else datetime.timedelta(hours=hours)
    policy = CheckpointPolicy(max_to_keep=max_to_keep, keep_interval=interval)
    assert policy.steps_to_keep(saved(*HOURLY_AT_TEN)) == steps_kept
    assert policy.steps_to_keep(saved(*reversed(HOURLY_AT_TEN))) == steps_kept


def evaluated(losses: dict[int, float]) -> list[SavedStep]:
    return [
        dataclasses.replace(checkpoint, metrics={"heldout/loss": losses[checkpoint.step]})
        if checkpoint.step in losses
        else checkpoint
        for checkpoint in saved(*HOURLY_AT_TEN)
    ]


@pytest.mark.parametrize(
    ("mode", "count", "losses", "best"),
    [
        ("min", 1, {10: 3.0, 20: 1.0, 30: 2.0}, {20}),
        ("max", 1, {10: 3.0, 20: 1.0, 30: 2.0}, {10}),
        ("min", 2, {10: 3.0, 20: 1.0, 30: 2.0}, {20, 30}),
        ("min", 5, {10: 3.0, 20: 1.0}, {10, 20}),
        ("min", 1, {10: 1.0, 20: 1.0, 30: 1.5}, {20}),  # of equal ones, the newer
        ("max", 1, {10: 1.0, 20: 1.0, 30: 0.5}, {20}),
        ("min", 1, {10: math.nan, 20: 7.0}, {20}),
        ("max", 1, {10: math.nan, 20: -math.inf}, {20}),
        ("min", 1, {}, set()),
    ],
)
def test_policy_keeps_the_best(mode, count, losses, best):
    policy = CheckpointPolicy(
        max_to_keep=1,
        keep_interval=None,
        best_metric="heldout/loss",
        best_mode=mode,
        best_to_keep=count,
    )
    assert policy.steps_to_keep(evaluated(losses)) == best | {100}


def test_policy_applied_after_each_save_keeps_the_same_as_at_the_end():
    policy = CheckpointPolicy(max_to_keep=2, keep_interval=datetime.timedelta(hours=4))
    there: list[SavedStep] = []
    for new in saved(*HOURLY_AT_TEN):
        kept = policy.steps_to_keep([*there, new])
        there = [checkpoint for checkpoint in [*there, new] if checkpoint.step in kept]
    assert [checkpoint.step for checkpoint in there] == [10, 50, 90, 100]


def saved_steps(folder):
    return sorted(int(path.name.removeprefix("checkpoint_")) for path in folder.glob("check*"))


def test_resumed_run_follows_the_policy(tmp_path):
    policy = CheckpointPolicy(save_interval_steps=3, max_to_keep=2, keep_interval=None)
    state = {"w": jnp.ones(4)}
    written = []
    for steps in (range(8), range(7, 14)):  # stopped after step 7, and continued
        with CheckpointManager(tmp_path, policy=policy) as manager:
            for step in steps:
                if manager.save(step, state, input_states={}, metadata={}):
                    written.append(step)
    assert written == [3, 6, 9, 12]
    assert saved_steps(tmp_path) == [9, 12]
    assert len(list(tmp_path.iterdir())) == 2  # deleted steps leave nothing


def test_resumed_run_keeps_the_anchor_of_the_interval(tmp_path):
    policy = CheckpointPolicy(
        save_interval_steps=1, max_to_keep=1, keep_interval=datetime.timedelta(hours=1)
    )
    for steps in ((1, 2), (3, 4)):
        with CheckpointManager(tmp_path, policy=policy) as manager:
            for step in steps:
                manager.save(step, {"w": jnp.ones(4)}, input_states={}, metadata={})
    assert saved_steps(tmp_path) == [1, 4]


def test_resumed_run_keeps_the_best_and_their_evaluations(tmp_path):
    policy = CheckpointPolicy(
        save_interval_steps=1, max_to_keep=1, keep_interval=None, best_metric="heldout/loss"
    )
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5, 5: 0.5}
    for steps in ((1, 2), (3, 4)):  # evaluated before they are saved, as in a training loop
        with CheckpointManager(tmp_path, policy=policy) as manager:
            for step in steps:
                manager.record_evaluation(step, {"heldout/loss": losses[step], "other": math.nan})
                manager.save(step, {"w": jnp.ones(4)}, input_states={}, metadata={})
    assert saved_steps(tmp_path) == [2, 4]
    recorded = read_evaluations(epath.Path(tmp_path))
    assert {step: recorded[step] for step in (2, 4)} == {
        2: {"heldout/loss": 1.0},
        4: {"heldout/loss": 1.5},
    }
    assert 1 not in recorded  # its checkpoint was gone when the last one was saved
    with CheckpointManager(tmp_path, policy=policy) as manager:
        manager.save(5, {"w": jnp.ones(4)}, input_states={}, metadata={})
        manager.record_evaluation(5, {"heldout/loss": losses[5]})  # after it was saved
    with CheckpointManager(tmp_path, policy=policy) as manager:
        manager.save(6, {"w": jnp.ones(4)}, input_states={}, metadata={})
    assert saved_steps(tmp_path) == [5, 6]


def test_evaluations_are_read_as_written_without_nan(tmp_path):
    directory = epath.Path(tmp_path)
    assert read_evaluations(directory) == {}
    write_evaluations(directory, {20: {"a/loss": 0.1, "a/score": math.nan}, 3: {"a/loss": 1e300}})
    assert read_evaluations(directory) == {3: {"a/loss": 1e300}, 20: {"a/loss": 0.1}}
    write_evaluations(directory, {4: {"b c/loss": -math.inf}})
    assert read_evaluations(directory) == {4: {"b c/loss": -math.inf}}


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 1, "evaluations": {"a": {}}}', '{"version": 2}', "[]"]
)
def test_malformed_evaluations_are_an_error_unless_read_only(raises, tmp_path, text):
    (tmp_path / "evaluations.json").write_text(text)
    with raises(ConfigError, owner=str(tmp_path / "evaluations.json")):
        CheckpointManager(tmp_path)
    CheckpointManager(tmp_path, read_only=True)
