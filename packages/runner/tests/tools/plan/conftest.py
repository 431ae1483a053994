from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.plan.plan import Plan, make_plan

FOLDER = Path(__file__).parent
MODULE = "small_lm_experiment"


@pytest.fixture(scope="session")
def experiment_folder():
    """Return the folder of the module `small_lm_experiment`."""
    return FOLDER


@pytest.fixture(scope="session")
def small_lm():
    """Return the class `small_lm_experiment.SmallLm`."""
    if MODULE not in sys.modules:
        spec = importlib.util.spec_from_file_location(MODULE, FOLDER / f"{MODULE}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[MODULE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[MODULE])
    return sys.modules[MODULE].SmallLm


@pytest.fixture
def runner(tmp_path):
    """Return a function that runs `runner --mode=plan` on `SmallLm` in an empty folder."""

    def run(*flags):
        folders = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-m", "layerkit_runner.cli", "--mode=plan"]
        return subprocess.run(
            [*command, f"--exp={MODULE}.SmallLm", *flags],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": ":".join(folders), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def plan_json(runner):
    """Return a function that runs the command and returns its output as JSON."""

    def run(*flags):
        result = runner("--json", *flags)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


class Planned(NamedTuple):
    """A resolved experiment, eight devices, and its plan for them."""

    resolved: ResolvedExperiment
    devices: list[jax.Device]
    plan: Plan


@pytest.fixture(scope="session")
def plan_of(small_lm):
    """Return a function that plans `SmallLm` under "spmd" or "pmap", each once."""

    @functools.cache
    def make(partitioner):
        resolved = resolve(small_lm(USE_PMAP=partitioner == "pmap"))
        devices = jax.devices("cpu")[:8]
        return Planned(resolved, devices, make_plan(resolved, devices))

    return make


@pytest.fixture(params=["spmd", pytest.param("pmap", marks=pytest.mark.slow)])
def planned(request, plan_of):
    """Return the plan under each partitioner."""
    return plan_of(request.param)
