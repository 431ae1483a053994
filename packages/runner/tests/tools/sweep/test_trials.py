"""The folder of a sweep, its locks, and the metrics of its trials."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.files.locks import lock, try_lock
from layerkit_runner.run.job_folder import STUDY_RECORD
from layerkit_runner.tools.sweep.trials import RECORD, SweepFolder, TrialMetrics


def test_lock_is_released_when_its_process_is_killed(tmp_path):
    path = tmp_path / "new" / "a.lock"
    program = (
        "import pathlib, sys; from layerkit_runner.tools.sweep.trials import lock\n"
        "with lock(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert try_lock(path) is None
        process.kill()
    with lock(path):
        assert try_lock(path) is None
    held = try_lock(path)
    assert held is not None
    held.close()


def test_store_or_folder_of_a_run_is_an_error(raises, tmp_path):
    with raises(UsageError, field="--job_log_dir", value="gs://a/b"):
        SweepFolder("gs://a/b")
    (tmp_path / "checkpoints").mkdir()
    with raises(UsageError, field="--job_log_dir", value=str(tmp_path)):
        SweepFolder(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000], ids=lambda text: text[:5])
def test_damaged_record_of_a_sweep_is_an_error(raises, tmp_path, text):
    (tmp_path / "study.json").write_text(text)
    with raises(UsageError, owner=str(tmp_path / "study.json")):
        SweepFolder(str(tmp_path)).read_record()


@pytest.mark.parametrize(
    ("trained", "evaluated", "read", "problem"),
    [
        (dict.fromkeys(range(1, 6), "NaN"), {6: 0.5}, [(6, 0.5)], ""),
        ({}, {2: 0.5, 4: "Infinity", 6: "NaN"}, [(2, 0.5)], "heldout/loss is inf at step 4"),
    ],
    ids=["skipped training steps", "evaluations"],
)
def test_first_evaluation_that_is_not_finite_is_the_problem_of_a_trial(
    tmp_path, trained, evaluated, read, problem
):
    log = tmp_path / "metrics.jsonl"
    records = [{"step": step, "loss": loss} for step, loss in trained.items()]
    records += [{"step": n, "dataset": "heldout", "loss": loss} for n, loss in evaluated.items()]
    log.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    metrics = TrialMetrics(log, dataset="heldout", name="loss")
    assert (metrics.read(), metrics.problem) == (read, problem)


def test_job_folder_has_the_name_of_the_record_of_a_sweep():
    assert STUDY_RECORD == RECORD
