"""Schedules that end with the run: which lengths are shortened where it is made shorter."""

from __future__ import annotations

from typing import Any

import pytest

from layerkit.errors import ConfigError
from layerkit_experiments.lm.bert import BertBase
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_experiments.vision.digits import Digits
from layerkit_runner.config.experiment import BaseExperiment, reduced_values
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.run.resolve import resolve


def schedule(resolved: ResolvedExperiment) -> tuple[int, int, int]:
    config = resolved.task.train.learner.learning_rate
    config.Instantiate()  # refuses steps that are out of order
    return config.warmup_steps, config.decay_start, config.decay_end


class Ending(LocalText):
    """Flat until the last steps."""

    DECAY_START = 1500


@pytest.mark.parametrize("num_steps", [1, 2, 9, 60, 200])
@pytest.mark.parametrize("experiment", [LocalText, Digits, BertBase, Ending])
def test_a_shorter_run_has_a_schedule_that_fits(experiment: type[BaseExperiment], num_steps: int):
    made = experiment(MAX_STEPS=num_steps)
    warmup, decay_start, decay_end = schedule(resolve(made))
    assert 0 <= warmup <= decay_start < decay_end == num_steps
    if num_steps < experiment.WARMUP_STEPS:
        (note,) = made.start_notes()
        assert f"WARMUP_STEPS {experiment.WARMUP_STEPS} → {warmup}" in note
        assert f"MAX_STEPS={num_steps}" in note


@pytest.mark.parametrize("fields", [{}, {"MAX_STEPS": 201}, {"MAX_STEPS": 4000}, {"SEED": 2}])
def test_a_schedule_that_fits_is_left_alone(fields: dict[str, Any]):
    made = LocalText(**fields)
    assert schedule(resolve(made)) == (200, 200, fields.get("MAX_STEPS", 2000))
    assert made.start_notes() == []


def test_class_with_fewer_steps_has_a_shorter_warmup(raises):
    class Short(LocalText):
        MAX_STEPS = 50

    class Both(LocalText):
        MAX_STEPS = 50
        WARMUP_STEPS = 50

    assert schedule(resolve(Short())) == (5, 5, 50)
    with raises(ConfigError, field="(warmup_steps, decay_start, decay_end)"):
        schedule(resolve(Both()))
    # Fields of an instance are set after those of its class.
    assert schedule(resolve(Both(MAX_STEPS=40))) == (4, 4, 40)


def test_lengths_of_reduced_fields_are_shortened_for_a_shorter_run(raises):
    reduced = reduced_values(LocalText)
    assert reduced["WARMUP_STEPS"] == 5
    assert schedule(resolve(LocalText(**{**reduced, "MAX_STEPS": 4})))[0] == 1
    with raises(ConfigError, field="(warmup_steps, decay_start, decay_end)"):
        schedule(resolve(LocalText(**{**reduced, "MAX_STEPS": 4, "WARMUP_STEPS": 6})))


@pytest.mark.parametrize(
    ("fields", "interval"),
    [
        ({}, 20),
        ({"MAX_STEPS": 10}, 1),
        ({"MAX_STEPS": 200}, 2),
        ({"MAX_STEPS": 10_000}, 20),
        ({"MAX_STEPS": 200, "SUMMARY_INTERVAL_STEPS": 50}, 50),
        ({"SUMMARY_INTERVAL_STEPS": 500}, 500),
    ],
)
def test_summaries_are_a_hundredth_of_a_shorter_run(fields: dict[str, Any], interval: int):
    assert resolve(LocalText(**fields)).task.train.summary_interval_steps == interval
