"""The trainer in a copy of the runner whose folder of tools is deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import layerkit_runner

EXP = "--exp=lm.quickstart.LocalText"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without_tools")
    without = shutil.ignore_patterns("tools", "__pycache__")
    copied = folder / "site" / layerkit_runner.__name__
    shutil.copytree(Path(layerkit_runner.__file__).parent, copied, ignore=without)
    assert not (copied / "tools").exists()
    return folder


def runner(place: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(place / "site"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-P", "-m", "layerkit_runner.cli", *words]
    environ = {**os.environ, **environ, "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=place, env=environ, capture_output=True, text=True, timeout=300
    )


def test_trainer_runs_without_the_tools(place: Path, jobs: Any):
    fields = {"MAX_STEPS": 2, "task.train.eval_at_end": False}
    job = jobs.make("lm.quickstart.LocalText", place / "run", num_devices=1, **fields)
    done = runner(place, *job.arguments(), **job.environment())
    assert done.returncode == 0, done.stderr
    assert "step 2/2 | loss" in done.stdout + done.stderr
    assert 2 in job.steps_saved()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((EXP, "--mode=plan"), "--mode=plan"),
        pytest.param(*(("doctor",), "`runner doctor`"), marks=pytest.mark.slow),
        pytest.param(
            *((EXP, "--diff_config=a/b"), "--diff_config"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_missing_tool_is_named(place: Path, words: tuple[str, ...], shown: str):
    done = runner(place, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"runner: {shown}: cannot be loaded: ")
    assert "No module named 'layerkit_runner.tools'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
