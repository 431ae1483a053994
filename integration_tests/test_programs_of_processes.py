"""Two processes evaluate, report and stop early as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.observers import read_metrics

EXP = "watched_runs.Watched"
REPORTED = ("loss", "mean_xent", "worst_xent")


@pytest.mark.slow
def test_two_processes_are_watched_as_one_is(jobs: Any, tmp_path: Path):
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


def summaries(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (folder / "summaries" / "train").iterdir())
