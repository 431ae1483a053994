"""Two processes evaluate, report and stop early as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit_runner.observers import read_metrics

EXP = "watched_runs.Watched"
TURNS = "watched_runs.TakingTurns"
BAD_LABELS = "watched_runs.BadLabels"
REPORTED = ("loss", "mean_xent", "worst_xent")


@pytest.mark.slow
def test_two_processes_evaluate_and_stop_early_like_one(jobs: Any, tmp_path: Path):
    fields = {"ICI_MESH_SHAPE": "[2,2,2]", "PERCORE_BATCH_SIZE": 1.0}
    alone = jobs.make(EXP, tmp_path / "alone", num_devices=8, **fields)
    alone.run()
    together = jobs.make(EXP, tmp_path / "together", num_devices=4, **fields)
    output = together.run_as(2)[0]
    assert "stopped early after step 3: Told says so" in output
    assert together.steps_logged() == alone.steps_logged() == [1, 2, 3]
    ours, reference = (read_metrics(job.folder) for job in (together, alone))
    for mine, other in (
        (ours.train, reference.train),
        (ours.evals["train"], reference.evals["train"]),
    ):
        for name in REPORTED:
            expected = [record[name] for record in other]
            assert [record[name] for record in mine] == pytest.approx(expected, rel=1e-5)
    # What is evaluated after a step is what the next one trains on, before its update.
    ahead = [record["loss"] for record in ours.evals["train"]]
    assert ahead[:2] == pytest.approx([record["loss"] for record in ours.train[1:]], rel=1e-5)
    assert b"summaries/picture/2" in summaries(together.folder)
    # The same command again trains no further.
    assert "stopped early after step 3: Told says so" in together.run_as(2)[0]
    assert together.steps_logged() == [1, 2, 3]


@pytest.mark.slow
def test_both_processes_skip_the_bad_steps_of_one_and_stop_together(jobs: Any, tmp_path: Path):
    """Short batches are steps 1, 2, 4, 5, 7 and 8, so steps 4 and 5 are the first bad ones."""
    fields = {"ICI_MESH_SHAPE": "[2,2,2]", "PERCORE_BATCH_SIZE": 1.0}
    job = jobs.make(BAD_LABELS, tmp_path / "job", num_devices=4, **fields)
    output = job.run_as(2, code=65)[0]
    warnings = [line for line in output.splitlines() if line.startswith("WARNING: step")]
    assert [line.split(":")[1] for line in warnings] == [" step 4", " step 5"]
    assert "training stopped after step 5: 2 steps in a row" in output
    records = read_metrics(job.folder).train
    valid = {record["step"]: record["learning/is_valid_step"] for record in records}
    assert {step for step, is_valid in valid.items() if not is_valid} == {4, 5}
    # The same command resumes, with a higher limit to its end.
    job.run_as(2, "--fdl.MAX_SKIPPED=10")
    state = jobs.read_checkpoint(job, 8)
    assert all(np.all(np.isfinite(leaf)) for leaf in state.leaves.values())


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, 5])
def test_two_processes_interleave_programs_like_one(jobs: Any, tmp_path: Path, steps: int):
    """Compare also a run that stops within a turn and resumes as one process."""
    fields = {"ICI_MESH_SHAPE": "[2,2,2]", "PERCORE_BATCH_SIZE": 1.0}
    alone = jobs.make(TURNS, tmp_path / "alone", num_devices=8, **fields)
    alone.run()
    together = jobs.make(TURNS, tmp_path / "together", num_devices=4, **fields)
    told = together.run_as(2, f"--fdl.MAX_STEPS={steps}")[0]
    assert "program      short, 2 of every 3 steps" in told
    resumed = jobs.make(TURNS, tmp_path / "together", num_devices=8, **fields)
    assert f"resuming from step {steps} " in resumed.run()
    ours, reference = (read_metrics(job.folder).train for job in (resumed, alone))
    assert [record["step"] for record in ours] == list(range(1, 9))
    turns = {"short/loss": [1, 2, 4, 5, 7, 8], "long/loss": [3, 6], "loss": list(range(1, 9))}
    for name, at in turns.items():
        mine, other = (
            {record["step"]: record[name] for record in records if name in record}
            for records in (ours, reference)
        )
        assert list(mine) == at
        assert mine == pytest.approx(other, rel=1e-5)


def summaries(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (folder / "summaries" / "train").iterdir())
