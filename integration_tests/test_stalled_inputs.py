"""Signals to jobs whose input does not answer, which save the completed steps and exit."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

EXP = "stalling_inputs.Stalling"
TIMEOUT = 120.0
# Step 4 is then reported when step 5 has been started, the last one whose rows are there.
STALLS_AFTER_STEP_5 = {"TRAIN_STALLS_AT": 10, "task.train.max_inflight_steps": 1}


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    output = process.communicate(timeout=TIMEOUT)[0]
    return process.returncode, output


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_signal_while_training_input_stalls_saves_the_last_completed_step(
    jobs: Any, tmp_path: Path, running: list[Any], number: signal.Signals
):
    fields = {"EVAL_INTERVAL_STEPS": None, "PERCORE_BATCH_SIZE": 2.0}
    job = jobs.make(EXP, tmp_path / "job", **STALLS_AFTER_STEP_5, **fields)
    process = job.start()
    running.append(process)
    job.wait_for(process, lambda: 4 in job.steps_logged())
    process.send_signal(number)
    code, output = end(process)
    assert (code, job.steps_saved()) == (128 + number, [5]), output
    assert "Traceback" not in output


@pytest.mark.slow
def test_signal_before_the_first_step_ends_a_job_whose_input_stalls(
    jobs: Any, tmp_path: Path, running: list[Any]
):
    job = jobs.make(EXP, tmp_path / "job", TRAIN_STALLS_AT=0, PERCORE_BATCH_SIZE=2.0)
    process = job.start()
    running.append(process)
    job.wait_for(process, lambda: (job.folder / ".running").exists())
    process.send_signal(signal.SIGTERM)
    code, output = end(process)
    assert code == 128 + signal.SIGTERM, output
    assert "no step was completed" in output


@pytest.mark.slow
def test_signal_to_one_process_saves_the_step_that_all_completed(jobs: Any, tmp_path: Path):
    fields = {"EVAL_INTERVAL_STEPS": None, "ICI_MESH_SHAPE": "[2,1,1]", "PERCORE_BATCH_SIZE": 1.0}
    job = jobs.make(EXP, tmp_path / "job", **STALLS_AFTER_STEP_5, **fields)
    with job.started_as(2) as processes:
        job.wait_for(processes[0], lambda: 4 in job.steps_logged())
        processes[1].send_signal(signal.SIGTERM)
        ends = [end(process) for process in processes]
    assert [code for code, _ in ends] == [128 + signal.SIGTERM] * 2, ends
    assert job.steps_saved() == [5]
