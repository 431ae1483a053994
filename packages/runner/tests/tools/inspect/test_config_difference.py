from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath

from layerkit.config import Config
from layerkit_runner import BaseExperiment
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.run.job_folder import write_config
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run_options import RunOptions
from layerkit_runner.tools.inspect.config_difference import (
    differences,
    recorded_side,
    resolved_side,
)


@pytest.fixture(scope="module")
def resolved(tiny: SimpleNamespace) -> Any:
    class Small(BaseExperiment):
        """An experiment with a small model."""

        DIMS: int = 2

        def task(self) -> Config:
            return tiny.task_config(dims=self.DIMS)

        def datasets(self) -> list[Config]:
            return [tiny.Points.HParams.config(is_training=True, name="points")]

    def make(**fields: Any) -> ResolvedExperiment:
        return resolve(Small(**fields))

    return make


def test_differences_of_a_recorded_run_and_the_experiment(resolved: Any, tmp_path: Path):
    write_config(epath.Path(tmp_path), resolved(DIMS=4), RunOptions(), report=lambda line: None)
    _, there = recorded_side(str(tmp_path))
    assert differences(resolved_side(resolved(DIMS=4))[1], there) == {}
    result = differences(resolved_side(resolved())[1], there)
    assert list(result) == ["experiment.DIMS", "task.model.dims"]
    assert all(values == {"here": 2, "there": 4} for values in result.values())


def test_values_of_different_types_differ():
    values = [1, 1.0, True, "1"]
    for value in values:
        for other in values:
            assert bool(differences({"a": value}, {"a": other})) == (value is not other)


def test_folder_without_a_configuration_raises(raises, tmp_path: Path):
    (tmp_path / "run_a").mkdir()
    run_a, run_b = str(tmp_path / "run_a"), str(tmp_path / "run_b")
    with raises(UsageError, field="--diff_config", value=run_b, choices=(run_a,)):
        recorded_side(run_b)
    with raises(UsageError, field="--diff_config", value=run_a):
        recorded_side(run_a)
    (tmp_path / "run_a" / "config.json").write_text('{"experiment": ')
    with raises(UsageError):
        recorded_side(str(tmp_path / "run_a"))
