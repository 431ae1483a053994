"""Steps and fractions of schedules, and what is shortened to fit into a shorter run."""

from __future__ import annotations

from typing import Any

import optax
import pytest

from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit_experiments.lm.bert import BertBase
from layerkit_experiments.lm.c4 import C4Spmd1BAdam4Replicas
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_experiments.vision.digits import Digits
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.run.resolve import resolve


def schedule(resolved: ResolvedExperiment) -> tuple[int, int, int]:
    config = resolved.task.train.learner.learning_rate
    config.Instantiate()  # refuses steps that are out of order
    return config.warmup_steps, config.decay_start, config.decay_end


class Ending(LocalText):
    """Flat until the last steps."""

    DECAY_START = 1500


@pytest.mark.parametrize("rate", [1e-4, None, optax.constant_schedule(1e-4)])
def test_a_learner_without_a_schedule_has_no_notes(rate: Any):
    class Constant(LocalText):
        def learner(self) -> Config:
            return super().learner().set(learning_rate=rate)

    made = Constant()
    assert resolve(made).task.train.learner.learning_rate == rate
    assert made.start_notes() == []


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


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, (200, 200, 2000)),
        ({"MAX_STEPS": 201}, (200, 200, 201)),
        ({"MAX_STEPS": 4000}, (200, 200, 4000)),
        ({"WARMUP_STEPS": 0.1}, (200, 200, 2000)),
        ({"WARMUP_STEPS": 0.1, "DECAY_START": 0.8, "MAX_STEPS": 60}, (6, 48, 60)),
        ({"WARMUP_STEPS": 0, "DECAY_START": 5, "DECAY_END": 0.5}, (0, 5, 1000)),
    ],
)
def test_a_schedule_that_fits_is_left_alone(fields: dict[str, Any], steps: tuple[int, int, int]):
    made = LocalText(**fields)
    assert schedule(resolve(made)) == steps
    assert made.start_notes() == []


def test_schedule_does_not_depend_on_the_class_that_sets_a_length():
    class Short(LocalText):
        MAX_STEPS = 50

    class Both(Short):
        WARMUP_STEPS = 200

    expected = schedule(resolve(LocalText(MAX_STEPS=50, WARMUP_STEPS=200)))
    assert schedule(resolve(Short())) == schedule(resolve(Both())) == expected == (5, 5, 50)


def test_decay_end_keeps_the_steps_of_pax_in_a_shorter_run():
    assert schedule(resolve(C4Spmd1BAdam4Replicas(MAX_STEPS=60))) == (4000, 4001, 300_000)


def test_fraction_above_one_raises(raises):
    with raises(ConfigError, field="WARMUP_STEPS", value=1.5):
        resolve(LocalText(WARMUP_STEPS=1.5))


@pytest.mark.parametrize(
    ("fields", "interval"),
    [
        ({}, 20),
        ({"MAX_STEPS": 10}, 1),
        ({"MAX_STEPS": 200}, 2),
        ({"MAX_STEPS": 20_000}, 100),
        ({"MAX_STEPS": 200, "SUMMARY_INTERVAL_STEPS": 50}, 50),
    ],
)
def test_summaries_are_a_hundredth_of_a_shorter_run(fields: dict[str, Any], interval: int):
    assert resolve(LocalText(**fields)).task.train.summary_interval_steps == interval
