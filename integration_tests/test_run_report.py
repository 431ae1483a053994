"""The report of a real run that is killed, resumed and failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.tools.report.command import run_status
from layerkit_runner.tools.report.record import read_jobs

SIZES = {
    "NUM_LAYERS": 1,
    "MODEL_DIMS": 16,
    "HIDDEN_DIMS": 32,
    "NUM_HEADS": 2,
    "MAX_SEQ_LEN": 16,
    "MAX_STEPS": 900,
    "SUMMARY_INTERVAL_STEPS": 1,
    "EVAL_INTERVAL_STEPS": 300,
    "CHECKPOINT_EVERY_N_STEPS": 100,
    "DECODE_INTERVAL_STEPS": 100,
    "PROMPT_LENGTH": 8,
    "MAX_DECODE_STEPS": 4,
    "NUM_PROMPTS": 2,
    "PERCORE_BATCH_SIZE": 1.0,
}


@pytest.mark.slow
def test_report_of_a_run_that_was_killed_and_resumed(jobs: Any, tmp_path: Path, running: list):
    fields = {"TEXT_FILES": f"['{jobs.text_files}']", **SIZES}
    job = jobs.make("reported_run.Reported", tmp_path / "job", **fields)
    process = job.start()
    running.append(process)
    page = job.folder / "report.html"
    saved = job.folder / "checkpoints" / "checkpoint_00000100"  # named so when it is complete
    job.wait_for(process, lambda: page.exists() and saved.exists())
    (record,) = read_jobs([job.folder])
    assert record.state == "running"
    assert record.seconds_left is not None
    process.kill()
    process.communicate()
    assert 'http-equiv="refresh"' in page.read_text()
    (killed,) = read_jobs([job.folder])
    assert (killed.state, run_status([str(job.folder)])) == ("killed", 1)
    assert (killed.samples[-1][0], killed.checkpoints[0]) == (100, 100)

    job.run()
    (record,) = read_jobs([job.folder])
    assert (record.state, record.newest["step"], record.errors) == ("finished", 900, [])
    events = [(event["event"], event.get("reason")) for event in record.metrics.events]
    assert events == [("start", None), ("resume", None), ("end", "finished")]
    assert record.metrics.events[1]["step"] in killed.checkpoints
    steps = [row["step"] for row in record.metrics.train]
    assert steps == [*range(1, 901)]  # repeated steps count once
    assert record.metrics.info["environment"]["jax"]
    goodput = json.loads((job.folder / "goodput.json").read_text())
    assert len(goodput["runs"]) == 2
    for phase, seconds in goodput["seconds"].items():
        assert abs(sum(run[phase] for run in goodput["runs"]) - seconds) < 0.01
    text = page.read_text()
    assert "job, start 2 of 2" in text
    assert 'http-equiv="refresh"' not in text  # written at the end


def test_error_of_a_run_is_recorded(jobs: Any, tmp_path: Path):
    job = jobs.make("lm.quickstart.LocalText", tmp_path / "job", LEARNING_RATE=1e38)
    job.run("--fdl.task.train.max_consecutive_skipped_steps=1", code=65)
    (record,) = read_jobs([job.folder])
    assert record.state == "failed"
    assert "NonFiniteError: training stopped after step" in record.errors[-1]
