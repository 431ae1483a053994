"""Stopping politely, damage on disk, and what evaluation finds afterwards: one job's life.

The job trains LocalText on small texts. A twin that nobody disturbs tells what must come out.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

EXP = "lm.quickstart.LocalText"
STEPS = 64
# Long enough that a signal sent at the first step of a process comes well before its last.
LENGTH = {"MAX_STEPS": STEPS, "CHECKPOINT_EVERY_N_STEPS": 24, "EVAL_INTERVAL_STEPS": 32}
# As many as this process has, in which the twin is trained.
DEVICES = {"num_devices": 8}


@pytest.fixture(scope="module")
def twin(jobs: Any, tmp_path_factory: Any) -> tuple[Any, str]:
    """Run a job; return it and its output."""
    job = jobs.make(EXP, tmp_path_factory.mktemp("twin") / "job", **DEVICES, **LENGTH)
    return job, job.output_here()


@pytest.fixture(scope="module")
def disturbed(
    jobs: Any, tmp_path_factory: Any, twin: tuple[Any, str]
) -> tuple[Any, dict[str, str]]:
    """Return a finished job that was stopped, and then lost its newest checkpoint.

    The programs are those that the twin has compiled.
    """
    job = jobs.make(EXP, tmp_path_factory.mktemp("disturbed") / "job", **DEVICES, **LENGTH)
    said = {"stopped": stopped_after_a_save(job)}
    newest = max(job.checkpoints.glob("checkpoint_*"))
    arrays = max((newest / "state" / "d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(arrays.read_bytes())
    content[len(content) // 2] ^= 1
    arrays.write_bytes(content)
    said["damaged"] = f"{newest.name} {arrays.name}"
    said["finished"] = job.run()
    return job, said


def stopped_after_a_save(job: Any) -> str:
    """Send SIGTERM to a process after its first checkpoint; return its output."""
    process = job.start()
    assert job.wait_for(process, (job.checkpoints / "checkpoint_00000024").exists)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    return output


def evaluations(job: Any, mode: str = "") -> list[dict[str, Any]]:
    path = job.folder / f"metrics{mode}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if "dataset" in record]


def test_a_signal_saves_and_leaves(disturbed: tuple[Any, dict[str, str]]):
    _, said = disturbed
    assert "SIGTERM: finishing this step, saving, leaving" in said["stopped"]
    saved = [line for line in said["stopped"].splitlines() if line.startswith("saved at step")]
    assert len(saved) == 1
    step = int(saved[0].split()[3].rstrip(";"))
    assert 24 < step < STEPS
    assert saved[0] == f"saved at step {step}; run the same command to resume"


def test_damaged_checkpoint_is_reported_and_moved_aside(disturbed: tuple[Any, dict[str, str]]):
    job, said = disturbed
    folder, file = said["damaged"].split()
    step = int(folder.removeprefix("checkpoint_"))
    assert f"CHECKPOINT DAMAGED: step {step} in {job.checkpoints / folder}" in said["finished"]
    assert f"state/d/{file}: altered, expected " in said["finished"]
    assert f"It was moved aside to damaged_{folder}." in said["finished"]
    assert step > 24
    assert f"resuming from step 24 of {job.checkpoints}" in said["finished"]
    assert "Step 24 is used instead; work lost: " in said["finished"]


def test_result_does_not_depend_on_interruptions(
    jobs: Any, twin: tuple[Any, str], disturbed: tuple[Any, dict[str, str]]
):
    jobs.assert_same_bits(
        jobs.read_checkpoint(disturbed[0], STEPS), jobs.read_checkpoint(twin[0], STEPS)
    )
    final = [evaluations(job)[-1] for job in (disturbed[0], twin[0])]
    assert final[0]["step"] == final[1]["step"] == STEPS
    assert final[0]["loss"] == final[1]["loss"]
    samples = [
        (job.folder / f"decode/prompts/step_{STEPS:08d}.jsonl").read_text()
        for job in (disturbed[0], twin[0])
    ]
    assert samples[0] == samples[1]


def test_job_folder_has_the_documented_files(twin: tuple[Any, str]):
    job, _ = twin
    names = {path.name for path in job.folder.iterdir()}
    assert names == {
        "checkpoints",
        "config.json",
        "config.txt",
        "decode",
        "goodput.json",
        "last_checkpoint.json",
        "loss_curve.png",
        "metrics.jsonl",
        "summaries",
    }
    assert sorted(path.name for path in job.checkpoints.iterdir()) == [
        "checkpoint_00000024",
        "checkpoint_00000048",
        "checkpoint_00000064",
        "evaluations.json",
    ]
    assert job.steps_logged() == list(range(1, STEPS + 1))
    assert [record["step"] for record in evaluations(job)] == [32, 64]


def test_start_and_end_reports_are_printed(twin: tuple[Any, str]):
    lines = twin[1].splitlines()
    before_step_1 = next(n for n, line in enumerate(lines) if line.startswith("step 1/"))
    assert before_step_1 < 40
    start = "\n".join(lines[:before_step_1])
    for told in ("experiment", "parameters", "partitioner", "batch", "state", "writing to"):
        assert told in start
    end = lines[before_step_1:]
    for begin in (
        "heldout: ",
        "  for comparison: trigram table: ",
        "speed: ",
        "sample (",
        "goodput: ",
        "next:",
    ):
        assert sum(line.startswith(begin) for line in end) == 1


@pytest.mark.slow
def test_evaluation_finds_the_loss_that_training_ended_with(twin: tuple[Any, str]):
    job, output = twin
    evaluated = job.run("--mode=eval")
    line = next(line for line in output.splitlines() if line.startswith("heldout: "))
    assert line in evaluated.splitlines()
    at_end, alone = evaluations(job)[-1], evaluations(job, "_eval")[-1]
    for name in ("step", "dataset", "loss", "xent", "accuracy"):
        assert alone[name] == at_end[name]


@pytest.mark.slow
def test_decoding_once_is_enough(twin: tuple[Any, str], tmp_path: Path, jobs: Any):
    source, _ = twin
    restored = f"--restore_checkpoint_dir={source.folder}"
    job = jobs.make(EXP, tmp_path / "decoded", restored, **DEVICES)
    job.run("--mode=decode_once")
    output = job.folder / f"decode/prompts/step_{STEPS:08d}.jsonl"
    assert not (job.folder / "checkpoints").exists()
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(records) == 2
    for record in records:
        written = {"example", "prompt", "continuation", "log_prob", "num_tokens", "score"}
        assert set(record) == written
        assert 1 <= record["num_tokens"] <= 4
        assert record["log_prob"] < 0
    # Weights, prompts and seed are those of the training job, and so is what it wrote.
    assert output.read_text() == (source.folder / output.relative_to(job.folder)).read_text()


@pytest.mark.slow
def test_the_recorded_arguments_make_the_same_run(
    twin: tuple[Any, str], tmp_path: Path, jobs: Any, cache: Path
):
    job, _ = twin
    arguments = json.loads((job.folder / "config.json").read_text())["arguments"]
    again = jobs.make(EXP, tmp_path / "again", **DEVICES)
    folders = [f"--job_log_dir={again.folder}", f"--jax_compilation_cache={cache}"]
    process = again.start_with([*arguments, *folders])
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    jobs.assert_same_bits(jobs.read_checkpoint(again, STEPS), jobs.read_checkpoint(job, STEPS))
    assert (again.folder / "config.txt").read_text() == (job.folder / "config.txt").read_text()


@pytest.mark.slow
def test_longer_training_resumes(twin: tuple[Any, str], tmp_path: Path, jobs: Any):
    source, _ = twin
    restored = f"--restore_checkpoint_dir={source.folder}"
    job = jobs.make(EXP, tmp_path / "longer", restored, **DEVICES)
    output = job.run("--restore_checkpoint_step=24", "--fdl.task.train.num_train_steps=28")
    assert f"resuming from step 24 of {source.checkpoints}" in output
    assert job.steps_logged() == [25, 26, 27, 28]
