from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.search.command import print_plan, print_search
from layerkit_runner.tools.plan.search.trials import Limits


def test_a_plan_that_does_not_fit_has_its_advice_beside_it(small, plan_for, devices, capsys):
    plan = plan_for(small, plan_for(small).memory.peak - 1)
    limits = Limits(compilations=0, seconds=600)
    print_plan(small, plan, plan_for, devices, limits=limits, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["advice"]) == (False, [])


def test_a_search_compiles_something(small, plan_for, devices):
    with pytest.raises(UsageError, match="--max_compilations=0: a search compiles at least"):
        print_search(small, plan_for, devices, limits=Limits(0, 600), as_json=True)


@pytest.mark.slow
def test_a_search_from_the_command_line(experiment_folder, tmp_path):
    command = [sys.executable, "-m", "layerkit_runner.cli", "--mode=plan", "--search", "--json"]
    command += ["--exp=small_lm_experiment.SmallLm", "--fdl.NUM_LAYERS=2", "--max_compilations=2"]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(experiment_folder), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["compilations"], len(found["ranked"])) == (2, 2)
    assert found["command"][0] == "--fdl.NUM_LAYERS=2"
    assert list(tmp_path.iterdir()) == []
