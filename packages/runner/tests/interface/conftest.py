"""One trained job folder that the tests of the Python interface share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import layerkit_runner

collect_ignore = ["lines_experiment.py"]


@pytest.fixture(scope="session")
def lines() -> Iterator[ModuleType]:
    """Return the module of the experiments, which a job folder names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import lines_experiment

        yield lines_experiment
        del sys.modules["lines_experiment"]


@pytest.fixture(scope="session")
def run(lines: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> layerkit_runner.TrainResult:
    """Return a finished run of four steps."""
    folder = tmp_path_factory.mktemp("interface") / "job"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("matplotlib", "matplotlib.figure"):  # A loss curve takes seconds.
            patch.setitem(sys.modules, name, None)
        return layerkit_runner.train(lines.LinesLm, job_log_dir=folder)


@pytest.fixture(scope="session")
def model(run: layerkit_runner.TrainResult) -> layerkit_runner.LoadedModel:
    """Return the model of that run, loaded from its folder."""
    return layerkit_runner.load(run.job_log_dir)
