"""The fields in `unused_fields` are read by no method, or fixed by the class that lists them."""

from __future__ import annotations

from typing import Any

import pytest

import layerkit_experiments
from layerkit_experiments.recipes import training
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.config.registry import experiment_classes
from layerkit_runner.tools.catalogue import fields_without_value

EXPERIMENTS = {
    name: cls
    for name, cls in experiment_classes(layerkit_experiments.__name__).items()
    if not fields_without_value(cls)
}


def reads_of(made: BaseExperiment, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The attributes that are read while the configs of an experiment are built."""
    reads = set()

    def record(self: Any, name: str) -> Any:
        reads.add(name)
        return object.__getattribute__(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_CHECKS", {})  # what is checked is not used yet
        patch.setattr(BaseExperiment, "__getattribute__", record, raising=False)
        made.task(), made.datasets(), made.partitioner()
    return reads


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_unused_fields_are_not_read(name: str, monkeypatch: pytest.MonkeyPatch):
    cls = EXPERIMENTS[name]
    fixed = {field for base in cls.__mro__ if "unused_fields" in vars(base) for field in vars(base)}
    assert not (set(cls.unused_fields) - fixed) & reads_of(cls(), monkeypatch)
