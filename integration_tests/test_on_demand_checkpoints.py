"""SIGUSR1 to any process of a job saves one checkpoint of all, and the job goes on or leaves.

So does another number of processes: two write, one goes on.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

EXP = "lm.lm_cloud.LmCloudSpmdTest"
ENDLESS = {
    "ICI_MESH_SHAPE": "[2,1,1]",
    "MAX_STEPS": 100_000,
    "DECAY_END": 200_000,
    "CHECKPOINT_EVERY_N_STEPS": 50_000,
}
TIMEOUT = 240.0


@pytest.mark.slow
def test_signal_to_one_process_makes_both_save(jobs: Any, tmp_path: Path):
    job = jobs.make(EXP, tmp_path / "job", num_devices=1, **ENDLESS)
    with job.started_as(2, "--exit_after_ondemand_checkpoint") as processes:
        assert job.wait_for(processes[0], job.steps_logged)
        processes[1].send_signal(signal.SIGUSR1)
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert "SIGUSR1: saving after this step" in outputs[1]
    [step] = job.steps_saved()
    assert f"saved at step {step}; run the same command to resume" in outputs[0]

    alone = jobs.make(EXP, job.folder, num_devices=2, **{**ENDLESS, "MAX_STEPS": step + 2})
    assert f"resuming from step {step} of " in alone.run()
    assert alone.steps_logged()[-2:] == [step + 1, step + 2]


@pytest.mark.slow  # packages/runner/tests/run/test_executor.py saves on demand in one process
def test_signal_makes_one_process_save_and_continue(jobs: Any, tmp_path: Path, running: list[Any]):
    fields = {**ENDLESS, "ICI_MESH_SHAPE": "[1,1,1]"}
    job = jobs.make(EXP, tmp_path / "job", **fields)
    process = job.start()
    running.append(process)
    assert job.wait_for(process, job.steps_logged)
    process.send_signal(signal.SIGUSR1)
    assert job.wait_for(process, job.steps_saved)
    [on_demand] = job.steps_saved()
    assert job.wait_for(process, lambda: job.steps_logged()[-1] > on_demand)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert len(job.steps_saved()) == 2
