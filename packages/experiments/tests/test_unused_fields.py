"""The fields in `unused_fields` are read by no method, or fixed by the class that lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import layerkit_experiments
from layerkit_experiments.recipes import training
from layerkit_experiments.recipes.optimizer_choices import OPTIMIZERS
from layerkit_experiments.recipes.schedule_choices import SCHEDULES
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.config.registry import experiment_classes
from layerkit_runner.tools.catalogue import fields_without_value

EXPERIMENTS = {
    name: cls
    for name, cls in experiment_classes(layerkit_experiments.__name__).items()
    if not fields_without_value(cls)
}


CHOICES = {"LEARNING_RATE_SCHEDULE": SCHEDULES, "OPTIMIZER": OPTIMIZERS}
# One experiment for each learner and its unused fields.
LEARNERS = {
    (cls.learner, cls.unused_fields): cls
    for cls in EXPERIMENTS.values()
    if any(hasattr(cls, field) and field not in cls.unused_fields for field in CHOICES)
}


def reads_of(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The attributes that are read while configs of an experiment are built."""
    reads = set()

    def record(self: Any, name: str) -> Any:
        reads.add(name)
        return object.__getattribute__(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_CHECKS", {})  # what is checked is not used yet
        patch.setattr(BaseExperiment, "__getattribute__", record, raising=False)
        build()
    return reads


def unread_fields(cls: type[BaseExperiment]) -> set[str]:
    fixed = {field for base in cls.__mro__ if "unused_fields" in vars(base) for field in vars(base)}
    return {*cls.unused_fields} - fixed


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_unused_fields_are_not_read(name: str, monkeypatch: pytest.MonkeyPatch):
    made = EXPERIMENTS[name]()

    def build() -> Any:
        return made.task(), made.datasets(), made.partitioner()

    assert not unread_fields(EXPERIMENTS[name]) & reads_of(build, monkeypatch)


@pytest.mark.parametrize("cls", LEARNERS.values(), ids=lambda cls: cls.__qualname__)
def test_unused_fields_are_not_read_by_another_schedule_or_optimizer(
    cls: type[BaseExperiment], monkeypatch: pytest.MonkeyPatch
):
    # Some optimizers read whether a schedule is named.
    unread = unread_fields(cls) - {*CHOICES}
    for field in {*CHOICES} - {*cls.unused_fields}:
        for choice in CHOICES[field]:
            made = cls(**{field: choice})
            assert not unread & reads_of(made.learner, monkeypatch), choice
