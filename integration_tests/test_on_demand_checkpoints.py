"""SIGUSR1 to any process of a job saves one checkpoint of all, and the job goes on or leaves.

So does another number of processes: two write, one goes on.
"""

from __future__ import annotations

import signal
import time
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


def saved_steps(folder: Path) -> list[int]:
    names = (path.name for path in (folder / "checkpoints").glob("checkpoint_*"))
    return sorted(int(name.split("_")[1]) for name in names if "tmp" not in name)


def wait_until(condition: Any, processes: list[Any]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_signal_to_one_process_makes_both_save(jobs: Any, tmp_path: Path):
    job = jobs.make(EXP, tmp_path / "job", num_devices=1, **ENDLESS)
    with job.started_as(2, "--exit_after_ondemand_checkpoint") as processes:
        wait_until(job.steps_logged, processes)
        processes[1].send_signal(signal.SIGUSR1)
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert "SIGUSR1: saving after this step" in outputs[1]
    [step] = saved_steps(job.folder)
    assert f"saved at step {step}; run the same command to resume" in outputs[0]

    alone = jobs.make(EXP, job.folder, num_devices=2, **{**ENDLESS, "MAX_STEPS": step + 2})
    assert f"resuming from step {step} of " in alone.run()
    assert alone.steps_logged()[-2:] == [step + 1, step + 2]


def test_signal_makes_one_process_save_and_continue(jobs: Any, tmp_path: Path, running: list[Any]):
    fields = {**ENDLESS, "ICI_MESH_SHAPE": "[1,1,1]"}
    job = jobs.make(EXP, tmp_path / "job", **fields)
    process = job.start()
    running.append(process)
    wait_until(job.steps_logged, [process])
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: saved_steps(job.folder), [process])
    [on_demand] = saved_steps(job.folder)
    wait_until(lambda: job.steps_logged()[-1] > on_demand, [process])
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert len(saved_steps(job.folder)) == 2
