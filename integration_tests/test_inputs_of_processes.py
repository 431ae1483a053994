"""Several processes read one data set: each example once, ends together, and no death unnoticed."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.distributed.peers import LOST_PROCESS_EXIT_CODE
from layerkit_runner.distributed.watchdog import HUNG_EXIT_CODE
from layerkit_runner.observers import read_metrics

EXP = "thirteen_examples.Thirteen"
SPLITS = ("indexed", "uneven", "empty")
SHARDS = {
    1: {},
    2: {"SHARDS": [9, 4], "EMPTY_SHARDS": [13, 0]},
    4: {"SHARDS": [7, 1, 0, 5], "EMPTY_SHARDS": [0, 0, 13, 0]},
}
SECONDS_TO_NOTICE = 30.0


def make(jobs: Any, folder: Path, count: int, **fields: Any) -> Any:
    """Return a job for `count` processes of one device each; each device has its own rows."""
    fields = {**SHARDS[count], "ICI_MESH_SHAPE": [count, 1, 1], **fields}
    return jobs.make(EXP, folder, num_devices=1, **fields)


@pytest.fixture(scope="module")
def alone(jobs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the report of one process, with the global batches of all processes."""
    job = make(jobs, tmp_path_factory.mktemp("alone"), 1, PERCORE_BATCH_SIZE=4.0)
    job.run()
    return job


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_losses_of_processes_equal_those_of_one(jobs: Any, tmp_path: Path, alone: Any, count: int):
    together = check_every_example_counts_once(jobs, tmp_path, count)
    ours, reference = (read_metrics(job.folder) for job in (together, alone))
    for theirs, own in zip(reference.train, ours.train, strict=True):
        assert own["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    (expected,) = reference.evals["indexed"]
    for split in SPLITS:
        (evaluated,) = ours.evals[split]
        for name in ("loss", "accuracy", "score/total"):
            assert evaluated[name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.slow
def test_every_example_counts_once_and_all_processes_end(jobs: Any, tmp_path: Path):
    check_every_example_counts_once(jobs, tmp_path, 2)


def check_every_example_counts_once(jobs: Any, folder: Path, count: int) -> Any:
    """Run a job of `count` processes, check its counts and return it."""
    together = make(jobs, folder, count, PERCORE_BATCH_SIZE=4 / count)
    together.run_as(count)
    ours = read_metrics(together.folder)
    for split in SPLITS:
        (evaluated,) = ours.evals[split]
        assert evaluated["total_weight"] == 13.0
        assert evaluated["score/examples"] == 13
        assert evaluated["score/numbers"] == sum(range(13))
    (decoded,) = ours.evals["decode/uneven"]
    assert (decoded["examples"], decoded["numbers"]) == (13, sum(range(13)))
    (path,) = (together.folder / "decode" / "uneven").glob("*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(record["example"] for record in records) == list(range(13))
    return together


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_is_named_by_the_others(jobs: Any, tmp_path: Path, victim: int):
    job = make(jobs, tmp_path, 2, PERCORE_BATCH_SIZE=1.0, **ENDLESS)
    with job.started_as(2) as processes:
        assert job.wait_for(processes[0], job.steps_logged)
        processes[victim].kill()
        outputs = ends_of_others(processes, victim)
    for code, output in outputs:
        assert code == LOST_PROCESS_EXIT_CODE, output
        assert f"runner: {name_of(processes, victim)} is lost: " in output, output


def ends_of_others(processes: list[subprocess.Popen[str]], victim: int) -> list[tuple[int, str]]:
    """Exit codes and outputs of all but one, which end soon after it was lost."""
    began = time.monotonic()
    ends = []
    for process in processes:
        if process is not processes[victim]:
            output, _ = process.communicate(timeout=2 * SECONDS_TO_NOTICE)
            ends.append((process.returncode, output))
    assert time.monotonic() - began < SECONDS_TO_NOTICE
    return ends


def name_of(processes: list[subprocess.Popen[str]], index: int) -> str:
    host = socket.gethostname()
    return f"process {index} of {len(processes)} (host {host}, pid {processes[index].pid})"


@pytest.mark.slow
def test_an_input_that_never_returns_is_named(jobs: Any, tmp_path: Path):
    job = make(jobs, tmp_path, 1, PERCORE_BATCH_SIZE=1.0, HANGS=True, **ENDLESS)
    output = job.run("--hung_step_timeout_secs=10", code=HUNG_EXIT_CODE)
    assert "hung: reading the batch of step " in output
    # The line of the reader that waits, not only of those that wait for it.
    assert "thirteen_examples.py" in output


@pytest.mark.slow
def test_a_process_whose_input_never_returns_is_named_by_the_others(jobs: Any, tmp_path: Path):
    job = make(jobs, tmp_path, 2, PERCORE_BATCH_SIZE=1.0, HANGS=True, **ENDLESS)
    with job.started_as(2, "--hung_step_timeout_secs=20") as processes:
        ends = [process.communicate(timeout=300)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [HUNG_EXIT_CODE, HUNG_EXIT_CODE], ends
    assert f"runner: {name_of(processes, 1)} failed: hung: reading the batch of step" in ends[0]
    assert "thirteen_examples.py" in (job.folder / "logs" / "process_0001.log").read_text()


@pytest.mark.slow
def test_data_that_one_process_cannot_read_end_all(jobs: Any, tmp_path: Path):
    job = make(jobs, tmp_path, 2, PERCORE_BATCH_SIZE=1.0, FAILS=True, **ENDLESS)
    with job.started_as(2) as processes:
        outputs = [process.communicate(timeout=4 * SECONDS_TO_NOTICE)[0] for process in processes]
    # Data that cannot be read after the first step is no mistake in the command.
    assert [process.returncode for process in processes] == [1, 1], outputs
    problem = "shard-00001.bin, record 17: it ends in the middle of a number"
    assert f"{name_of(processes, 1)} failed: {problem}. Every step needs" in outputs[0]
    assert f"runner: {problem}\n" in outputs[1]
    assert "Traceback" not in outputs[1]


ENDLESS = {"MAX_STEPS": 100_000, "DECAY_START": 100_000, "DECAY_END": 200_000}
