"""The whole configuration of every experiment, as text, defaults included.

A golden changes only on purpose: look at the difference, then write them all anew with

    REWRITE_GOLDENS=1 python -m pytest packages/experiments/tests/test_goldens.py
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path

import pytest

import layerkit_experiments
from layerkit_runner import BaseExperiment
from layerkit_runner.configuration.config_text import config_text
from layerkit_runner.configuration.registry import list_experiments
from layerkit_runner.configuration.resolve import resolve

GOLDENS = Path(__file__).parent / "goldens"


def all_experiments() -> dict[str, type[BaseExperiment]]:
    """Every experiment that can run, by its name within the package."""
    prefix = f"{layerkit_experiments.__name__}."
    found = {}
    for module in pkgutil.walk_packages(layerkit_experiments.__path__, prefix):
        for value in vars(importlib.import_module(module.name)).values():
            is_experiment = isinstance(value, type) and issubclass(value, BaseExperiment)
            if is_experiment and value.__module__ == module.name and not value._is_abstract:
                found[f"{module.name}.{value.__qualname__}".removeprefix(prefix)] = value
    return found


EXPERIMENTS = all_experiments()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_configuration_is_as_it_was(name: str):
    text = config_text(resolve(EXPERIMENTS[name]()))
    golden = GOLDENS / f"{name}.txt"
    if os.environ.get("REWRITE_GOLDENS"):
        GOLDENS.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.exists(), f"{name} has no golden yet; see the docstring of this file"
    assert text == golden.read_text()


def test_every_golden_is_of_an_experiment():
    assert {path.stem for path in GOLDENS.glob("*.txt")} == set(EXPERIMENTS)


def test_the_command_line_lists_the_same_experiments():
    listed = {entry.name for entry in list_experiments()}
    assert {name for name in listed if name in EXPERIMENTS} == set(EXPERIMENTS)
