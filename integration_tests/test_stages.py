"""A run in four stages that is killed, inside stages and at their borders, and moved between hosts.

The stages change the batch, then the length of rows, then the mixture, then the learning rate.
"""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.observers import read_metrics

EXP = "text_anywhere.TextAnywhere"
STEPS = 60
STAGES = [
    {"until_step": 15, "batch": 8, "length": 8, "mixture": {"web": 1}, "rate": 2e-3},
    {"until_tokens": 15 * 64 + 15 * 128, "batch": 16},
    {"until_step": 45, "length": 16, "mixture": {"web": 1, "code": 3}},
    {"until_step": STEPS, "batch": 8, "rate": {"to": 0.0, "by": "sqrt"}},
]


def make(jobs: Any, folder: Path, *flags: str, **fields: Any) -> Any:
    """Return the command of a run in stages on the texts of two folders."""
    for name, pattern in (("web", "text_0[0-4]*"), ("code", "text_0[5-9]*")):
        fields.setdefault("CORPORA", {})[name] = [str(jobs.text_files / pattern)]
    fields = {
        "STAGES": STAGES,
        "TEXT_FILES": None,
        "CHECKPOINT_EVERY_N_STEPS": 2,
        "DROPOUT_RATE": 0.1,  # makes the random numbers part of the result
        "EVAL_INTERVAL_STEPS": None,
        "task.train.eval_at_end": False,
        **fields,
    }
    return jobs.make(EXP, folder, *flags, **fields)


def run_here(job: Any, *more: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parent)  # where the experiment is found
        assert job.run_here(*more) == 0


def losses(job: Any) -> dict[int, float]:
    """By step."""
    return {record["step"]: record["loss"] for record in read_metrics(job.folder).train}


@pytest.fixture(scope="module")
def never_stopped(jobs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    job = make(jobs, tmp_path_factory.mktemp("whole") / "job", num_devices=8)
    run_here(job)
    return job


def kill_at(job: Any, step: int, running: list) -> None:
    """Kill the run once it has reported a step."""
    process = job.start()
    running.append(process)
    job.wait_for(process, lambda: step in job.steps_logged())
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([15], id="at a border", marks=pytest.mark.slow),
        pytest.param(sorted(random.Random(0).sample(range(2, STEPS), 20)), marks=pytest.mark.slow),
    ],
)
def test_a_run_in_stages_that_was_killed_equals_an_uninterrupted_one(
    steps: list[int], jobs: Any, never_stopped: Any, tmp_path: Path, running: list
):
    job = make(jobs, tmp_path / "job", num_devices=8)
    for step in steps:
        kill_at(job, step, running)
    assert "resuming from step" in job.run()
    assert losses(job) == losses(never_stopped)
    whole = jobs.read_checkpoint(never_stopped, STEPS)
    jobs.assert_same_bits(jobs.read_checkpoint(job, STEPS), whole)


@pytest.mark.slow
def test_steps_and_tokens_of_stages_are_reported(never_stopped: Any):
    records = {record["step"]: record for record in read_metrics(never_stopped.folder).train}
    tokens = [records[step]["tokens"] for step in (1, 15, 16, 30, 45, STEPS)]
    assert tokens == [64, 960, 1088, 2880, 2880 + 15 * 256, 2880 + 15 * 256 + 15 * 128]


@pytest.mark.slow
def test_a_run_in_stages_moves_between_numbers_of_hosts(
    jobs: Any, never_stopped: Any, tmp_path: Path
):
    legs = [(2, 4, 10), (1, 4, 25), (4, 2, 40), (2, 2, None)]  # processes, devices each, last step
    for processes, devices, last in legs:
        job = make(jobs, tmp_path / "job", num_devices=devices)
        if last is None:
            job.run_as(processes)
            break
        with job.started_as(processes) as started:
            assert job.wait_for(started[0], lambda last=last, job=job: last in job.steps_logged())
            for process in started:
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.communicate(timeout=300)
    expected = losses(never_stopped)
    assert losses(job) == pytest.approx(expected, rel=1e-5) and len(expected) == STEPS


def test_stages_go_on_from_a_run_without_stages(jobs: Any, tmp_path: Path):
    stages = [{"until_step": 6, "batch": 8}, {"until_step": 10, "batch": 16}]
    # The schedule is the same for every number of steps.
    saves = {"CHECKPOINT_EVERY_N_STEPS": 10, "DECAY_END": 100}
    whole = make(jobs, tmp_path / "whole", STAGES=stages, **saves)
    run_here(whole)
    plain = make(jobs, tmp_path / "plain", STAGES=None, MAX_STEPS=6, **saves)
    run_here(plain)
    restored = f"--restore_checkpoint_dir={plain.folder}"
    branch = make(jobs, tmp_path / "branch", restored, STAGES=stages, **saves)
    run_here(branch)
    assert losses(plain) | losses(branch) == losses(whole)
    assert len(losses(branch)) == 4


@pytest.mark.slow
def test_a_plan_shows_each_stage(jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture):
    job = make(jobs, tmp_path / "job")
    run_here(job, "--mode=plan", "--json")
    plan = json.loads(capsys.readouterr().out)
    shapes = [(stage["steps"], stage["batch"], stage["length"]) for stage in plan["stages"]]
    assert shapes == [(15, 8, 8), (15, 16, 8), (15, 16, 16), (15, 8, 16)]
