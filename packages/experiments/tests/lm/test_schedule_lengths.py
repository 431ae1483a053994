"""Steps and fractions of schedules, and what is shortened to fit into a shorter run."""

from __future__ import annotations

import math
from pathlib import Path
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
from layerkit_runner.errors import FieldError
from layerkit_runner.observers import read_metrics
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions


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
        ({"WARMUP_STEPS": 300, "LEARNING_RATE_SCHEDULE": "wsd"}, (300, 1600, 2000)),
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


def test_shortened_warmup_leaves_the_flat_part():
    made = LocalText(LEARNING_RATE_SCHEDULE="wsd", MAX_STEPS=150)
    assert schedule(resolve(made)) == (15, 120, 150)
    assert schedule(resolve(LocalText(DECAY_START=0.6, MAX_STEPS=150))) == (15, 90, 150)


def test_decay_that_starts_in_the_warmup_raises(raises):
    with raises(ConfigError, field="DECAY_START", value=500):
        resolve(LocalText(WARMUP_STEPS=900, DECAY_START=500))


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


def rates(made: BaseExperiment, steps: list[int]) -> list[float]:
    schedule = made.learner().learning_rate.Instantiate()
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
    ("fields", "ratios"),
    [
        # A warmup of 200 steps, then the decay over 1800 to a tenth. 650 is a quarter of it.
        ({"LEARNING_RATE_SCHEDULE": "cosine"}, {650: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4}),
        ({"LEARNING_RATE_SCHEDULE": "exponential"}, {650: 10**-0.25, 2000: 0.1}),
        ({"LEARNING_RATE_SCHEDULE": "linear"}, {650: 0.75, 2000: 0.0}),
        ({"LEARNING_RATE_SCHEDULE": "polynomial"}, {650: 0.1 + 0.9 * 0.75**2, 2000: 0.1}),
        ({"LEARNING_RATE_SCHEDULE": "wsd"}, {1600: 1.0, 1700: 0.775, 2000: 0.1}),
        ({"LEARNING_RATE_SCHEDULE": "sqrt"}, {1600: 1.0, 1700: 0.55, 2000: 0.1}),
        ({"LEARNING_RATE_SCHEDULE": "sqrt", "DECAY_START": 0.5}, {1000: 1.0, 1250: 0.55}),
        ({"LEARNING_RATE_SCHEDULE": "inverse_sqrt"}, {800: 0.5, 1800: 1 / 3}),
        ({"LEARNING_RATE_SCHEDULE": "constant"}, {200: 1.0, 1999: 1.0, 10**6: 1.0}),
        ({}, {650: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4}),
        (
            {
                "STAGES": [
                    {"until_step": 100, "rate": 2e-3},
                    {"until_step": 900},
                    {"until_step": 1300, "rate": {"to": 0.0, "by": "sqrt"}},
                ]
            },
            {100: 1.0, 899: 1.0, 1000: 0.5, 1300: 0.0},
        ),
    ],
)
def test_named_schedules_and_stages_have_the_rates_of_their_formulas(fields, ratios):
    made = LocalText(**fields)
    expected = [0.5 * 2e-3 if "STAGES" not in fields else 2e-3]
    assert rates(made, [100]) == pytest.approx(expected)
    expected = [2e-3 * ratio for ratio in ratios.values()]
    assert rates(made, [*ratios]) == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("stages", "error"),
    [
        ([{"until_step": 9}, {"until_step": 99, "rate": 0.1}], {"owner": "STAGES[0]"}),
        ([{"until_step": 9, "rate": {"too": 1.0}}], {"owner": "STAGES[0]", "field": "rate"}),
        ([{"until_step": 9, "rate": -1.0}], {"owner": "STAGES[0]", "field": "rate"}),
        ([{"until_step": 9, "rate": {"to": "x"}}], {"owner": "STAGES[0]", "field": "rate"}),
        ([{"until_step": 9, "rate": {"to": 1.0, "by": "line"}}], {"owner": "STAGES[0]"}),
    ],
)
def test_wrong_rates_of_stages_are_named(stages, error, raises):
    with raises(ConfigError, **error):
        LocalText(STAGES=stages).learner()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"STAGES": [{"until_step": 9, "rate": 0.1}], "LEARNING_RATE": 0.5}, "LEARNING_RATE"),
        ({"STAGES": [{"until_step": 9, "rate": 0.1}], "WARMUP_STEPS": 7}, "WARMUP_STEPS"),
        ({"LEARNING_RATE_SCHEDULE": "constant", "DECAY_START": 9}, "DECAY_START"),
        ({"OPTIMIZER": "schedule_free", "DECAY_END": 900}, "DECAY_END"),
        (
            {"LEARNING_RATE_SCHEDULE": "linear", "MIN_LEARNING_RATE_RATIO": 0.2},
            "MIN_LEARNING_RATE_RATIO",
        ),
        ({"LEARNING_RATE_SCHEDULE": "inverse_sqrt", "DECAY_START": 5}, "DECAY_START"),
    ],
)
def test_fields_that_no_schedule_reads_raise(fields, field, raises):
    with raises(FieldError, owner="LocalText", field=field, value=fields[field]):
        LocalText(**fields).learner()


@pytest.mark.parametrize("name", ["constant", "inverse_sqrt"])
def test_a_class_may_have_steps_of_a_decay_that_its_schedule_does_not_read(name: str):
    class Decays(Ending):
        DECAY_END = 1800

    made = Decays(LEARNING_RATE_SCHEDULE=name, WARMUP_STEPS=1900)
    assert rates(made, [950, 1900]) == pytest.approx([1e-3, 2e-3])


def test_rates_of_stages_replace_the_schedule_of_an_optimizer_by_its_factor():
    stages = [{"until_step": 100, "rate": 1e-3}]
    assert rates(LocalText(STAGES=stages, OPTIMIZER="lion"), [100]) == pytest.approx([1e-4])


@pytest.mark.slow
def test_a_branch_that_anneals_equals_the_uninterrupted_run_with_that_decay(tmp_path: Path):
    tiny = {"NUM_LAYERS": 1, "MODEL_DIMS": 16, "NUM_HEADS": 1, "MAX_SEQ_LEN": 16}
    tiny |= {"PERCORE_BATCH_SIZE": 1.0, "WARMUP_STEPS": 2, "SUMMARY_INTERVAL_STEPS": 1}
    tiny |= {"EVAL_INTERVAL_STEPS": None, "CHECKPOINT_EVERY_N_STEPS": 3}
    decay = {"LEARNING_RATE_SCHEDULE": "sqrt", "DECAY_START": 3, "MAX_STEPS": 6}

    def train(name: str, *, restore: dict[str, Any] | None = None, **fields: Any) -> list[Any]:
        folder = str(tmp_path / name)
        options = RunOptions(job_log_dir=folder, jax_compilation_cache="off", **(restore or {}))
        assert run_train(resolve(LocalText(**{**tiny, **fields})), options) == 0
        records = read_metrics(tmp_path / name).train
        return [(one["step"], one["loss"], one["learning/lr"]) for one in records]

    train("base", LEARNING_RATE_SCHEDULE="constant", MAX_STEPS=5)
    restore = {"restore_checkpoint_dir": str(tmp_path / "base"), "restore_checkpoint_step": (3,)}
    branch = train("branch", restore=restore, **decay)
    assert branch == train("straight", **decay)[3:]
    assert branch[0][2] > branch[1][2] > branch[2][2]
