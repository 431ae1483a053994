"""`runner scaling` on recorded runs: losses of any data set, and fields that no ladder has."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.scaling import command
from layerkit_runner.tools.scaling.fit import fit_law

METRIC = "heldout/score/accuracy"


def write_ladder(folder: Path, **fields: str) -> None:
    """Write three finished rungs, with `fields` beside those of the ladder."""
    tables = [f"[[trials]]\nSIZE = {size}" for size in (1, 2, 4)]
    text = "\n".join([f'metric = "{METRIC}"', *tables, "[larger]\nSIZE = 8\nRATE = 0.5", ""])
    folder.mkdir()
    (folder / "ladder.toml").write_text(text)
    for size in (1, 2, 4):
        write_job(folder / "trials" / f"{size:04d}", size, **fields)


def write_job(job: Path, size: int, **fields: str) -> None:
    """Write a finished run of a model with so many weights."""
    job.mkdir(parents=True)
    step = {"num_params": size, "tokens_per_step": 2 * size, "flops_per_step": 12 * size**2}
    step["num_devices"] = 1
    record = {"dataset": "heldout", "loss": 9.0, "score/accuracy": 2.0 / size}
    lines = [
        {"event": "start", "step": 0, "time": 1.0, "num_train_steps": 10, **step},
        {"step": 10, "time": 2.0, **record},
        {"event": "end", "time": 3.0, "reason": "finished"},
    ]
    (job / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = {"SIZE": str(size), **fields}
    config = {"experiment": "a.B", "overrides": overrides, "fields": {}, "config": {}}
    (job / "config.json").write_text(json.dumps(config))


def test_fit_reads_a_metric_with_a_slash_and_names_fields_beside_the_ladder(
    tmp_path, monkeypatch, capsys, raises
):
    monkeypatch.setattr(command, "fit_law", functools.partial(fit_law, num_draws=5))
    write_ladder(tmp_path / "other", RATE="0.5", DIMS="7")
    job = str(tmp_path / "other" / "trials" / "0001")
    with raises(UsageError, owner=job, field="fields", value={"DIMS": "7"}):
        command.run_scaling(["fit", str(tmp_path / "other")])
    printed = capsys.readouterr().out
    assert "L(C) = " in printed and "left out" not in printed
    assert not (tmp_path / "other" / "prediction.json").exists()
    write_ladder(tmp_path / "same", RATE="0.5")
    with pytest.raises(UsageError, match="a.B"):  # which is resolved next
        command.run_scaling(["fit", str(tmp_path / "same")])
    config = tmp_path / "same" / "trials" / "0002" / "config.json"
    content = json.loads(config.read_text()) | {"arguments": ["--init_from=/base"]}
    config.write_text(json.dumps(content))
    with raises(UsageError, owner=str(config.parent), value=({"init_from": "/base"}, 1)):
        command.run_scaling(["fit", str(tmp_path / "same")])
    write_ladder(tmp_path / "images", RATE="0.5")
    for metrics in (tmp_path / "images").glob("*/*/metrics.jsonl"):
        metrics.write_text(re.sub(r'(?<="tokens_per_step": )\d+', "0", metrics.read_text()))
    with raises(UsageError, field="rungs", value=0):
        command.run_scaling(["fit", str(tmp_path / "images")])


def test_fit_names_fields_that_the_larger_run_lacks_and_runs_without_a_result(
    tmp_path, monkeypatch, capsys, raises
):
    monkeypatch.setattr(command, "fit_law", functools.partial(fit_law, num_draws=5))
    write_ladder(tmp_path / "a", DIMS="7")
    ladder = tmp_path / "a" / "ladder.toml"
    text = ladder.read_text().replace("[[trials]]", "[[trials]]\nDIMS = 7")
    ladder.write_text(text + "[[trials]]\nSIZE = 8\nDIMS = 7\n")
    failed = tmp_path / "a" / "trials" / "0003"
    failed.mkdir()
    (failed / "output.txt").write_text("RuntimeError: RESOURCE_EXHAUSTED\n")
    with raises(UsageError, field="larger", value=["DIMS"]):
        command.run_scaling(["fit", str(tmp_path / "a")])
    printed = capsys.readouterr().out
    assert f"left out: {failed}" in printed and "RESOURCE_EXHAUSTED" in printed
    assert "1 of 4 runs of the ladder" in printed


def test_grade_of_a_run_of_another_size_is_an_error(tmp_path, raises):
    told = {"metric": METRIC, "size": {"N": 8, "D": 160.0, "C": 7680.0}, "time": 0.0}
    (tmp_path / "prediction.json").write_text(json.dumps(told))
    write_job(tmp_path / "larger", 16)
    with raises(UsageError, owner=str(tmp_path / "larger"), field="N, D, C"):
        command.run_scaling(["grade", str(tmp_path)])


def test_plan_in_a_store_is_an_error(raises, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--exp=lm.Toy", "--flops=1e9", "--job_log_dir=gs://bucket/job"]
    with raises(UsageError, field="--job_log_dir", value="gs://bucket/job"):
        command.run_scaling(["plan", *words])
    assert not [*tmp_path.iterdir()]
