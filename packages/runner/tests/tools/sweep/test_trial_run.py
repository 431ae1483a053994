"""What a sweep reads of its trials."""

from __future__ import annotations

import json
from pathlib import Path

from layerkit_runner.tools.sweep.trial_run import TrialMetrics


def test_skipped_training_steps_do_not_end_a_trial(tmp_path: Path):
    log = tmp_path / "metrics.jsonl"
    records = [{"step": step, "loss": "NaN"} for step in range(1, 6)]
    records.append({"step": 6, "dataset": "heldout", "loss": 0.5})
    log.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    metrics = TrialMetrics(log, dataset="heldout", name="loss")
    assert metrics.read() == [(6, 0.5)]
    assert metrics.problem == ""


def test_the_first_problem_is_the_one_that_is_told(tmp_path: Path):
    log = tmp_path / "metrics.jsonl"
    losses = {2: 0.5, 4: "Infinity", 6: "NaN"}
    records = [{"step": n, "dataset": "heldout", "loss": loss} for n, loss in losses.items()]
    log.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    metrics = TrialMetrics(log, dataset="heldout", name="loss")
    assert metrics.read() == [(2, 0.5)]
    assert metrics.problem == "heldout/loss is inf at step 4"
