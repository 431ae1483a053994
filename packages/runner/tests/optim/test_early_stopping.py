"""Early stopping: decisions, state across restarts, and errors."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.optim.early_stopping import (
    EarlyStop,
    EarlyStopping,
    StopAtTarget,
    StoppingRule,
)


def rule(**fields: Any) -> EarlyStopping:
    return EarlyStopping(**{"metric": "heldout/loss", **fields})


def stops_at(rule: StoppingRule, values: list[float]) -> int | None:
    """The number, from 1, of the value that ends the run; None if none does."""
    for step, value in enumerate(values, start=1):
        if rule.should_stop({"heldout/loss": value}, step):
            return step
    return None


NAN = float("nan")


@pytest.mark.parametrize(
    ("fields", "values", "stop"),
    [
        ({}, [3, 2, 1, 1], 4),
        ({"patience": 2}, [3, 4, 2, 4, 3], 5),
        ({"patience": 3}, [3, 4, 4, 2, 4, 3], None),
        ({"min_delta": 0.5}, [3, 2.6], 2),
        ({"min_delta": 0.5}, [3, 2.4, 1.8], None),
        # Slow improvements count against the best, not against the one before.
        ({"min_delta": 0.5, "patience": 2}, [3, 2.7, 2.4, 2.1], None),
        ({"mode": "max"}, [1, 2, 3, 2], 4),
        ({"patience": 2}, [NAN, NAN], 2),
        ({"patience": 2}, [3, NAN, 2, NAN, NAN], 5),
        ({}, [math.inf, 3, 2], None),
    ],
)
def test_rule_stops_after_patience_evaluations_without_improvement(
    fields: dict[str, Any], values: list[float], stop: int | None
):
    assert stops_at(rule(**fields), values) == stop


@pytest.mark.parametrize(
    ("mode", "values", "stop"), [("min", [3, NAN, 2.7, 2.69, 2], 4), ("max", [2, 2.69], 2)]
)
def test_rule_with_a_target_stops_when_the_metric_reaches_it(
    mode: str, values: list[float], stop: int
):
    at_target = StopAtTarget(metric="heldout/loss", target=2.69, mode=mode)
    assert not at_target.should_stop({"other/loss": 2.69}, 0)
    assert stops_at(at_target, values) == stop
    assert at_target.reason() == "heldout/loss has reached the target 2.69"


def test_metric_of_the_training_step_is_asked_for_at_each_step():
    of_steps = rule(metric="train_step/loss", patience=2)
    of_steps.start(["heldout"])
    assert (of_steps.asks_each_step(), rule().asks_each_step()) == (True, False)
    answers = [
        of_steps.should_stop({"train_step/loss": x}, step) for step, x in enumerate([1, 2, 3])
    ]
    assert answers == [False, False, True]
    assert of_steps.reason() == "train_step/loss did not improve on 1 of step 0 in 2 steps"


@pytest.mark.parametrize("cut", range(5))
def test_restored_rule_decides_as_an_uninterrupted_one(cut: int):
    values = [3.0, 2.0, 2.5, 1.9, 1.95, 2.0]
    whole, first, second = (EarlyStop(rule(patience=2)) for _ in range(3))
    answers = [
        whole.asks_to_stop({"heldout/loss": value}, step) for step, value in enumerate(values)
    ]
    told = [first.asks_to_stop({"heldout/loss": v}, s) for s, v in enumerate(values[:cut])]
    second.restore(json.loads(json.dumps(first.record())), report=pytest.fail)
    told += [second.asks_to_stop({"heldout/loss": v}, cut + s) for s, v in enumerate(values[cut:])]
    assert told == answers == [False] * 5 + [True]
    assert second.message() == whole.message()
    assert whole.message() == (
        "stopped early after step 5: heldout/loss did not improve on 1.9 of step 3 in 2 evaluations"
    )


def test_restore_resets_a_rule_with_other_settings():
    stopped = EarlyStop(rule())
    assert stops_at(stopped.rule, [1, 2]) == 2
    stopped.stopped_at = 2
    said: list[str] = []
    patient = EarlyStop(rule(patience=5))
    patient.restore(stopped.record(), report=said.append)
    assert patient.stopped_at is None
    assert said == [
        "early stopping is reset, because its settings were EarlyStopping(metric='heldout/loss',"
        " patience=1, min_delta=0.0, mode='min')"
    ]


def test_restore_without_a_record_forgets_the_steps_before_a_rollback():
    rolled_back = EarlyStop(rule())
    assert stops_at(rolled_back.rule, [1, 2]) == 2
    rolled_back.stopped_at = 2
    rolled_back.restore(None, report=pytest.fail)
    assert rolled_back.stopped_at is None
    assert rolled_back.record() == EarlyStop(rule()).record()


def test_steps_without_the_data_set_do_not_count():
    one = rule()
    assert not one.should_stop({"heldout/loss": 1.0}, 1)
    assert not one.should_stop({"other/loss": 5.0}, 2)
    assert one.state()["without_improvement"] == 0


def test_metric_of_a_data_set_that_is_not_evaluated_is_an_error(raises):
    with raises(UsageError, field="metric", value="heldout/loss"):
        rule().start(["held_out", "decode/prompts"])
    rule(metric="decode/prompts/bleu").start(["held_out", "decode/prompts"])


def test_metric_that_the_data_set_does_not_report_is_an_error(raises):
    with raises(UsageError, field="metric", value="heldout/lss", choices=("heldout/loss",)):
        rule(metric="heldout/lss").should_stop({"heldout/loss": 1.0}, 1)
    # The name of a data set may be a prefix of another.
    again = rule(metric="points/again/loss")
    again.start(["points", "points/again"])
    assert not again.should_stop({"points/loss": 1.0}, 1)
    with raises(UsageError, field="metric", value="points/again/loss"):
        again.should_stop({"points/again/lss": 1.0}, 2)
