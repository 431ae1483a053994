"""kill -9 at any moment, then the same command: nothing of the result tells that it happened.

The final checkpoint of a run that was killed equals, bit for bit, that of a run never stopped:
weights, optimizer state and the state of the input. The machine, versions and mesh are the same.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

EXP = "lm.lm_cloud.LmCloudSpmdTest"
STEPS = 16
NO_EVALUATION = {"task.train.eval_at_end": False}
PLACES = {
    "one device": {"num_devices": 1, "ICI_MESH_SHAPE": "[1,1,1]", **NO_EVALUATION},
    # The fields of the fixture `mesh_run`.
    "mesh 2 x 2 x 2": {"num_devices": 8, "ICI_MESH_SHAPE": "[2,2,2]", **NO_EVALUATION},
}


@pytest.fixture(
    scope="module", params=[pytest.param("one device", marks=pytest.mark.slow), "mesh 2 x 2 x 2"]
)
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PLACES[request.param]


@pytest.fixture(scope="module")
def never_stopped(
    jobs: Any, place: dict[str, Any], tmp_path_factory: Any, request: pytest.FixtureRequest
) -> Any:
    """Return the final checkpoint of an uninterrupted run."""
    if place["num_devices"] == 8:
        job = request.getfixturevalue("mesh_run")
    else:
        job = jobs.make(EXP, tmp_path_factory.mktemp("whole") / "job", **place)
        job.run()
    final = jobs.read_checkpoint(job, STEPS)
    early = jobs.read_checkpoint(job, 2)
    assert all((final.leaves[name] != leaf).any() for name, leaf in early.leaves.items())
    return final


def test_run_killed_inside_a_save_equals_an_uninterrupted_run(
    jobs: Any, place: dict[str, Any], never_stopped: Any, tmp_path: Path, running: list
):
    job = jobs.make(EXP, tmp_path / "job", **place)
    process = job.start()
    running.append(process)
    assert job.wait_for(process, job.steps_saved)
    jobs.kill_inside_a_save(job, process)
    resume(jobs, job, never_stopped, num_runs=2)


@pytest.mark.slow
def test_run_killed_inside_its_first_save_and_at_a_random_step_equals_an_uninterrupted_run(
    jobs: Any, place: dict[str, Any], never_stopped: Any, tmp_path: Path, running: list
):
    job = jobs.make(EXP, tmp_path / "job", **place)
    process = job.start()
    running.append(process)
    jobs.kill_inside_a_save(job, process)
    kill_after(job, random.Random(0).randrange(3, 8), running)
    resume(jobs, job, never_stopped, num_runs=3)


def resume(jobs: Any, job: Any, never_stopped: Any, num_runs: int) -> None:
    """Run the job to its end, and compare it with a run that was never stopped."""
    output = job.output_here() if job.num_devices == 8 else job.run()
    assert "resuming from step" in output
    assert not jobs.unfinished(job)
    jobs.assert_same_bits(jobs.read_checkpoint(job, STEPS), never_stopped)
    goodput = json.loads((job.folder / "goodput.json").read_text())
    # Steps that were done again count once, and their first time as lost.
    assert (goodput["num_runs"], goodput["num_steps"]) == (num_runs, STEPS)
    assert (goodput["num_lost_steps"] > 0) == (goodput["seconds"]["lost"] > 0)


def kill_after(job: Any, steps: int, running: list) -> None:
    """Kill the job once it has reported that many steps since it was started."""
    before = len(job.steps_logged())
    process = job.start()
    running.append(process)
    job.wait_for(process, lambda: len(job.steps_logged()) >= before + steps)
    process.kill()
    process.communicate()
