"""`runner launch local`: a killed run is restarted and resumes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

FIELDS = {"MAX_STEPS": 300, "EVAL_INTERVAL_STEPS": 300, "CHECKPOINT_EVERY_N_STEPS": 50}

pytestmark = pytest.mark.slow


def children(pid: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def test_killed_run_is_restarted_and_resumes(jobs, tmp_path: Path, running):
    job = jobs.make("lm.quickstart.LocalText", tmp_path / "run", **FIELDS)
    launcher = job.start_with(["launch", "local", *job.arguments()])
    running.append(launcher)
    assert job.wait_for(launcher, (job.checkpoints / "checkpoint_00000050").exists)
    (trains,) = children(launcher.pid)  # the script replaces the launcher
    os.kill(trains, signal.SIGKILL)
    output, _ = launcher.communicate()
    assert launcher.returncode == 0, output
    assert "launch: exit code 137; restart 1 of 3, from the newest checkpoint" in output
    assert "resuming from step " in output
    assert job.steps_logged()[-1] == 300
